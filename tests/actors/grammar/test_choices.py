"""`choices`: exactly one of some texts."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.grammar_walks import accepts, walk
from radixcast.actors.grammar.choices import choices_regex
from radixcast.actors.grammar.compile import compile_grammar
from radixcast.actors.grammar.interface import Compiled, GrammarError
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.limits import MAX_ENUM_VALUES


def compiled(choices: list[str], vocabulary: Vocabulary) -> Compiled:
    return compile_grammar(GrammarSpec(kind="choices", text=json.dumps(choices)), vocabulary)


CHOICES = ["yes", "yes, but", "no\n", ' "quoted" \\n ', "北京", "a.c|(b)*[^x]{2}", "😀", "yes", "$^"]


def test_each_choice_and_nothing_else(vocabulary: Vocabulary) -> None:
    grammar = compiled(CHOICES, vocabulary)
    for choice in CHOICES:
        assert accepts(grammar, vocabulary, choice)
    for text in ("", "ye", "yes,", "no", "abc", "b", "北", "yesyes", "Yes"):
        assert not accepts(grammar, vocabulary, text)
    assert {walk(grammar, vocabulary, seed) for seed in range(60)} <= set(CHOICES)


def test_the_model_decides_whether_a_beginning_is_the_end(vocabulary: Vocabulary) -> None:
    matcher = compiled(["cat", "cat nap"], vocabulary).matcher()
    for token in vocabulary.encode("cat"):
        assert matcher.accept(token)
    assert matcher.complete
    assert not matcher.finished
    for token in vocabulary.encode(" nap"):
        assert matcher.accept(token)
    assert matcher.finished


def test_one_choice_is_forced(vocabulary: Vocabulary) -> None:
    matcher = compiled(["The quick brown fox"], vocabulary).matcher()
    forced = matcher.forced(100)
    assert vocabulary.tokenizer.decode_str(forced) == "The quick brown fox"
    assert forced == vocabulary.encode("The quick brown fox")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "empty"),
        ('["a",""]', "empty"),
        ("{}", "list of strings"),
        ("[1]", "list of strings"),
        ("nonsense", "list of strings"),
        ("[" * 100_000, "list of strings"),
        ('["a\U00040000"]', "no tokens"),
    ],
)
def test_what_is_refused(text: str, says: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match=says) as caught:
        compile_grammar(GrammarSpec(kind="choices", text=text), vocabulary)
    assert caught.value.info.status == 400
    assert (caught.value.info.param or "").startswith("choices")


def test_too_many_choices_are_refused_and_many_are_not(vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled([str(n) for n in range(MAX_ENUM_VALUES + 1)], vocabulary)
    assert caught.value.info.code == "grammar_too_large"
    grammar = compiled([f"item {n}" for n in range(2000)], vocabulary)
    assert accepts(grammar, vocabulary, "item 1999")
    assert not accepts(grammar, vocabulary, "item 2000")


@settings(max_examples=50, deadline=None)
@given(choices=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6), other=st.text(max_size=8))
def test_the_expression_of_choices_is_exact(choices: list[str], other: str, vocabulary: Vocabulary) -> None:
    choices = [choice for choice in choices if vocabulary.can_spell(choice)]
    if choices:
        ours = re.compile(choices_regex(json.dumps(choices), vocabulary))
        assert all(ours.fullmatch(choice) for choice in choices)
        assert bool(ours.fullmatch(other)) == (other in choices)
