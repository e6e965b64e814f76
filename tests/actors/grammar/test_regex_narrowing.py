"""Lazy loops and endless ones: narrowed as documented, and never beyond what the expression says."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcast.actors.grammar.regex import normalize
from radixcast.actors.grammar.regex_bounds import MAX_SPACES
from radixcast.actors.grammar.regex_lazy import up_to
from radixcast.actors.grammar.regex_tree import chars, write
from radixcast.protocols.grammar import rounded_tokens

PROFILE = r'\{\s*"name"\s*:\s*".*?",\s*"age"\s*:\s*\d+,\s*"city"\s*:\s*".*?",\s*"job"\s*:\s*".*?"\s*\}'


def accepts(pattern: str, text: str, max_tokens: int = 0) -> bool:
    return re.fullmatch(normalize(pattern, max_tokens), text) is not None


# ------------------------------------------------------------------ lazy loops


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('".*?"', ['""', '"ab"', '"日本 é"'], ['"a"b"', '"a\\"', '"a\\"b"', '"a\tb"', '"a\x01"', '"a\nb"']),
        ('"(.*?)"', ['"ab"'], ['"a"b"', '"a\\n"']),
        ('"(?P<v>.*?|null)"', ['"ab"', '"null"'], ['"a"b"']),
        ('".+?"', ['"a"'], ['""', '"a"b"']),
        ('".{2,4}?"', ['"ab"', '"abcd"'], ['"a"', '"a"bc"']),
        ('".*"', ['"a"b"', '"a\\"'], []),
        ("<.*?>", ["<>", "<a>"], ["<a>b>"]),
        ("<(?:.*?)>x", ["<a>x", "<a>b>x"], ["<a>x>x"]),
        ("<b>.*?</b>", ["<b>a<b</b>", "<b></</b>", "<b><</b>"], ["<b>a</b></b>"]),
        ("/\\*.*?\\*/", ["/**/", "/***/", "/* a * b / */"], ["/**/*/"]),
        ("'''.*?'''", ["''''''", "'''a''b'''"], ["'''a'''b'''"]),
        (r"a.*?\s*;", ["a b ;", "a;"], ["a;;"]),
        ("a.*?[;,]", ["ab;", "ab,"], ["a;b,"]),
        ("(?:a.*?|b);", ["axx;", "b;"], ["ax;x;"]),
        ("a.*?;?x", ["ab;x", "abx"], ["axbx"]),
        ("[ab]*?c1", ["abc1", "c1"], []),
        ("[ab]*?ab1", ["aab1", "abab1"], []),
        (".*?(?:</a>|</b>)", ["x<y</a>", "</b>"], ["</a></b>"]),
        ("a.*?", ["a", "abc"], []),
        ("a.*?.", ["ab"], ["abc"]),
        ("a.+?.", ["abc"], ["abcd"]),
        ("(?:ab|c)*?ab", ["cab", "abab"], []),
        (r"x.*?y{3}z", ["xyyz yyyz", "xyyyz"], ["xyyyzyyyz"]),
    ],
)
def test_a_lazy_loop_ends_where_what_follows_could_first_stand(pattern: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(pattern, text), text
        assert re.fullmatch(pattern, text), text
    for text in bad:
        assert not accepts(pattern, text), text


@pytest.mark.parametrize("text", ["ab", "aa", "aba", "aab", "abab", "aabaa", "abcab", "abaabab"])
def test_up_to_the_first_occurrence_exactly(text: str) -> None:
    compiled = re.compile(write(up_to(text, chars("abc"))))
    for length in range(9 if len(text) < 7 else 10):
        for letters in itertools.product("abc", repeat=length):
            sample = "".join(letters)
            expected = sample.endswith(text) and sample.find(text) == len(sample) - len(text)
            assert bool(compiled.fullmatch(sample)) == expected, sample


def test_up_to_stays_small_for_long_and_periodic_literals() -> None:
    fibonacci = "a", "ab"
    while len(fibonacci[1]) < 64:
        fibonacci = fibonacci[1], fibonacci[1] + fibonacci[0]
    for text in ("a" * 64, "ab" * 32, "</think></think> and so on", fibonacci[1][:64]):
        assert len(write(up_to(text, chars("abcdefghijklmnopqrstuvwxyz </>")))) < 20_000


PIECES = st.sampled_from(["a", "b", "ab", "aa", ".", ".*?", "a*?", "[ab]*?", ".+?", "(?:.*?a|b)", "(?:a|.*?)", r"\s*", "b?"])


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=5).map("".join), st.lists(st.text("ab ", max_size=6), max_size=25))
def test_narrowed_is_always_a_subset(pattern: str, texts: list[str]) -> None:
    ours = re.compile(normalize(pattern)) if re.fullmatch(pattern, "") is None else None
    for text in texts:
        if ours is not None and ours.fullmatch(text):
            assert re.fullmatch(pattern, text), (pattern, ours.pattern, text)


# ------------------------------------------------------------------ white space


def test_endless_white_space_is_bounded_everywhere() -> None:
    assert accepts(r"a\s*b", f"a{' ' * MAX_SPACES}b")
    assert not accepts(r"a\s*b", f"a{' ' * (MAX_SPACES + 1)}b")
    assert not accepts("a +b", f"a{' ' * (MAX_SPACES + 1)}b")
    assert accepts(r"a {40,}b", f"a{' ' * 40}b")
    assert accepts(r"a {0,40}b", f"a{' ' * 40}b")


def test_between_tokens_of_json_what_a_pretty_printer_makes() -> None:
    person = {"name": "Ada", "age": 7, "city": "北京", "job": ""}
    for indent in (None, 0, 2, 4, "\t", 40):
        assert accepts(PROFILE, json.dumps(person, indent=indent, ensure_ascii=False))
    assert accepts(PROFILE, json.dumps(person, separators=(",", ":"), ensure_ascii=False))
    assert not accepts(PROFILE, json.dumps(person).replace(": ", ":   "))
    assert not accepts(PROFILE, json.dumps(person).replace(": ", ":\f"))
    assert not accepts(PROFILE, json.dumps(person).replace(": ", ":\n\n"))


# ------------------------------------------------------------------ JSON


@pytest.mark.parametrize("age", ["007", "", "-1", "1" * 30])
def test_numbers_of_json_have_no_leading_zeros_and_end(age: str) -> None:
    assert not accepts(PROFILE, f'{{"name":"","age":{age},"city":"","job":""}}')


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\[\d+(?:,\s*\d+)*\]", ["[0]", "[10, 2]", "[1,\n 0]"], ["[01]", "[1, 02]"]),
        (r"\[(\d+,)*\d\d\]", ["[1,23]", "[23]"], ["[03]", "[01,23]"]),
        (r'\{"a":\s*-?\d+(\.\d+)?\}', ['{"a": -0.05}', '{"a":12}'], ['{"a": -01}']),
        (r'\{"a": \d{1,3}\}', ['{"a": 0}', '{"a": 100}'], ['{"a": 012}', '{"a": 00}']),
        (r'\{"zip": "\d{5}", "n": \d\d*\}', ['{"zip": "00123", "n": 1}'], ['{"zip": "00123", "n": 01}']),
        (r'\{"a": "\d+,\d+"\}', ['{"a": "007,01"}'], []),
        (r'\{"a\\"b": \d+\}', ['{"a\\"b": 1}'], ['{"a\\"b": 01}']),
        (r'\{"a": "[^"]*"\}', ['{"a": "x"}'], ['{"a": "x\ty"}', '{"a": "x\ny"}']),
    ],
)
def test_expressions_of_json_yield_json(pattern: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(pattern, text), text
        json.loads(text)
    for text in bad:
        assert re.fullmatch(pattern, text), text
        assert not accepts(pattern, text), text


@pytest.mark.parametrize("pattern", [r"\d+", r"a: \d+,", r"\{\d+\}", r'\{"a": ".*", "b": \d+\}'])
def test_numbers_elsewhere_stay_as_they_are(pattern: str) -> None:
    text = pattern.replace(r"\d+", "007").replace("\\", "").replace(".*", "x")
    assert accepts(pattern, text)


def test_endless_strings_share_the_tokens_of_the_output() -> None:
    def longest(max_tokens: int) -> int:
        ours = re.compile(normalize(PROFILE, max_tokens))
        texts = (f'{{"name":"","age":1,"city":"","job":"{"x" * n}"}}' for n in range(0, 5000, 8))
        return max(n * 8 for n, text in enumerate(texts) if ours.fullmatch(text))

    assert longest(0) == longest(192)
    assert 16 <= longest(50) < longest(200) < longest(2000) < longest(100_000)
    assert longest(100_000) == 4992


def test_tokens_are_rounded_so_that_like_requests_share_a_key() -> None:
    assert [rounded_tokens(n) for n in (0, 1, 7, 8, 9, 15, 16, 200, 1000)] == [0, 1, 7, 8, 8, 14, 16, 192, 896]
