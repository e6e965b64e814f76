"""Structural tags: both forms, and where free text ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.grammar_walks import accepts
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.llg import compile_structural_tag
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": OBJECT}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "older form": (
        {
            "type": "structural_tag",
            "structures": [
                {"begin": "<f=x>", "schema": OBJECT, "end": "</f>"},
                {"begin": "<f=y>", "schema": {"type": "array", "items": {"type": "null"}}, "end": "</f>"},
            ],
            "triggers": ["<f="],
        },
        ["", "only text < <f", 'a <f=x>{"a": 1}</f> b <f=y>[null]</f>', "中文 <f <f=y>[]</f>\n"],
        ["<f=", "<f=z>", "<f=x>[]</f>", '<f=x>{"a": 1}', '<f=x>{"a": 1}</f> <f=y'],
    ),
    "const": ({"format": {"type": "const_string", "value": 'a/b\n"c"'}}, ['a/b\n"c"'], ["a"]),
    "text, then JSON": (
        {"format": {"type": "sequence", "elements": [tag("<think>", {"type": "any_text"}, "</think>"), JSON]}},
        ['<think>a <b> </thin</think>{"a": 1}', '<think></think>{"a":1}'],
        ['{"a": 1}', "<think>x</think>", '<think>x</think>y{"a": 1}'],
    ),
    "regular neighbours": (
        {
            "format": {
                "type": "sequence",
                "elements": [{"type": "regex", "pattern": "[a-z]+"}, {"type": "const_string", "value": "b"}],
            }
        },
        ["ab", "abb"],
        ["b", "a"],
    ),
    "one tag at least, with separators": (
        {
            "format": {
                "type": "tags_with_separator",
                "tags": [tag("<a>", JSON, "</a>"), tag("<b>", {"type": "regex", "pattern": "x|y"}, "</b>")],
                "separator": ", ",
                "at_least_one": True,
            }
        },
        ['<a>{"a": 1}</a>', '<b>y</b>, <a>{"a":1}</a>'],
        ["", '<a>{"a": 1}</a><b>x</b>', "<b>z</b>"],
    ),
    "first tag ends it": (
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<t"],
                "tags": [tag("<t>", {"type": "grammar", "grammar": 'root ::= "(" root ")" | [a-z]+'}, "</t>")],
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        ["x <t>((a))</t>", "<t>b</t>"],
        ["x", "x <t>a</t> y", "<t>(a</t>"],
    ),
    "a tag or none": (
        {"format": {"type": "triggered_tags", "triggers": ["<t"], "tags": [tag("<t>", JSON, "")], "stop_after_first": True}},
        ["x", '<t>{"a": 1}'],
        ['<t>{"a": 1} ', "<t"],
    ),
    "or": (
        {
            "format": {
                "type": "or",
                "elements": [
                    {"type": "const_string", "value": "yes"},
                    JSON,
                    {"type": "grammar", "grammar": 'root ::= "n" "o"+'},
                ],
            }
        },
        ["yes", '{"a": 1}', "nooo"],
        ["no!", "ye"],
    ),
    "several ends": ({"format": tag("<", {"type": "regex", "pattern": "[0-9]+"}, [">", "/>"])}, ["<1>", "<22/>"], ["<1"]),
    "text with several ends": ({"format": tag("<", {"type": "any_text"}, [">", "/>"])}, ["<a b>", "<a/>"], ["<a", "<a>b>"]),
    "any text": ({"format": {"type": "any_text"}}, ["", "anything <|im_end|> 😀\n"], []),
    "schema as a text": ({"format": {"type": "json_schema", "json_schema": json.dumps(OBJECT)}}, ['{"a": 1}'], ["{}"]),
}


@pytest.mark.parametrize("name", CASES)
def test_languages(vocabulary: Vocabulary, name: str) -> None:
    value, good, bad = CASES[name]
    made = compile_structural_tag(GrammarSpec(kind="structural_tag", text=json.dumps(value)), vocabulary)
    for text in good:
        assert accepts(made, vocabulary, text), text
    for text in bad:
        assert not accepts(made, vocabulary, text), text


def test_schemas_are_admitted_and_white_space_is_the_requests(vocabulary: Vocabulary) -> None:
    value = {
        "format": tag(
            "x", {"type": "json_schema", "json_schema": {**OBJECT, "x-guidance": {"whitespace_pattern": "[ ]*"}}}, "y"
        )
    }
    spec = GrammarSpec(kind="structural_tag", text=json.dumps(value), whitespace="compact")
    made = compile_structural_tag(spec, vocabulary)
    assert accepts(made, vocabulary, 'x{"a":1}y')
    assert not accepts(made, vocabulary, 'x{"a": 1}y')
    dated = {"format": {"type": "json_schema", "json_schema": {"type": "string", "format": "date"}}}
    made = compile_structural_tag(GrammarSpec(kind="structural_tag", text=json.dumps(dated)), vocabulary)
    assert not accepts(made, vocabulary, '"2023-02-29"')


def test_overlapping_one_of_in_a_tag(vocabulary: Vocabulary) -> None:
    schema = {"oneOf": [{"type": "number", "minimum": 0}, {"type": "number", "maximum": 10}]}
    value = {"format": {"type": "json_schema", "json_schema": schema}}
    made = compile_structural_tag(GrammarSpec(kind="structural_tag", text=json.dumps(value)), vocabulary)
    assert accepts(made, vocabulary, "11")
    assert not accepts(made, vocabulary, "5")


@pytest.mark.parametrize(
    ("value", "pointer"),
    [
        ([], ""),
        ({}, ""),
        ({"structures": {}, "triggers": []}, "/structures"),
        ({"structures": [], "triggers": ["<"]}, "/structures"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["<"]}, "/structures/0/begin"),
        ({"structures": [5], "triggers": ["<"]}, "/structures/0/begin"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": []}, "/triggers"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": [""]}, "/triggers"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<", "<a"]}, "/triggers"),
        (
            {"structures": [{"begin": "<a", "schema": {"type": "x"}, "end": ""}], "triggers": ["<"]},
            "/structures/0/content/json_schema/type",
        ),
        ({"format": 5}, "/format"),
        ({"format": {"type": "qwen_xml_parameter"}}, "/format/type"),
        ({"format": {"type": "const_string"}}, "/format/value"),
        ({"format": {"type": "or", "elements": []}}, "/format/elements"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, JSON]}}, ""),
        ({"format": {"type": "any_text", "excludes": [1]}}, "/format/excludes"),
        ({"format": {**JSON, "style": "qwen_xml"}}, "/format/json_schema"),
    ],
)
def test_refusals(vocabulary: Vocabulary, value: Any, pointer: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_structural_tag(GrammarSpec(kind="structural_tag", text=json.dumps(value)), vocabulary)
    assert caught.value.info.param == pointer
    assert caught.value.info.status == 400
