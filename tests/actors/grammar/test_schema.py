"""Schemas at token level, without a model: what is admitted is enforced, and everything else is a 400 with its place."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from fakes.grammar_walks import accepts, walk
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.llg import LlguidanceCompiled, compile_json_schema
from radixcast.actors.grammar.schema import admit
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec

DATA = Path(__file__).parents[2] / "data"
KEYWORDS = [json.loads(line) for line in (DATA / "schema_keywords.jsonl").read_text(encoding="utf-8").splitlines()]
SUITE = sorted((DATA / "json-schema-test-suite" / "draft2020-12").rglob("*.json"))
MOST_REFUSED = 20


class Group(NamedTuple):
    """How one group of instances came out."""

    refused: GrammarError | None
    wider: list[Any]
    """Invalid instances that are accepted in some spelling."""
    narrower: list[Any]
    """Valid instances that are refused in some spelling."""


def compiled(value: Any, vocabulary: Vocabulary, **options: Any) -> LlguidanceCompiled:
    return compile_json_schema(GrammarSpec(kind="json_schema", text=json.dumps(value), **options), vocabulary)


def spellings(value: Any) -> list[str]:
    dump = [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}]
    return [json.dumps(value, ensure_ascii=False, **options) for options in dump]  # type: ignore[arg-type]


def run(group: dict[str, Any], vocabulary: Vocabulary) -> Group:
    try:
        made = compiled(group["schema"], vocabulary)
    except GrammarError as error:
        return Group(error, [], [])
    wider, narrower = [], []
    for test in group["tests"]:
        outcomes = [accepts(made, vocabulary, text) for text in spellings(test["data"])]
        outcomes_ascii = accepts(made, vocabulary, json.dumps(test["data"]))
        if not test["valid"] and (any(outcomes) or outcomes_ascii):
            wider.append(test["data"])
        if test["valid"] and not all(outcomes):
            narrower.append(test["data"])
    return Group(None, wider, narrower)


def test_keyword_cases(vocabulary: Vocabulary) -> None:
    """No invalid instance accepted, no valid one refused, and at most 20 of the 85 schemas refused."""
    assert len(KEYWORDS) == 85
    refused = {}
    for case in KEYWORDS:
        outcome = run(case, vocabulary)
        assert outcome.wider == [], case["group"]
        assert outcome.narrower == [], case["group"]
        if outcome.refused is not None:
            refused[case["group"]] = outcome.refused.info
    assert len(refused) <= MOST_REFUSED, list(refused)
    for name, info in refused.items():
        assert info.status == 400, name
        assert info.param is not None, name
        assert info.param == "" or info.param.startswith("/"), name
        assert info.code in ("unsupported_schema_keyword", "invalid_schema", "unsatisfiable_schema", "invalid_regex"), name


@pytest.mark.parametrize("file", SUITE, ids=lambda file: str(file.relative_to(file.parents[1])))
def test_suite_accepts_nothing_invalid(vocabulary: Vocabulary, file: Path) -> None:
    for group in json.loads(file.read_text(encoding="utf-8")):
        outcome = run(group, vocabulary)
        assert outcome.wider == [], group["description"]
        if outcome.refused is not None:
            assert outcome.refused.info.param is not None, group["description"]


def test_most_of_the_suite_is_exact(vocabulary: Vocabulary) -> None:
    """Counted so that a change that refuses more is seen: 298 of 461 groups are exact, 107 are refused (often rightly so)."""
    outcomes = [run(group, vocabulary) for file in SUITE for group in json.loads(file.read_text(encoding="utf-8"))]
    exact = sum(outcome.refused is None and not outcome.narrower for outcome in outcomes)
    assert exact >= 295
    assert sum(outcome.refused is not None for outcome in outcomes) <= 110


WALKED: dict[str, Any] = {
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -1.5, "maximum": 20}, "minItems": 2, "maxItems": 4},
    "dates": {
        "type": "object",
        "properties": {"d": {"format": "date", "type": "string"}},
        "required": ["d"],
        "unevaluatedProperties": False,
    },
    "chinese": {
        "type": "object",
        "properties": {"姓名": {"type": "string", "pattern": "^[一-龥]{2,4}$"}, "状态": {"enum": ["在线", "北京", "😀"]}},
        "required": ["姓名", "状态"],
        "additionalProperties": False,
    },
    "recursive": {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "maximum": 9},
                    "c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
                },
                "required": ["v", "c"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    },
    "conditional": {
        "type": "object",
        "properties": {"t": {"enum": ["x", "y"]}, "v": {"type": "integer"}},
        "required": ["t"],
        "additionalProperties": False,
        "if": {"properties": {"t": {"const": "x"}}},
        "then": {"required": ["v"]},
        "else": {"properties": {"v": {"maximum": 5}}},
    },
    "not": {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 4, "not": {"enum": ["", "a", "ab"]}}},
        "additionalProperties": False,
        "required": ["a"],
    },
    "one of": {"oneOf": [{"type": "number", "minimum": 0}, {"type": "number", "maximum": 10}]},
    "dependent": {
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "type": "object",
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"b": {"required": ["c"]}},
        "additionalProperties": False,
    },
    "unique": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
    "contains": {"type": "array", "items": {"type": "integer", "maximum": 99}, "contains": {"minimum": 5}, "maxItems": 3},
    "names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]{1,2}$"},
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
}


def check_walks(name: str, vocabulary: Vocabulary, walks: int) -> None:
    value = WALKED[name]
    validator = jsonschema.Draft202012Validator(value, format_checker=jsonschema.FormatChecker())
    made = compiled(value, vocabulary)
    ended = 0
    for seed in range(walks):
        text = walk(made, vocabulary, seed)
        if text is not None:
            ended += 1
            assert validator.is_valid(json.loads(text)), text
    assert ended >= walks // 3, f"only {ended} of {walks} walks ended"


@pytest.mark.parametrize("name", WALKED)
def test_random_walks_end_valid(vocabulary: Vocabulary, name: str) -> None:
    check_walks(name, vocabulary, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKED)
def test_many_random_walks_end_valid(vocabulary: Vocabulary, name: str) -> None:
    check_walks(name, vocabulary, 200)


REFUSED: list[tuple[Any, str, str]] = [
    ({"properties": {"a": {"uniqueItems": True}}}, "unsupported_schema_keyword", "/properties/a/uniqueItems"),
    ({"items": {"contains": {}}}, "unsupported_schema_keyword", "/items/contains"),
    ({"properties": {"a/b": {"maxlength": 2}}}, "unsupported_schema_keyword", "/properties/a~1b/maxlength"),
    ({"propertes": {}}, "unsupported_schema_keyword", "/propertes"),
    ({"$dynamicRef": "#x"}, "unsupported_schema_keyword", "/$dynamicRef"),
    ({"not": {"pattern": "a"}}, "unsupported_schema_keyword", "/not"),
    ({"$ref": "https://example.org/x"}, "unsupported_schema_keyword", "/$ref"),
    ({"$ref": "#/nowhere"}, "invalid_schema", "/$ref"),
    ({"$ref": 5}, "invalid_schema", "/$ref"),
    ({"type": 5}, "invalid_schema", "/type"),
    ({"type": []}, "invalid_schema", "/type"),
    ({"allOf": [{"type": "strin"}]}, "invalid_schema", "/allOf/0/type"),
    ({"properties": ["a"]}, "invalid_schema", "/properties"),
    ({"required": "a"}, "invalid_schema", "/required"),
    ({"minimum": "3"}, "invalid_schema", "/minimum"),
    ({"minLength": -1}, "invalid_schema", "/minLength"),
    ({"multipleOf": 0}, "invalid_schema", "/multipleOf"),
    ({"anyOf": []}, "invalid_schema", "/anyOf"),
    ({"enum": {}}, "invalid_schema", "/enum"),
    ({"format": 1}, "invalid_schema", "/format"),
    ({"items": 3}, "invalid_schema", "/items"),
    ([], "invalid_schema", ""),
    (3, "invalid_schema", ""),
    ({"pattern": "(a"}, "invalid_regex", "/pattern"),
    ({"patternProperties": {"[": {}}}, "invalid_regex", "/patternProperties/["),
    ({"enum": []}, "unsatisfiable_schema", "/enum"),
    (False, "unsatisfiable_schema", ""),
    ({"not": {}}, "unsatisfiable_schema", ""),
    ({"allOf": [{"$ref": "#"}]}, "unsatisfiable_schema", ""),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, True]}}}, "unsatisfiable_schema", ""),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "unsatisfiable_schema", ""),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "unsatisfiable_schema", ""),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "unsatisfiable_schema", "/minLength"),
]


@pytest.mark.parametrize(("value", "code", "pointer"), REFUSED, ids=lambda value: json.dumps(value)[:40])
def test_refusals_say_where_and_why(vocabulary: Vocabulary, value: Any, code: str, pointer: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(value, vocabulary)
    assert (caught.value.info.code, caught.value.info.param) == (code, pointer)
    assert caught.value.info.status == 400


@pytest.mark.parametrize(
    "text", ["", "{", "nul", '{"a": NaN}', '{"maximum": 1e999}', '{"a" 1}', '{"const": "\\ud800"}', '{"a": 1} x']
)
def test_broken_json(vocabulary: Vocabulary, text: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_json_schema(GrammarSpec(kind="json_schema", text=text), vocabulary)
    assert caught.value.info.code == "invalid_schema"


HOSTILE = {
    "1 MB": json.dumps({"properties": {f"p{i}": {"type": "string", "description": "x" * 50} for i in range(12_000)}}),
    "enum of 60000": json.dumps({"enum": list(range(60_000))}),
    "400 deep": json.dumps(json.loads('{"items":' * 400 + "{}" + "}" * 400)),
    "100 000 deep": "[" * 100_000,
    "one of, 12 deep": "",
    "long definitions": json.dumps(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"items": {"$ref": "#/$defs/d0"}}]} for i in range(900)},
                "d900": {},
            },
        }
    ),
    "huge counts": json.dumps({"type": "array", "items": {"type": "string", "maxLength": 100_000}, "maxItems": 5_000}),
    "nested repeats": json.dumps({"pattern": "(.{1,200}x){1,200}"}),
    "many negations": json.dumps({"allOf": [{"not": {"enum": [f"{i}{j}" for j in range(200)]}} for i in range(20)]}),
}


def nested_one_of(depth: int) -> Any:
    inner: Any = {"type": "string"}
    for i in range(depth):
        inner = {"oneOf": [{"type": "object", "properties": {f"k{i}{j}": inner}, "required": [f"k{i}{j}"]} for j in range(3)]}
    return inner


@pytest.mark.parametrize("name", HOSTILE)
def test_admission_of_hostile_schemas_ends(name: str) -> None:
    """The walk itself is short work, whatever comes (compiling has a deadline, and a process of its own)."""
    text = HOSTILE[name] or json.dumps(nested_one_of(7))
    for expand in (False, True):
        with contextlib.suppress(GrammarError):
            admit(text, lenient=False, expand_one_of=expand)


def test_lenient_ignores_with_a_warning(vocabulary: Vocabulary) -> None:
    value = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxitems": 3}
    admitted = admit(json.dumps(value), lenient=True)
    assert [warning.split(":")[0] for warning in admitted.warnings] == ["/uniqueItems", "/maxitems"]
    assert accepts(compiled(value, vocabulary, lenient=True), vocabulary, "[1, 1]")


def test_lenient_never_ignores_what_is_no_schema() -> None:
    values: list[Any] = [{"type": 5}, {"$ref": "#/x"}, {"enum": []}]
    for value in values:
        with pytest.raises(GrammarError):
            admit(json.dumps(value), lenient=True)


def test_a_schema_can_not_change_llguidances_options(vocabulary: Vocabulary) -> None:
    value = {
        "x-guidance": {"lenient": True, "whitespace_pattern": "[ ]*"},
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    }
    admitted = admit(json.dumps(value), lenient=False)
    assert "x-guidance" not in admitted.text
    assert admitted.warnings == ("/x-guidance: ignored",)
    assert not accepts(compiled(value, vocabulary), vocabulary, '{"a":    1}')
    with pytest.raises(GrammarError, match="uniqueItems"):
        admit(json.dumps({**value, "uniqueItems": True}), lenient=False)
    nested = {"properties": {"a": {"x-guidance": {"lenient": True}, "contains": {}}}}
    with pytest.raises(GrammarError, match="contains"):
        admit(json.dumps(nested), lenient=False)


def test_unknown_keywords_and_formats_are_annotations() -> None:
    value = {"type": "string", "format": "byte", "markdownDescription": "x", "x-order": 3, "nullable": True, "title": "t"}
    admitted = admit(json.dumps(value), lenient=False)
    assert json.loads(admitted.text) == {"type": "string"}
    assert [warning.split(":")[0] for warning in admitted.warnings] == ["/format", "/markdownDescription", "/nullable"]


@pytest.mark.parametrize("text", ["$$ANY$$", "true", "{}"])
def test_any_json(vocabulary: Vocabulary, text: str) -> None:
    made = compile_json_schema(GrammarSpec(kind="json_schema", text=text), vocabulary)
    values: list[Any] = [{"a": [1, None, "x"]}, [], "é", -2.5, True]
    for value in values:
        assert accepts(made, vocabulary, json.dumps(value, ensure_ascii=False))
    assert not accepts(made, vocabulary, "{")


def test_property_order_is_the_schemas(vocabulary: Vocabulary) -> None:
    made = compiled({"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "b"]}, vocabulary)
    assert accepts(made, vocabulary, '{"b": 1, "a": 2}')
    assert not accepts(made, vocabulary, '{"a": 2, "b": 1}')


def test_references_follow_identifiers_and_anchors(vocabulary: Vocabulary) -> None:
    value = {
        "$id": "http://x.test/root.json",
        "properties": {
            "a": {"$ref": "http://x.test/root.json#/$defs/i"},
            "b": {"$ref": "other.json"},
            "c": {"$ref": "other.json#inner"},
            "d": {"$ref": "#here"},
        },
        "$defs": {
            "i": {"type": "integer", "$anchor": "here"},
            "o": {
                "$id": "other.json",
                "type": "string",
                "$defs": {"x": {"$anchor": "inner", "$ref": "#/$defs/y"}, "y": {"type": "null"}},
            },
        },
    }
    made = compiled(value, vocabulary)
    assert accepts(made, vocabulary, '{"a": 1, "b": "s", "c": null, "d": 2}')
    for text in ('{"a": "s"}', '{"b": 1}', '{"c": 1}', '{"d": null}'):
        assert not accepts(made, vocabulary, text)
