"""Matchers of llguidance: masks, ends, rollback, forced text, and what must never happen."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from fakes.grammar_walks import accepts, allowed_ids, walk
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.llg import LlguidanceCompiled, compile_json_schema, compile_lark, compile_regex_llg
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.model import ModelSpec

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: Any, vocabulary: Vocabulary, **options: Any) -> LlguidanceCompiled:
    return compile_json_schema(GrammarSpec(kind="json_schema", text=json.dumps(value), **options), vocabulary)


def test_masks_are_packed_overwritten_and_end_only_when_complete(vocabulary: Vocabulary) -> None:
    matcher = compile_regex_llg("ab?", vocabulary).matcher()
    first = allowed_ids(matcher, vocabulary)
    assert {vocabulary.tokens[i] for i in first} == {b"a", b"ab"}
    assert not matcher.accept(vocabulary.eos_ids[0])
    assert not matcher.accept(vocabulary.encode("b")[0])
    assert matcher.accept(vocabulary.encode("a")[0])
    assert matcher.complete
    assert not matcher.finished
    assert set(vocabulary.eos_ids) <= set(allowed_ids(matcher, vocabulary))
    assert matcher.accept(vocabulary.encode("b")[0])
    assert matcher.finished
    assert allowed_ids(matcher, vocabulary) == list(vocabulary.eos_ids)
    assert matcher.accept(vocabulary.eos_ids[0])
    assert matcher.complete
    assert matcher.finished
    assert allowed_ids(matcher, vocabulary) == []
    assert not matcher.accept(vocabulary.eos_ids[0])
    assert matcher.error == ""


def test_control_tokens_are_never_allowed(vocabulary: Vocabulary) -> None:
    """Not inside strings, not for a grammar that allows any text, not by their spelling."""
    for compiled in (compile_regex_llg("(?s:.)*", vocabulary), schema({"type": "string"}, vocabulary)):
        matcher = compiled.matcher()
        for text in ("", '"', "x <|im_st"):
            for token in vocabulary.encode(text):
                matcher.accept(token)
            leaked = set(allowed_ids(matcher, vocabulary)) & set(vocabulary.control_ids)
            assert leaked <= set(vocabulary.eos_ids)
            assert leaked == (set(vocabulary.eos_ids) if matcher.complete else set())
            for token in set(vocabulary.control_ids) - set(vocabulary.eos_ids):
                assert not matcher.fork().accept(token)
    assert accepts(schema({"type": "string"}, vocabulary), vocabulary, '"<|im_end|>"')


@pytest.mark.parametrize("token", [-1, 49_152, 1 << 30])
def test_ids_outside_the_vocabulary_are_refused(vocabulary: Vocabulary, token: int) -> None:
    matcher = compile_regex_llg("a*", vocabulary).matcher()
    assert not matcher.accept(token)
    assert matcher.error == ""


def test_rollback_and_fork_are_replays(vocabulary: Vocabulary) -> None:
    compiled = schema(PERSON, vocabulary)
    tokens = [*vocabulary.encode('{\n  "name": "Ada 中文 😀",\n  "age": 36\n}'), vocabulary.eos_ids[0]]
    masks: list[list[int]] = []
    matcher = compiled.matcher()
    for token in tokens:
        masks.append(allowed_ids(matcher, vocabulary))
        assert matcher.accept(token)
    draw = random.Random(7)
    for _ in range(20):
        back = draw.randint(1, len(tokens))
        matcher.rollback(back)
        fork = matcher.fork()
        for i in range(len(tokens) - back, len(tokens)):
            assert allowed_ids(matcher, vocabulary) == masks[i]
            assert matcher.accept(tokens[i])
        assert matcher.finished
        assert not fork.finished
        assert allowed_ids(fork, vocabulary) == masks[len(tokens) - back]


def test_taking_back_too_much_is_an_error_and_not_an_exception(vocabulary: Vocabulary) -> None:
    matcher = compile_regex_llg("abc", vocabulary).matcher()
    assert matcher.accept(vocabulary.encode("a")[0])
    matcher.rollback(5)
    assert matcher.error
    assert allowed_ids(matcher, vocabulary) == []
    assert not matcher.accept(vocabulary.encode("a")[0])
    assert matcher.forced(4) == []


@pytest.mark.parametrize("seed", range(4))
def test_forced_text_is_what_masks_would_allow_and_canonical(vocabulary: Vocabulary, seed: int) -> None:
    """Along random walks: each forced token is in the mask, and the whole output is the canonical encoding of its text."""
    draw = random.Random(seed)
    value: dict[str, Any] = {
        "type": "object",
        "properties": {
            "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99},
            "shipping_address_confirmed": {"type": "boolean"},
            "preferred_language": {"enum": ["中文", "English", "Français"]},
        },
        "required": ["customer_identification_number", "shipping_address_confirmed", "preferred_language"],
        "additionalProperties": False,
    }
    matcher = schema(value, vocabulary, whitespace="compact").matcher()
    out: list[int] = []
    forced = 0
    while not matcher.finished:
        run = matcher.forced(64)
        assert matcher.forced(1) == run[:1]
        for token in run:
            assert token in allowed_ids(matcher, vocabulary)
            assert matcher.accept(token)
        forced += len(run)
        out += run
        if not run:
            ids = [i for i in allowed_ids(matcher, vocabulary) if i not in vocabulary.eos_ids]
            out.append(draw.choice(ids))
            assert matcher.accept(out[-1])
    assert forced > len(out) // 3
    text = vocabulary.tokenizer.decode_str(out)
    assert json.loads(text).keys() == value["properties"].keys()
    assert matcher.forced(8) == []


def test_nothing_is_forced_where_the_output_may_end(vocabulary: Vocabulary) -> None:
    matcher = compile_regex_llg("abc(def)?", vocabulary).matcher()
    for token in vocabulary.encode("abc"):
        assert matcher.accept(token)
    assert matcher.complete
    assert matcher.forced(4) == []


def test_white_space_is_bounded(vocabulary: Vocabulary) -> None:
    compiled = schema(PERSON, vocabulary)
    document = {"name": "x", "age": 1}
    for text in (
        json.dumps(document),
        json.dumps(document, separators=(",", ":")),
        *(json.dumps(document, indent=i) for i in (1, 2, 4, 8, "\t")),
    ):
        assert accepts(compiled, vocabulary, text), text
    for blanks in (" " * 200, "  ", "\n\n", " \n", "\n" + " " * 49, "\n" + "\t" * 17):
        assert not accepts(compiled, vocabulary, f'{{{blanks}"name": "x", "age": 1}}'), blanks
    for text in (' {"name": "x", "age": 1}', '{"name": "x", "age": 1}\n', '{"name": "x", "age": 1} '):
        assert not accepts(compiled, vocabulary, text)


def test_compact_and_custom_white_space(vocabulary: Vocabulary) -> None:
    compact = schema(PERSON, vocabulary, whitespace="compact")
    assert accepts(compact, vocabulary, '{"name":"x","age":1}')
    assert not accepts(compact, vocabulary, '{"name": "x","age":1}')
    custom = schema(PERSON, vocabulary, whitespace="[ ]{0,2}")
    assert accepts(custom, vocabulary, '{  "name":"x",  "age": 1}')
    assert not accepts(custom, vocabulary, '{\n"name":"x","age":1}')


@pytest.mark.parametrize("text", ['"中文"', '"😀🙏"', '"é\\n\\"\\\\"', '"\u2028"', '"\U0010ffff"', '"ضاد"'])
def test_strings_hold_any_unicode(vocabulary: Vocabulary, text: str) -> None:
    if vocabulary.can_spell(text):
        assert accepts(schema({"type": "string"}, vocabulary), vocabulary, text)


def test_constants_that_no_token_spells_are_refused(vocabulary: Vocabulary) -> None:
    for value in ({"const": "a\U00040000b"}, {"properties": {"k": {"enum": ["x", "a\U00040000b"]}}}):
        with pytest.raises(GrammarError) as caught:
            schema(value, vocabulary)
        assert caught.value.info.code == "unsatisfiable_schema"
        assert caught.value.info.param


def test_names_spelled_with_escapes_do_not_pass_for_other_properties(vocabulary: Vocabulary) -> None:
    compiled = schema({"properties": {"a": {"type": "integer"}}}, vocabulary)
    assert accepts(compiled, vocabulary, '{"b": "x"}')
    assert not accepts(compiled, vocabulary, '{"a": "x"}')
    assert not accepts(compiled, vocabulary, '{"\\u0061": "x"}')


@pytest.mark.parametrize("pattern", ["[", "(ab", "a{3,1}", "*x", "(?<n"])
def test_a_broken_expression_is_an_error(vocabulary: Vocabulary, pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_regex_llg(pattern, vocabulary)
    assert caught.value.info.code == "invalid_regex"


def test_an_empty_language_is_an_error(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError):
        compile_lark("start: start", vocabulary)


def test_several_ends(smollm2_spec: ModelSpec) -> None:
    made = Vocabulary.load(msgspec.structs.replace(smollm2_spec, eos_token_ids=(0, 2)))
    for end in (0, 2):
        matcher = compile_regex_llg("a", made).matcher()
        assert matcher.accept(made.encode("a")[0])
        assert allowed_ids(matcher, made) == [0, 2]
        assert matcher.accept(end)


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[0-9]{4}", "[😀-🙏]{1,4}", "[一-龥]{2,6}", "(yes|no|也许)"])
def test_walks_match_their_expression(vocabulary: Vocabulary, pattern: str) -> None:
    compiled = compile_regex_llg(pattern, vocabulary)
    ended = [text for seed in range(15) if (text := walk(compiled, vocabulary, seed)) is not None]
    assert len(ended) >= 12
    assert all(re.fullmatch(pattern, text) for text in ended)


def test_masks_do_not_touch_their_neighbours(vocabulary: Vocabulary) -> None:
    block = np.full((3, vocabulary.words), 7, dtype=np.int32)
    compile_regex_llg("a", vocabulary).matcher().fill(block[1])
    assert (block[0] == 7).all()
    assert (block[2] == 7).all()
    assert block[1].any()


@pytest.mark.parametrize("value", [{"const": "a<|im_end|>b"}, {"enum": ["<|im_start|>", "x<repo_name>"]}])
def test_constants_that_look_like_control_tokens_are_spelled(vocabulary: Vocabulary, value: dict[str, Any]) -> None:
    compiled = schema(value, vocabulary, whitespace="compact")
    allowed = value.get("enum", [value.get("const")])
    assert all(json.loads(walk(compiled, vocabulary, seed) or "null") in allowed for seed in range(6))
