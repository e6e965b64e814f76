"""structural_tag."""

from __future__ import annotations

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec


def tags_to_lark(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    raise GrammarError("structural_tag is not there yet")
