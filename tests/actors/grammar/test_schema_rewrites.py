"""Rewriting is exact: patterns against Python's `re`, negations and formats against `jsonschema`."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.grammar_walks import accepts
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.llg import LlguidanceCompiled, compile_json_schema
from radixcast.actors.grammar.schema_negate import Unrewritable, negate
from radixcast.actors.grammar.schema_pattern import none_of, translate
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec


def compiled(value: Any, vocabulary: Vocabulary) -> LlguidanceCompiled:
    return compile_json_schema(GrammarSpec(kind="json_schema", text=json.dumps(value)), vocabulary)


ATOMS = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\.", "-", "é", r"[\w-]", r"[^\d]", r"\x61", r"\u0062"]
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(
    pattern=PATTERNS,
    start=st.sampled_from(["", "^"]),
    end=st.sampled_from(["", "$"]),
    text=st.text(alphabet="ab1 .-é_", max_size=4),
)
def test_patterns_match_as_in_python(vocabulary: Vocabulary, pattern: str, start: str, end: str, text: str) -> None:
    """Never wider than Python's; the same for ASCII texts."""
    whole = f"{start}(?:{pattern}){end}"
    expected = re.search(whole, text) is not None
    made = compiled({"type": "string", "pattern": whole}, vocabulary)
    found = accepts(made, vocabulary, json.dumps(text, ensure_ascii=False))
    assert found == expected if text.isascii() else not found or expected


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a$|^b", ["a", "b", "bx"], ["ab", "xa"]),
        ("^(a|b$)", ["a", "ax", "b"], ["bx", "xb"]),
        ("(^a|b)$", ["a", "xb"], ["xa", "bx"]),
        ("x|y", ["x", "ayb"], ["a"]),
        ("^[^]$", ["a", "\n"], ["", "ab"]),
        ("^[[&&a]$", ["[", "&", "a"], ["b", ""]),
        ("^[a&&b]$", ["a", "&", "b"], ["c"]),
        (r"^\ud83d\udc32*$", ["", "🐲🐲"], ["a"]),
        (r"^\cA?\/$", ["/"], [""]),
        ("^a{1,}$", ["a", "aaa"], [""]),
        (r"^\p{Lu}$", ["A", "É"], ["a", "1"]),
        (r"^[\d-]+$", ["1-2"], ["a", "٣"]),
        (r"^[\w-.]+\_$", ["a-.b_"], ["a!_"]),
        (r"^\S$", ["x", "é"], [" ", "\ufeff", "\u2003"]),
        ("^.$", ["x"], ["\n", "\r", "\u2028"]),
        ("", ["", "x"], []),
        ("^$", [""], ["x"]),
    ],
)
def test_translations(vocabulary: Vocabulary, pattern: str, good: list[str], bad: list[str]) -> None:
    made = compiled({"type": "string", "pattern": pattern}, vocabulary)
    for text in good:
        assert accepts(made, vocabulary, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not accepts(made, vocabulary, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)",
        "(?<!a)b",
        r"(a)\1",
        r"\bword",
        "a^b",
        "(a$)+",
        "a**",
        "*",
        "(",
        ")",
        "[",
        "[b-a]",
        r"\u{110000}",
        r"\ud800",
        "(?i)a",
        "a{2,1}",
        r"\Z",
        "x{,2}",
        "(" * 500,
    ],
)
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        translate(pattern, "/somewhere")
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_regex", "/somewhere")


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab]^\\é", max_size=3), min_size=1, max_size=4),
    text=st.text(alphabet="ab]^\\é", max_size=3),
)
def test_the_complement_of_texts(texts: list[str], text: str) -> None:
    expression = re.sub(r"\\u\{([0-9A-F]+)\}", lambda found: re.escape(chr(int(found[1], 16))), none_of(texts))
    assert (re.fullmatch(expression, text) is not None) == (text not in texts)


SCALARS = st.sampled_from([None, True, False, 0, 1, 5, -3, "a", "ab", "b", ""])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=2),
    max_leaves=4,
)
TYPES = st.sampled_from(["null", "boolean", "object", "array", "number", "string"])
SCHEMAS = st.recursive(
    st.one_of(
        st.booleans(),
        st.builds(lambda kind: {"type": kind}, TYPES),
        st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
        st.builds(lambda value: {"const": value}, SCALARS),
        st.builds(lambda low: {"minimum": low}, st.integers(-3, 3)),
        st.builds(lambda high: {"exclusiveMaximum": high}, st.integers(-3, 3)),
        st.builds(lambda n: {"maxLength": n}, st.integers(0, 2)),
        st.builds(lambda n: {"minItems": n}, st.integers(0, 2)),
        st.builds(lambda names: {"required": names}, st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True)),
    ),
    lambda inner: st.one_of(
        st.builds(lambda parts: {"allOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda parts: {"oneOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda part: {"not": part}, inner),
        st.builds(lambda a, b: {"if": a, "then": b}, inner, inner),
        st.builds(lambda part: {"properties": {"a": part}}, inner),
        st.builds(lambda a, b: {**(a if isinstance(a, dict) else {}), **(b if isinstance(b, dict) else {})}, inner, inner),
    ),
    max_leaves=4,
)


def python_patterns(value: Any) -> Any:
    """Patterns as Python's `re` reads them (for `jsonschema`)."""
    if isinstance(value, dict):
        return {
            key: re.sub(r"\\u\{([0-9A-F]+)\}", lambda found: re.escape(chr(int(found[1], 16))), part)
            if key == "pattern" and isinstance(part, str)
            else python_patterns(part)
            for key, part in value.items()
        }
    return [python_patterns(part) for part in value] if isinstance(value, list) else value


def no_reference(reference: str) -> Any:
    raise AssertionError(reference)


@settings(max_examples=250, deadline=None)
@given(schema=SCHEMAS, value=VALUES)
def test_negations_are_exact(schema: Any, value: Any) -> None:
    try:
        negated = negate(schema, no_reference)
    except Unrewritable:
        return
    holds = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert jsonschema.Draft202012Validator(python_patterns(negated)).is_valid(value) == (not holds)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=1, max_size=6))
def test_admitted_schemas_accept_nothing_invalid(vocabulary: Vocabulary, schema: Any, values: list[Any]) -> None:
    try:
        made = compiled(schema, vocabulary)
    except GrammarError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        if accepts(made, vocabulary, json.dumps(value)):
            assert validator.is_valid(value), value
        elif not isinstance(value, dict):  # an object's names may be in another order than the schema's
            assert not validator.is_valid(value) or "{" in json.dumps(value), value


FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "0004-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "0000-02-29", "2024-04-31", "24-01-01"],
    ),
    "time": (["10:00:00Z", "23:59:59.123+05:30"], ["24:00:00Z", "10:00:00", "10:60:00Z", "10:00:00+24:00"]),
    "date-time": (["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29 10:00:00Z", "2024-02-29T10:00:00"]),
    "hostname": (
        ["a", "a-b.example", "x" * 63, "1.2"],
        ["-a", "a-", "a..b", "x" * 64, "a_b", "", "ab--cd", ".".join(["x" * 63] * 4)],
    ),
    "json-pointer": (["", "/a/b~1c", "/"], ["a", "/~2"]),
    "uri-reference": (["http://a.b/c?d#e", "../x", "#f", "", "/a/b"], ["\\", "a b"]),
    "regex": (["a+", "^(ab|c)*$", "[a-z]{2}", r"\d+\.\d*"], ["a(", "[", "a{2,1}{", "*", "a**"]),
    "uri-template": (["http://x/{id}", "/a{?b,c*}"], ["{", "{a", "a}"]),
    "idn-email": (["a@b.co"], ["a"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(vocabulary: Vocabulary, name: str) -> None:
    made = compiled({"type": "string", "format": name}, vocabulary)
    good, bad = FORMATS[name]
    for text in good:
        assert accepts(made, vocabulary, json.dumps(text)), text
    for text in bad:
        assert not accepts(made, vocabulary, json.dumps(text)), text
