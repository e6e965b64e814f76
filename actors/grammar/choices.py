"""`choices`: the output is exactly one of some texts."""

from __future__ import annotations

import msgspec

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.regex_tree import escape
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.limits import MAX_ENUM_VALUES


def choices_regex(text: str, vocabulary: Vocabulary) -> str:
    """A JSON list of strings -> the normalised regular expression of exactly these texts.

    Repeated ones count once, and one may be the beginning of another (then the model decides whether to end there). Raises
    GrammarError for no choice at all, an empty one (an output has at least one token), one that the model's tokens can't
    write, or more than MAX_ENUM_VALUES.
    """
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise GrammarError(f"choices must be a list of strings: {error}", param="choices") from None
    except RecursionError:
        raise GrammarError("choices must be a list of strings", param="choices") from None
    if not choices:
        raise GrammarError("choices is empty: give at least one text", param="choices")
    if len(choices) > MAX_ENUM_VALUES:
        message = f"{len(choices)} choices, at most {MAX_ENUM_VALUES} are allowed"
        raise GrammarError(message, code="grammar_too_large", param="choices")
    for position, choice in enumerate(choices):
        if not choice:
            raise GrammarError("a choice can't be empty", param=f"choices.{position}")
        if not vocabulary.can_spell(choice):
            raise GrammarError("the model has no tokens for a choice", param=f"choices.{position}")
    return "|".join(escape(choice) for choice in dict.fromkeys(choices))
