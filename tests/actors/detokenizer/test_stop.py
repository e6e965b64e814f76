"""Stop strings and stop expressions: the earliest end, the same under any chunking, and an exact hold-back."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcast.actors.detokenizer.stop import StopScan
from radixcast.actors.detokenizer.stop_regex import MAX_CELLS, StopRegex, StopRegexScan
from radixcast.actors.detokenizer.stop_strings import Match, StopStrings, StopStringScan
from radixcast.protocols.errors import InvalidRequest
from radixcast.protocols.sampling import SamplingParams

ALPHABET = "ab.\n"
small_texts = st.text(ALPHABET, max_size=24)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the stop by its definition."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stops if text[:end].endswith(s)]
        if lengths:
            return end - max(lengths), end
    return None


def run(scan: StopScan | StopStringScan | StopRegexScan, chunks: list[str]) -> tuple[tuple[int, int] | None, list[int]]:
    """(start, end) of the match in the joined chunks, and the hold after each chunk."""
    before = 0
    holds: list[int] = []
    for chunk in chunks:
        match = scan.feed(chunk)
        if match:
            return (before + match.end - match.length, before + match.end), holds
        before += len(chunk)
        holds.append(scan.hold)
    return None, holds


def cut(text: str, data: st.DataObject) -> list[str]:
    """`text` in pieces of any size."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(text=small_texts, stops=stop_lists, data=st.data())
def test_strings_stop_at_the_earliest_end_under_any_chunking(text: str, stops: list[str], data: st.DataObject) -> None:
    found, _ = run(StopStringScan(StopStrings(stops)), cut(text, data))
    assert found == naive(text, stops)


@settings(max_examples=200, deadline=None)
@given(text=small_texts, stops=stop_lists)
def test_strings_hold_exactly_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    _, holds = run(StopStringScan(StopStrings(stops)), list(text))
    for seen, hold in enumerate(holds, 1):
        prefixes = [k for s in stops for k in range(len(s)) if text[:seen].endswith(s[:k])]
        assert hold == max(prefixes, default=0)


def test_the_longest_of_two_that_end_together_wins() -> None:
    assert StopStringScan(StopStrings(["b", "ab"])).feed("xxab") == Match(4, 2, "ab")
    assert StopStringScan(StopStrings(["abc", "b"])).feed("xxabc") == Match(4, 1, "b")


REGEXES = [
    "ab",
    "a|b.",
    "(ab){2}",
    "a{1,3}b",
    "[^a]b",
    "a.b",
    "(?s)a.b",
    "^ab",
    "(?m)^ab",
    "a(b|\\.)?a",
    "(?i)AB",
    "b[ab]{0,2}\\.",
]


@settings(max_examples=300, deadline=None)
@given(text=small_texts, expressions=st.lists(st.sampled_from(REGEXES), min_size=1, max_size=3), data=st.data())
def test_regex_agrees_with_re_on_every_end(text: str, expressions: list[str], data: st.DataObject) -> None:
    """By definition: the first prefix of the text that some match ends, and the earliest start of one that ends there."""
    expected = None
    for end in range(1, len(text) + 1):
        starts = [s for e in expressions for s in range(end) if _matches(e, text, s, end)]
        if starts:
            expected = (min(starts), end)
            break
    found, _ = run(StopRegexScan(StopRegex(expressions)), cut(text, data))
    assert found == expected


def _matches(expression: str, text: str, start: int, end: int) -> bool:
    """Whether text[start:end] is a match; `^` by hand, since re takes the slice's start for the text's."""
    if expression.startswith("^"):
        return start == 0 and bool(re.fullmatch(expression, text[start:end]))
    if expression.startswith("(?m)^"):
        return (start == 0 or text[start - 1] == "\n") and bool(re.fullmatch(expression, text[start:end]))
    return bool(re.compile(expression).fullmatch(text, start, end))


@settings(max_examples=200, deadline=None)
@given(text=small_texts, expression=st.sampled_from(REGEXES))
def test_regex_never_shows_what_it_later_cuts(text: str, expression: str) -> None:
    shown = 0
    scan = StopRegexScan(StopRegex([expression]))
    for seen, char in enumerate(text, 1):
        match = scan.feed(char)
        if match:
            assert seen - match.length >= shown
            return
        assert 0 <= scan.hold <= seen
        shown = max(shown, seen - scan.hold)


@pytest.mark.parametrize(
    ("expression", "same_as"),
    [
        (r"[.!?]\s*$", r"[.!?]"),
        ("and|or", "and|or"),
        ("a+", "a"),
        ("ab*?", "a"),
        ("(a|bc+)+", "a|bc"),
        ("x{2,}", "xx"),
        (r"a\Z", "a"),
    ],
)
def test_optional_tails_never_matter(expression: str, same_as: str) -> None:
    for text in ("oh. my", "sand", "caab", "bccca", "xxxxx", "ba"):
        assert _end(expression, text) == _end(same_as, text)


def _end(expression: str, text: str) -> int | None:
    match = StopRegexScan(StopRegex([expression])).feed(text)
    return match.end if match else None


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(", "no regular expression"),
        ("a{3,1}", "no regular expression"),
        ("a*", "empty text"),
        ("$", "empty text"),
        ("^", "empty text"),
        ("a*b", "any number"),
        (".*x", "any number"),
        ("(a+)+b", "any number"),
        ("a{2000}b", "2001 characters"),
        (".{0,600}b", "too large"),
        (r"(a)\1", "back reference"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"\bword", "word boundary"),
        ("(?>a)b", "atomic"),
        ("a++b", "possessive"),
        ("a$b", "`\\$` before the end"),
        ("(?:a|bc|de|fg){512}", "too large"),
    ],
)
def test_refused_expressions_say_why(expression: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        StopRegex([expression])
    assert caught.value.info.param == "sampling_params.stop_regex"


def test_empty_repetitions_cost_nothing() -> None:
    assert _end("(){1000000000}a(){1000000000}", "xa") == 2
    with pytest.raises(InvalidRequest, match="too large"):
        StopRegex(["(^){0,1000000000}a"])


def test_deep_nesting_is_understood_or_refused() -> None:
    assert _end("(" * 50 + "a" + ")" * 50, "xa") == 2
    with contextlib.suppress(InvalidRequest):  # how deep Python's parser goes is its own affair
        assert _end("(" * 250 + "a" + ")" * 250, "xa") == 2


def test_hostile_expression_is_linear_and_bounded_in_memory() -> None:
    automaton = StopRegex(["a.{0,300}XYZ"])
    scan = StopRegexScan(automaton)
    assert scan.feed("".join(chr(97 + i % 7) for i in range(3000))) is None
    assert scan.hold <= 303
    assert automaton._cells <= MAX_CELLS + 700
    assert scan.feed("aXYZ") == Match(4, 3004 - 2702, "a.{0,300}XYZ"), "2702 is the first `a` in reach"


def test_categories_and_classes() -> None:
    assert _end(r"\d{3}-\w", "call 555-x") == 10
    assert _end(r"(?a)\d", "٣ 3") == 3
    assert _end(r"[^\W\d_]\s", "1 _ é ") == 6
    assert _end(r"[a-cx]!", "d!b!") == 4
    assert _end(r"(?i:É)x", "éx") == 2
    assert _end(r"(?x) a  b  # comment", "ab") == 2


def test_strings_and_expressions_together() -> None:
    sampling = SamplingParams(stop=("END",), stop_regex=("N.",))
    assert StopScan(sampling).feed("xENDNx") == Match(4, 3, "END")
    assert StopScan(sampling).feed("xEN!") == Match(4, 2, "N.")
    assert not StopScan(SamplingParams())
