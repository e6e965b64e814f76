"""Regular expressions: what is read, what is refused and where, and that what is written is the same language."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.regex import MAX_REGEX_CHARS, normalize
from radixcast.actors.grammar.regex_parse import parse
from radixcast.actors.grammar.regex_tree import Chars, chars, escape, intersect, invert, minus, ranges, write


def written(pattern: str) -> str:
    return write(parse(pattern))


@pytest.mark.parametrize(
    ("pattern", "position", "says"),
    [
        ("(ab", 0, "missing )"),
        ("a{3,1}", 2, "min repeat greater"),
        ("*x", 0, "nothing to repeat"),
        ("[", 0, "unterminated character set"),
        (r"ab\p{L}", 2, "bad escape"),
        ("ab(?=c)d", 2, "look-around"),
        ("(?<!a)b", 0, "look-around"),
        (r"(a)[\1]\1", 7, "back reference"),
        (r"(?P<x>a)(?P=x)", 8, "back reference"),
        (r"[\b]x\by", 5, "word boundary"),
        ("a(?>b)", 1, "atomic"),
        ("ab*+", 2, "possessive"),
        ("(a)?(?(1)b|c)", 4, "conditional"),
        ("a^b", 1, "anchor inside"),
        ("a$b", 1, "anchor inside"),
        ("(^a)*", 1, "anchor inside"),
        ("(a|b$)c?", 4, "anchor inside"),
    ],
)
def test_what_is_refused_is_named_with_its_position(pattern: str, position: int, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        normalize(pattern)
    info = caught.value.info
    assert (info.status, info.code, info.param) == (400, "invalid_regex", "regex")
    assert says in info.message
    assert f"position {position}" in info.message


@pytest.mark.parametrize("pattern", ["", "a{0}", "(?:)", "^$", r"[^\s\S]", r"a[^\w\W]"])
def test_an_expression_that_allows_no_output_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="match"):
        normalize(pattern)


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "(a|" * 3000 + "b" + ")" * 3000])
def test_deep_nesting_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="nested too deep"):
        normalize(pattern)


def test_long_expressions_are_refused() -> None:
    with pytest.raises(GrammarError) as caught:
        normalize("a" * (MAX_REGEX_CHARS + 1))
    assert caught.value.info.code == "grammar_too_large"


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        ("^abc$", "abc"),
        (r"\Aabc\Z", "abc"),
        ("^a|^b$", "[a-b]"),
        ("(^ab|cd$)", "ab|cd"),
        ("^(?:^a$)?$", "a?"),
        ("(?m)^a$", "a"),
        ("a(?#note)b", "ab"),
        ("(?x) a b # note", "ab"),
        (r"\d", "[0-9]"),
        (r"\w", "[0-9A-Z_a-z]"),
        (r"\s", r"[\x09-\x0d ]"),
        ("(?i)a1", "[Aa]1"),
        ("(?P<name>a)(b)", "ab"),
        ("a{2}b{2,}c{,3}d{0,1}", "aab{2,}c{0,3}d?"),
        (r"\[\.\-\]", r"\[\.\-\]"),
        ("a{1", r"a\{1"),
    ],
)
def test_written_in_the_common_core_of_all_dialects(pattern: str, same: str) -> None:
    assert written(pattern) == same


def test_case_is_ignored_as_python_does() -> None:
    for pattern in ("(?i)k", "(?i)[a-zé]", "(?i)[^k]", "(?i)ω", "(?ia)[k-m]"):
        ours = parse(pattern)
        assert isinstance(ours, Chars)
        for char in "kKKaAéÉωΩΩmMnNſS1":
            expected = re.fullmatch(pattern, char) is not None
            assert any(low <= ord(char) <= high for low, high in ours.ranges) == expected, (pattern, char)


def test_dot_is_anything_but_a_line_break_unless_asked() -> None:
    assert parse(".") == Chars(invert(chars("\n")))
    assert parse("(?s:.)") == Chars(ranges([(0, 0x10FFFF)]))


SETS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair))), max_size=6).map(
    ranges
)


@given(SETS, SETS)
def test_sets_of_characters(left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...]) -> None:
    def members(given: tuple[tuple[int, int], ...]) -> set[int]:
        return {code for low, high in given for code in range(low, min(high, 60) + 1)}

    assert members(intersect(left, right)) == members(left) & members(right)
    assert members(minus(left, right)) == members(left) - members(right)
    assert invert(invert(left)) == left
    assert members(invert(left)) == set(range(61)) - members(left)


@given(st.text(max_size=20))
def test_escaped_text_matches_itself_alone(text: str) -> None:
    if not re.search("[\ud800-\udfff]", text):
        assert re.fullmatch(escape(text), text)


ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\d", "c", r"\.", "(?i:b)"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,2}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(PATTERNS, st.lists(st.text("abBcd1.\n", max_size=5), max_size=20))
def test_what_is_written_is_the_same_language(pattern: str, texts: list[str]) -> None:
    ours = written(pattern)
    for text in [*texts, "", "a", "ab", "b.1"]:
        assert bool(re.fullmatch(pattern, text, re.ASCII)) == bool(re.fullmatch(ours, text)), (pattern, ours, text)
