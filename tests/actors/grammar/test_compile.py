"""The one entry: every kind compiles, whatever goes wrong is a GrammarError, and automata are used where they lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.grammar_walks import accepts
from radixcast.actors.grammar import compile as compiling
from radixcast.actors.grammar.builder import Builder
from radixcast.actors.grammar.compile import compile_grammar, wants_outlines
from radixcast.actors.grammar.interface import Compiled, GrammarError
from radixcast.actors.grammar.outlines_backend import OutlinesCompiled
from radixcast.actors.grammar.outlines_index import build, index_file, outlines_vocabulary
from radixcast.actors.grammar.regex import normalize
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.errors import ErrorInfo, Overloaded
from radixcast.protocols.grammar import GrammarSpec

SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": json.loads(SCHEMA), "end": "</f>"}],
        "triggers": ["<f"],
    }
)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec(kind="regex", text="^a+b$"), "aab", "b"),
        (GrammarSpec(kind="json_schema", text=SCHEMA), '{"a": 12}', '{"b": 1}'),
        (GrammarSpec(kind="ebnf", text='root ::= "x" root | "y"'), "xxy", "xx"),
        (GrammarSpec(kind="choices", text='["one","two"]'), "two", "three"),
        (GrammarSpec(kind="structural_tag", text=TAG), 'so <f>{"a":1}</f>.', "so <f>{}</f>"),
    ],
    ids=lambda value: value.kind if isinstance(value, GrammarSpec) else None,
)
def test_every_kind_compiles(spec: GrammarSpec, good: str, bad: str, vocabulary: Vocabulary) -> None:
    compiled = compile_grammar(spec, vocabulary)
    assert compiled.nbytes > 0
    assert accepts(compiled, vocabulary, good)
    assert not accepts(compiled, vocabulary, bad)


HOSTILE: list[GrammarSpec] = [
    GrammarSpec(kind="regex", text="(ab"),
    GrammarSpec(kind="regex", text="(a?){4000}a{4000}"),
    GrammarSpec(kind="regex", text="(.{1,200}x){1,200}"),
    GrammarSpec(kind="regex", text="(x+x+)+y"),
    GrammarSpec(kind="regex", text="((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    GrammarSpec(kind="regex", text="(" * 3000 + ")" * 3000),
    GrammarSpec(kind="regex", text="(.*a.{8}){6}"),
    GrammarSpec(kind="regex", text="\x00"),
    GrammarSpec(kind="ebnf", text="root ::= root"),
    GrammarSpec(kind="ebnf", text="root ::="),
    GrammarSpec(kind="ebnf", text="("),
    GrammarSpec(kind="ebnf", text='root ::= "a"\nroot ::= "b"'),
    GrammarSpec(kind="json_schema", text="{"),
    GrammarSpec(kind="json_schema", text='{"type": 5}'),
    GrammarSpec(kind="json_schema", text="[" * 100_000),
    GrammarSpec(kind="json_schema", text='{"enum": []}'),
    GrammarSpec(kind="json_schema", text='{"const": "a\U00040000b"}'),
    GrammarSpec(kind="json_schema", text=json.dumps({"enum": list(range(60_000))})),
    GrammarSpec(kind="json_schema", text=json.dumps({"description": "x" * (1 << 20)})),
    GrammarSpec(kind="json_schema", text='{"$ref":"#/$defs/n","$defs":{"n":{"$ref":"#/$defs/n"}}}'),
    GrammarSpec(kind="structural_tag", text="{}"),
    GrammarSpec(kind="structural_tag", text="nonsense"),
    GrammarSpec(kind="choices", text="null"),
]


@pytest.mark.parametrize("spec", HOSTILE, ids=lambda spec: f"{spec.kind}:{spec.text[:24]!r}")
def test_hostile_input_is_answered_by_a_result_or_a_400(spec: GrammarSpec, vocabulary: Vocabulary) -> None:
    outcome = outcome_of(spec, vocabulary)
    if isinstance(outcome, ErrorInfo):
        assert outcome.status == 400
        assert outcome.message
        assert outcome.code
    else:
        assert outcome.matcher().error == ""


def outcome_of(spec: GrammarSpec, vocabulary: Vocabulary) -> Compiled | ErrorInfo:
    try:
        return compile_grammar(spec, vocabulary)
    except GrammarError as error:
        return error.info


class RustPanic(BaseException):
    """What pyo3 makes of a panic: no Exception."""


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RustPanic("index out of bounds\nat x.rs"), "invalid_regex"),
        (RuntimeError("odd"), "invalid_regex"),
        (MemoryError(), "grammar_too_large"),
        (RecursionError(), "grammar_too_large"),
    ],
)
def test_whatever_a_backend_raises_is_a_grammar_error(
    raised: BaseException, code: str, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise raised

    monkeypatch.setattr(compiling, "compile_regex_llg", broken)
    with pytest.raises(GrammarError) as caught:
        compile_grammar(GrammarSpec(kind="regex", text="a"), vocabulary)
    assert caught.value.info.code == code
    assert "\n" not in caught.value.info.message


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(), Overloaded("later")])
def test_what_is_not_about_the_grammar_passes(
    raised: BaseException, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise raised

    monkeypatch.setattr(compiling, "compile_regex_llg", broken)
    with pytest.raises(type(raised)):
        compile_grammar(GrammarSpec(kind="regex", text="a"), vocabulary)


def test_automata_are_used_where_they_lie(vocabulary: Vocabulary, tmp_path: Path) -> None:
    spec = GrammarSpec(kind="regex", text="[ab]{3}")
    builder = Builder(vocabulary, tmp_path)
    assert not isinstance(builder.build(spec), OutlinesCompiled)
    automaton = build(normalize(spec.text), outlines_vocabulary(vocabulary), vocabulary.rows)
    automaton.save(index_file(tmp_path, spec.key))
    compiled = builder.build(spec)
    assert isinstance(compiled, OutlinesCompiled)
    assert accepts(compiled, vocabulary, "abb")
    assert not isinstance(Builder(vocabulary).build(spec), OutlinesCompiled)
    other = GrammarSpec(kind="regex", text="[ab]{3}", backend="llguidance")
    automaton.save(index_file(tmp_path, other.key))
    assert not isinstance(builder.build(other), OutlinesCompiled)
    index_file(tmp_path, spec.key).write_bytes(b"broken")
    assert accepts(builder.build(spec), vocabulary, "abb")


def test_only_regular_expressions_want_automata() -> None:
    assert wants_outlines(GrammarSpec(kind="regex", text="a"))
    assert wants_outlines(GrammarSpec(kind="regex", text="a", backend="outlines"))
    assert not wants_outlines(GrammarSpec(kind="regex", text="a", backend="llguidance"))
    assert not wants_outlines(GrammarSpec(kind="json_schema", text="{}", backend="outlines"))
