"""Characters that a model can't write: some vocabularies lack single bytes (SmolLM2's has no token for 21 of them)."""

from __future__ import annotations

from functools import lru_cache

from radixcast.actors.grammar.regex_tree import Ranges, ranges
from radixcast.actors.grammar.vocabulary import Vocabulary

_CONTINUATIONS = frozenset(range(0x80, 0xC0))


@lru_cache(maxsize=2)
def unwritable(vocabulary: Vocabulary) -> Ranges:
    """All characters that surely can't be written: those whose first byte begins no token. A set that is too small is no harm.

    Nothing is told of a vocabulary that is not made of bytes (words, or characters without a fallback).
    """
    if not vocabulary.spelled_bytes >= _CONTINUATIONS:
        return ()
    begun = {data[0] for data in vocabulary.tokens if data}
    return ranges(pair for byte in range(0xF5) if byte not in begun for pair in _led_by(byte))


def _led_by(byte: int) -> list[tuple[int, int]]:
    """The characters whose UTF-8 begins with `byte`."""
    if byte < 0x80:
        return [(byte, byte)]
    for first, length in ((0xF0, 4), (0xE0, 3), (0xC2, 2)):
        if byte >= first:
            bits = 6 * (length - 1)
            lead = byte & (0x7F >> length)
            low, high = max(lead << bits, (0x80, 0x800, 0x10000)[length - 2]), ((lead + 1) << bits) - 1
            return [(low, min(high, 0x10FFFF))]
    return []
