"""Streamed decoding equals the tokenizer's own decoding of the whole, for every kind of decoder."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fakes.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, byte_tokenizer, ids_of
from fakes.tokenizers_zoo import metaspace, sentencepiece_like, wordpiece
from radixcast.actors.detokenizer.decoding import stream_decoder
from radixcast.actors.detokenizer.token_table import TokenTable
from radixcast.protocols.model import ModelSpec

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_tokenizer,
    "sentencepiece": sentencepiece_like,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


@lru_cache(maxsize=8)
def table_of(kind: str) -> TokenTable:
    return TokenTable(KINDS[kind]())


def id_of(table: TokenTable, token: str) -> int:
    assert table.tokenizer
    found = table.tokenizer.token_to_id(token)
    assert found is not None
    return found


def stream(table: TokenTable, ids: list[int], skip_special: bool, context: tuple[int, ...] = ()) -> list[str]:
    decoder = stream_decoder(table, skip_special=skip_special, context=context)
    return [*(decoder.push(token) for token in ids), decoder.end()]


@pytest.mark.parametrize(
    ("kind", "expected"), [("bytes", "bytes"), ("sentencepiece", "pieces"), ("metaspace", "pieces"), ("wordpiece", "window")]
)
def test_kinds_are_recognised(kind: str, expected: str) -> None:
    assert table_of(kind).kind == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_decode_as_the_whole(kind: str, data: st.DataObject) -> None:
    table = table_of(kind)
    ids = data.draw(st.lists(st.integers(0, table.size - 1), max_size=24))
    skip = data.draw(st.booleans())
    whole = table.decode(ids, skip)
    assert "".join(stream(table, ids, skip)) == whole
    decoder = stream_decoder(table, skip_special=skip)
    cut = data.draw(st.integers(0, len(ids)))
    assert decoder.push_many(ids[:cut]) + decoder.push_many(ids[cut:]) + decoder.end() == whole


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=20))
def test_any_bytes_decode_as_the_whole(raw: bytes) -> None:
    """Dense in half and overlong characters, which random ids seldom are."""
    for kind in ("bytes", "sentencepiece"):
        table = table_of(kind)
        ids = list(raw) if kind == "bytes" else [b + 3 for b in raw]
        assert "".join(stream(table, ids, True)) == table.decode(ids, True)


@pytest.mark.parametrize("text", ["👨‍👩‍👧", "🇳🇱", "潮龘x馫驉k鱉", "e\u0301", " leading", "\u200bzero", "naïve café"])
def test_a_character_appears_with_its_last_byte(text: str) -> None:
    parts = stream(table_of("bytes"), ids_of(text), True)
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)
    ends = {len(text[: i + 1].encode()) for i in range(len(text))}
    assert {i + 1 for i, part in enumerate(parts) if part} == ends


def test_incomplete_character_shows_only_at_the_end() -> None:
    parts = stream(table_of("bytes"), list("a😀".encode()[:-1]), True)
    assert parts == ["a", "", "", "", "\ufffd"]


def test_byte_run_is_shown_when_it_ends() -> None:
    table = table_of("sentencepiece")
    run = [b + 3 for b in "😀é".encode()]
    the = id_of(table, "▁the")
    assert stream(table, [the, *run, the], True) == ["the", *[""] * len(run), "😀é the", ""]


def test_leading_space_depends_on_what_comes_before() -> None:
    table = table_of("sentencepiece")
    the, cat = id_of(table, "▁the"), id_of(table, "▁cat")
    assert "".join(stream(table, [cat], True)) == "cat"
    assert "".join(stream(table, [cat], True, (the,))) == " cat"
    assert "".join(stream(table, [cat], True, (0,))) == "cat", "a special token before it is no text"


def test_special_tokens_are_skipped_or_shown() -> None:
    table = table_of("bytes")
    ids = [BOS_ID, *ids_of("é")[:1], EOS_ID, *ids_of("é")[1:]]
    assert "".join(stream(table, ids, True)) == "é", "a skipped token does not break a character"
    assert "".join(stream(table, ids, False)) == table.decode(ids, False)


def test_token_bytes_and_texts() -> None:
    table = table_of("bytes")
    assert table.bytes_of(0xE4) == b"\xe4"
    assert table.text_of(0xE4) == "\ufffd"
    assert table.bytes_of(EOS_ID) == b"<|eos|>"
    assert table.bytes_of(VOCAB_SIZE + 5) == b""
    pieces = table_of("sentencepiece")
    assert pieces.bytes_of(0xE4 + 3) == b"\xe4"
    assert pieces.text_of(id_of(pieces, "▁the")) == " the"


def test_no_tokenizer_means_no_text() -> None:
    table = TokenTable(None, 100)
    assert stream(table, [1, 2, 3], True) == ["", "", "", ""]
    assert table.text_of(5) == ""


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    table = TokenTable(byte_tokenizer(), VOCAB_SIZE + 10)
    assert "".join(stream(table, [65, VOCAB_SIZE + 9, 66], True)) == "AB"


@pytest.fixture(scope="module")
def smollm2(smollm2_spec: ModelSpec) -> TokenTable:
    assert smollm2_spec.tokenizer_file
    return TokenTable(Tokenizer.from_file(smollm2_spec.tokenizer_file), smollm2_spec.config.vocab_size)


def test_smollm2_random_ids(smollm2: TokenTable) -> None:
    draw = random.Random(7)
    for _ in range(300):
        ids = [draw.randrange(smollm2.size) for _ in range(draw.randrange(1, 40))]
        for skip in (True, False):
            assert "".join(stream(smollm2, ids, skip)) == smollm2.decode(ids, skip)


@pytest.mark.parametrize(
    "text", ["Hello, world! 你好 👨‍👩‍👧‍👦 — it's  2 spaces\n\n\tdef f():\n    return 1", " starts with a space"]
)
def test_smollm2_text_comes_back(smollm2: TokenTable, text: str) -> None:
    assert smollm2.tokenizer
    assert "".join(stream(smollm2, smollm2.tokenizer.encode(text).ids, True)) == text


def test_smollm2_token_bytes_join_to_the_text(smollm2: TokenTable) -> None:
    assert smollm2.tokenizer
    text = "naïve 你好 👍🏽 end"
    assert b"".join(smollm2.bytes_of(i) for i in smollm2.tokenizer.encode(text).ids).decode() == text
