"""The embedded model's vocabulary, loaded once for all tests of grammars."""

from __future__ import annotations

import pytest

from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.model import ModelSpec


@pytest.fixture(scope="session")
def vocabulary(smollm2_spec: ModelSpec) -> Vocabulary:
    """SmolLM2's 49 152 tokens."""
    return Vocabulary.load(smollm2_spec)
