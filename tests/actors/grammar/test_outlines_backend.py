"""Automata of outlines-core: masks, ends, forced text, files; and that both backends enforce the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.byte_tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer
from radixcast.actors.grammar import outlines_backend
from radixcast.actors.grammar.interface import GrammarError, Matcher
from radixcast.actors.grammar.llg import compile_regex_llg
from radixcast.actors.grammar.outlines_backend import OutlinesCompiled
from radixcast.actors.grammar.outlines_index import (
    TokenAutomaton,
    UnusableIndex,
    build,
    index_file,
    load,
    outlines_vocabulary,
    trim,
)
from radixcast.actors.grammar.regex import normalize
from radixcast.actors.grammar.regex_tree import invert
from radixcast.actors.grammar.unwritable import unwritable
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.buffers import Int32Array

Compile = Callable[[str], OutlinesCompiled]


@pytest.fixture(scope="module")
def byte_vocabulary() -> Vocabulary:
    return Vocabulary(byte_tokenizer().to_str(), rows=VOCAB_SIZE, eos_ids=(EOS_ID,))


def compiler(vocabulary: Vocabulary) -> Compile:
    theirs = outlines_vocabulary(vocabulary)
    return lambda pattern: OutlinesCompiled(build(normalize(pattern), theirs, vocabulary.rows), vocabulary)


@pytest.fixture(scope="module")
def by_bytes(byte_vocabulary: Vocabulary) -> Compile:
    return compiler(byte_vocabulary)


@pytest.fixture(scope="module")
def by_tokens(vocabulary: Vocabulary) -> Compile:
    return compiler(vocabulary)


def mask(matcher: Matcher, vocabulary: Vocabulary) -> Int32Array:
    mask_W = np.full(vocabulary.words, -1, dtype=np.int32)
    matcher.fill(mask_W)
    return mask_W


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    bits = np.unpackbits(mask(matcher, vocabulary).view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def text_of(tokens: list[int], vocabulary: Vocabulary) -> str:
    return b"".join(vocabulary.tokens[token] for token in tokens).decode()


def walk(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, longest: int = 60) -> str | None:
    """A random output; None when it did not end in time."""
    tokens: list[int] = []
    for _ in range(longest):
        ids = allowed(matcher, vocabulary)
        assert ids, "a dead end"
        assert (set(vocabulary.eos_ids) <= set(ids)) == matcher.complete
        # Longer tokens are many; ends are few: half of the time the end is taken where there is one.
        token = vocabulary.eos_ids[0] if matcher.complete and rng.random() < 0.5 else rng.choice(ids)
        assert matcher.accept(token)
        if token in vocabulary.eos_ids:
            return text_of(tokens, vocabulary)
        tokens.append(token)
    return None


# ------------------------------------------------------------------ the matcher


def test_masks_ends_and_refusals(by_tokens: Compile, vocabulary: Vocabulary) -> None:
    matcher = by_tokens("ab?").matcher()
    a, b, eos = vocabulary.encode("a")[0], vocabulary.encode("b")[0], vocabulary.eos_ids[0]
    assert {vocabulary.tokens[i] for i in allowed(matcher, vocabulary)} == {b"a", b"ab"}
    assert not matcher.accept(eos)
    assert not matcher.accept(b)
    assert not matcher.accept(-1)
    assert not matcher.accept(vocabulary.rows + 5)
    assert matcher.accept(a)
    assert matcher.complete
    assert not matcher.finished
    assert set(allowed(matcher, vocabulary)) == {b, *vocabulary.eos_ids}
    assert matcher.accept(b)
    assert matcher.finished
    assert allowed(matcher, vocabulary) == list(vocabulary.eos_ids)
    assert matcher.accept(eos)
    assert matcher.finished
    assert allowed(matcher, vocabulary) == []
    assert not matcher.accept(eos)
    assert matcher.error == ""


def test_rollback_and_fork_equal_a_replay(by_tokens: Compile, vocabulary: Vocabulary) -> None:
    compiled = by_tokens(r"(ab|ac)+[0-9]{2}")
    tokens = [*vocabulary.encode("abac"), *vocabulary.encode("12"), vocabulary.eos_ids[0]]
    for back in range(len(tokens) + 1):
        matcher = compiled.matcher()
        assert all(matcher.accept(token) for token in tokens)
        matcher.rollback(back)
        kept = tokens[: len(tokens) - back]
        replayed = compiled.matcher()
        assert all(replayed.accept(token) for token in kept)
        fork = matcher.fork()
        for other in (matcher, fork):
            assert np.array_equal(mask(other, vocabulary), mask(replayed, vocabulary))
            assert (other.complete, other.finished) == (replayed.complete, replayed.finished)
        if back:
            assert fork.accept(tokens[len(kept)])
            assert np.array_equal(mask(matcher, vocabulary), mask(replayed, vocabulary))


def test_control_tokens_are_never_allowed(by_tokens: Compile, vocabulary: Vocabulary) -> None:
    matcher = by_tokens("(?s:.){1,3}").matcher()
    assert not set(allowed(matcher, vocabulary)) & (set(vocabulary.control_ids) - set(vocabulary.eos_ids))


def test_certain_text_is_forced_in_canonical_tokens(by_tokens: Compile, vocabulary: Vocabulary) -> None:
    document = vocabulary.encode('{"temperature": "warm", "unit": "celsius"}')
    compiled = by_tokens(r'\{"temperature": "[a-z]{1,9}", "unit": "celsius"\}')
    matcher = compiled.matcher()
    forced = matcher.forced(100)
    assert len(forced) >= 3
    assert forced == document[: len(forced)]
    assert compiled.matcher().forced(2) == forced[:2]
    for token in forced:  # masking token by token comes to the same
        assert allowed(matcher, vocabulary) == [token]
        assert matcher.accept(token)
    assert matcher.forced(100) == []
    end = document.index(vocabulary.encode('",')[0])
    for token in document[len(forced) : end + 1]:
        assert len(allowed(matcher, vocabulary)) > 1
        assert matcher.accept(token)
    assert matcher.forced(100) == document[end + 1 :]


def test_nothing_is_forced_behind_the_end(by_tokens: Compile, vocabulary: Vocabulary) -> None:
    matcher = by_tokens("yes").matcher()
    forced = matcher.forced(9)
    assert text_of(forced, vocabulary) == "yes"
    assert all(matcher.accept(token) for token in forced)
    assert matcher.finished
    assert matcher.forced(9) == []


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{3}-\d{4}",
        r"[a-z0-9._%+-]{1,12}@[a-z0-9]{1,10}\.(com|org)",
        r"(yes|no|maybe), (?:because|although) \w{2,8}[.!]",
        r"[一-龥]{2,4}：[0-9]{1,3}",
        r"[😀-🙏]{1,3}!",
        r'\{"a":\s*-?\d+, "b": ("x"|null)\}',
    ],
)
def test_walks_match_in_full(by_tokens: Compile, vocabulary: Vocabulary, pattern: str) -> None:
    compiled = by_tokens(pattern)
    ended = 0
    for seed in range(30):
        text = walk(compiled.matcher(), vocabulary, random.Random(seed))
        if text is not None:
            ended += 1
            assert re.fullmatch(pattern, text), text
    assert ended >= 20


def test_kept_masks_are_bounded(by_bytes: Compile, byte_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines_backend, "MAX_ROW_BYTES", 4 * 4 * byte_vocabulary.words)
    compiled = by_bytes("[a-z]{20}")
    assert compiled.nbytes == compiled.automaton.nbytes + 4 * 4 * byte_vocabulary.words
    matcher = compiled.matcher()
    for _ in range(20):
        assert ord("q") in allowed(matcher, byte_vocabulary)
        assert matcher.accept(ord("q"))
        assert len(compiled._rows) <= 4
    assert allowed(compiled.matcher(), byte_vocabulary) == [*range(ord("a"), ord("z") + 1)]


# ------------------------------------------------------------------ automata


def test_what_no_token_can_write_is_not_in_the_automaton(vocabulary: Vocabulary, by_tokens: Compile) -> None:
    """U+40000 begins with the byte f1, which is no token of this vocabulary: that branch would be a dead end."""
    assert 0xF1 not in vocabulary.spelled_bytes
    matcher = by_tokens("a(x|\U00040000)b").matcher()
    while not matcher.complete:
        ids = allowed(matcher, vocabulary)
        assert ids
        assert matcher.accept(ids[-1])
    with pytest.raises(UnusableIndex):
        by_tokens("a\U00040000b")
    assert not any(low <= 0x40000 <= high for low, high in invert(unwritable(vocabulary)))
    with pytest.raises(GrammarError, match="no text can match"):
        normalize("a\U00040000b", unwritable=unwritable(vocabulary))


def test_too_large_automata_are_refused(by_tokens: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixcast.actors.grammar.outlines_index.MAX_INDEX_BYTES", 1000)
    with pytest.raises(UnusableIndex, match="ways"):
        by_tokens("[a-z]{1,5}")


def test_files_hold_the_same_automaton(by_bytes: Compile, byte_vocabulary: Vocabulary, tmp_path: Path) -> None:
    automaton = by_bytes("(ab|c)+d?").automaton
    path = index_file(tmp_path, "0123")
    automaton.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["0123.npz"]
    loaded = load(path, byte_vocabulary.rows)
    assert loaded is not None
    for field in ("final", "starts", "tokens", "targets"):
        assert np.array_equal(getattr(loaded, field), getattr(automaton, field))
    assert loaded.initial == automaton.initial
    assert load(path, rows=50) is None


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"\x80\x04K\x01."])
def test_unusable_files_are_no_automata(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    assert load(path, 10) is None
    assert load(tmp_path / "missing.npz", 10) is None


@pytest.mark.parametrize(
    "broken",
    [{"initial": 2}, {"starts": [0, 1]}, {"starts": [0, 2, 1]}, {"targets": [2]}, {"targets": []}, {"tokens": [-1]}],
)
def test_inconsistent_files_are_no_automata(tmp_path: Path, broken: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"initial": 0, "final": [False, True], "starts": [0, 1, 1], "tokens": [3], "targets": [1]}

    def saved(changes: dict[str, Any]) -> Path:
        values: dict[str, Any] = {
            name: value if name == "initial" else np.array(value) for name, value in (fields | changes).items()
        }
        TokenAutomaton(**values).save(tmp_path / "grammar" / "x.npz")
        return tmp_path / "grammar" / "x.npz"

    assert load(saved({}), 10) is not None
    assert load(saved(broken), 10) is None


def test_trim_removes_the_oldest(by_bytes: Compile, tmp_path: Path) -> None:
    automaton = by_bytes("abc").automaton
    paths = [index_file(tmp_path, str(n)) for n in range(4)]
    for path in paths:
        automaton.save(path)
    size = paths[0].stat().st_size
    trim(tmp_path, 2 * size)
    assert [path.exists() for path in paths] == [False, False, True, True]
    trim(tmp_path / "nowhere", 0)


# ------------------------------------------------------------------ against llguidance

ATOMS = st.sampled_from(["a", "b", "ab", "[a-c]", "c", "[^ab]", "é", "北", "."])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(pattern=PATTERNS, seed=st.integers(0, 1000))
def test_both_backends_allow_the_same(pattern: str, seed: int, by_bytes: Compile, byte_vocabulary: Vocabulary) -> None:
    """With one token a byte there is one tokenisation, so the masks are equal, bit by bit."""
    ours = by_bytes(pattern).matcher()
    theirs = compile_regex_llg(normalize(pattern), byte_vocabulary).matcher()
    rng = random.Random(seed)
    written = bytearray()
    for _ in range(12):
        assert ours.complete == theirs.complete
        ids = allowed(ours, byte_vocabulary)
        assert ids == allowed(theirs, byte_vocabulary), (pattern, bytes(written))
        if ours.complete:
            assert re.fullmatch(pattern, written.decode()), (pattern, bytes(written))
        others = [token for token in ids if token != EOS_ID]
        if not others:
            assert ours.finished
            assert theirs.finished
            break
        token = rng.choice(others)
        assert ours.accept(token)
        assert theirs.accept(token)
        written.append(token)
