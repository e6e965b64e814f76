"""GBNF and Lark: what is refused, and that cutting a grammar into terminals does not change its language."""

from __future__ import annotations

import functools
import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.grammar_walks import accepts, walk
from radixcast.actors.grammar.ebnf import check_rules, lex, to_lark
from radixcast.actors.grammar.ebnf_parse import Alt, Chars, Ref, Repeat, Seq, Tree, parse_gbnf
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.llg import LlguidanceCompiled, compile_ebnf
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" char* "\"" ws   # right after it: white space
char   ::= [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""

ARITHMETIC = """root ::= term (("+" | "-") term)*
term ::= factor (("*" | "/") factor)*
factor ::= "(" root ")" | [0-9]+"""

SQL = """root ::= select
select ::= "SELECT " columns " FROM " name (" WHERE " name " = " value)?
columns ::= "*" | name (", " name)*
name ::= [a-z_]+
value ::= [0-9]+ | "'" [^']* "'"
"""


def compiled(text: str, vocabulary: Vocabulary) -> LlguidanceCompiled:
    return compile_ebnf(GrammarSpec(kind="ebnf", text=text), vocabulary)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (JSON_GBNF, ['{"a": [1, 2.5, {"b": null}], "c": "x\\n\\u00e9 中文 😀"}', "{}"], ['{"a"}', "[1]", '{"a": 01}']),
        (ARITHMETIC, ["1", "12*(3-4)/5"], ["", "1+", "(1"]),
        (SQL, ["SELECT * FROM t", "SELECT a, b FROM t WHERE a = 'x y'"], ["SELECT a FROM", "SELECT A FROM t"]),
        ('root ::= "hello" | "hi"', ["hello", "hi"], ["h", "hello "]),
        ("root ::= 'it''s'", ["its"], ["it's"]),
        ('root ::= [a-z]+ "b"', ["ab", "abb", "bb"], ["b", "a"]),
        ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab"]),
        ('root ::= "(" root ")" | [a-z]* "b"', ["b", "((ab))", "(abb)"], ["()", "a"]),
        ('root ::= a | "x" root\na ::= "a" "bc" | "ab" "d"', ["abc", "xxabd"], ["x"]),
        ('root ::= x-1 y.2\nx-1 ::= "a"{2,3}\ny.2 ::= "b"{,2} "c"{1,} "d"{2}', ["aacdd", "aaabbcccdd"], ["acdd", "aabbbcdd"]),
        (r'root ::= "\x41\u4e2d\U0001F600\t\"" [\]\-\\]', ['A中😀\t"]', 'A中😀\t"-', 'A中😀\t"\\'], ["A"]),
        ("root ::= .{2}", ["ab", "😀\n"], ["a", "abc"]),
        ('root ::= ws\nws ::= "" | " " ws "x"', ["", " x", "  xx"], [" "]),
        ('root ::= "a"\n  | "b"\n\n  | "c" # the end', ["a", "b", "c"], ["d"]),
        ("root ::= [^a]", ["b", "中"], ["a", ""]),
        ('root ::= expr\nexpr ::= expr "+" expr | [0-9]', ["1", "1+2+3"], ["+", "1+"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_languages(vocabulary: Vocabulary, text: str, good: list[str], bad: list[str]) -> None:
    made = compiled(text, vocabulary)
    for word in good:
        assert accepts(made, vocabulary, word), word
    for word in bad:
        assert not accepts(made, vocabulary, word), word


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("   \n", "empty"),
        ('a ::= "x"', "no rule called root"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined twice"),
        ("root ::= missing", "'missing', which is not defined"),
        ("root ::= root", "never end"),
        ('root ::= "a" root', "never end"),
        ('root ::= "a" | b\nb ::= c "x"\nc ::= b', "never end"),
        ('root ::= "a', "line 1, column 10"),
        ("root ::= [a", "class that does not end"),
        ("root ::= [z-a]", "swapped"),
        ("root ::= []", "empty class"),
        ('root ::= ("a"', "unmatched"),
        ('root ::= "a")', "expected a rule"),
        ('root ::= "a"{3,1}', "swapped"),
        ('root ::= "a"{}', "expected {m}"),
        ('root ::= "a"{99999999}', "repeats"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\ud800"', "not a Unicode character"),
        ('root ::= (="a") "a"', "look-ahead"),
        ("root := a", "expected a rule"),
        ("root ::= ?", "unexpected"),
        ("root ::= " + "(" * 1000, "too deep"),
        ('start: "a" %json {"x-guidance": {"lenient": true}}', "x-guidance"),
    ],
)
def test_refusals(vocabulary: Vocabulary, text: str, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(text, vocabulary)
    assert message in str(caught.value)
    assert caught.value.info.code == "invalid_grammar"
    assert caught.value.info.status == 400


@pytest.mark.parametrize(
    "text", ['root ::= "' + "a" * 600_000 + '"', "root ::= a0\n" + "\n".join(f'a{i} ::= "x"' for i in range(30_000))]
)
def test_too_large(text: str) -> None:
    with pytest.raises(GrammarError) as caught:
        to_lark(text)
    assert caught.value.info.code == "grammar_too_large"


def test_exponential_rules_stay_small() -> None:
    rules = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))
    assert len(to_lark(f'root ::= r0\n{rules}\nr60 ::= "a" | "b"')) < 200_000


def test_lark_passes(vocabulary: Vocabulary) -> None:
    made = compiled('start: "a" b\nb: /[0-9]+/ | "(" b ")"', vocabulary)
    assert accepts(made, vocabulary, "a((12))")
    assert not accepts(made, vocabulary, "a")
    with pytest.raises(GrammarError):
        compiled("start: nowhere", vocabulary)


def test_a_grammar_without_recursion_is_one_terminal() -> None:
    assert len(lex(SQL).terminals) == 1


@pytest.mark.parametrize("text", [JSON_GBNF, ARITHMETIC], ids=["json", "arithmetic"])
def test_walks_are_of_the_language(vocabulary: Vocabulary, text: str) -> None:
    made = compiled(text, vocabulary)
    ended = [out for seed in range(12) if (out := walk(made, vocabulary, seed, most=120)) is not None]
    assert ended
    for out in ended:
        assert accepts(made, vocabulary, out)
        if text is JSON_GBNF:
            json.loads(out)


# ------------------------------------------------------------------ against a matcher that tries everything


def derives(rules: dict[str, Tree], text: str) -> bool:
    """Whether `root` derives the text: sets of ends, by fixpoint (left recursion included)."""
    ends: dict[tuple[str, int], frozenset[int]] = {}

    def reach(tree: Tree, at: int) -> frozenset[int]:
        if isinstance(tree, Chars):
            inside = at < len(text) and any(low <= ord(text[at]) <= high for low, high in tree.ranges)
            return frozenset([at + 1] if inside else [])
        if isinstance(tree, Ref):
            return ends.get((tree.name, at), frozenset())
        if isinstance(tree, Alt):
            return frozenset().union(*(reach(option, at) for option in tree.options))
        if isinstance(tree, Seq):
            return functools.reduce(
                lambda places, item: frozenset(e for p in places for e in reach(item, p)), tree.items, frozenset([at])
            )
        assert isinstance(tree, Repeat)
        found: set[int] = set()
        places = frozenset([at])
        for count in itertools.count():
            if count >= tree.least:
                if places <= found:
                    return frozenset(found)
                found |= places
            if tree.most is not None and count == tree.most:
                return frozenset(found)
            if count > len(text) + tree.least:
                return frozenset(found)
            places = frozenset(e for p in places for e in reach(tree.item, p))
        raise AssertionError

    while True:
        changed = {}
        for name, tree in rules.items():
            for at in range(len(text) + 1):
                found = reach(tree, at)
                if found != ends.get((name, at), frozenset()):
                    changed[name, at] = found
        if not changed:
            return len(text) in ends.get(("root", 0), frozenset())
        ends |= changed


PARTS = st.recursive(
    st.sampled_from(['"a"', '"b"', '"ab"', '"aba"', "[ab]", "[a]", '""', "root", "x", "y"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(" ".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)
WORDS = [""] + ["".join(word) for n in range(1, 6) for word in itertools.product("ab", repeat=n)]


def check_language(vocabulary: Vocabulary, text: str, words: list[str]) -> None:
    rules = parse_gbnf(text)
    try:
        check_rules(rules)
        made = compiled(text, vocabulary)
    except GrammarError:
        return
    for word in words:
        assert accepts(made, vocabulary, word) == derives(rules, word), (text, word, to_lark(text))


@settings(max_examples=60, deadline=None)
@given(root=PARTS, x=PARTS, y=PARTS, seed=st.integers(0, 1000))
def test_cutting_keeps_the_language(vocabulary: Vocabulary, root: str, x: str, y: str, seed: int) -> None:
    check_language(vocabulary, f"root ::= {root}\nx ::= {x}\ny ::= {y}", random.Random(seed).sample(WORDS, 12))


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(root=PARTS, x=PARTS, y=PARTS)
def test_cutting_keeps_the_language_of_many(vocabulary: Vocabulary, root: str, x: str, y: str) -> None:
    check_language(vocabulary, f"root ::= {root}\nx ::= {x}\ny ::= {y}", WORDS)
