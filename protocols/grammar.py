"""Constraints on an output, as they travel: what the text must match, and how strictly it is read.

A `GrammarSpec` is plain data with a content key. The tokenizer proves in a limited worker that it compiles; the runner
builds it again under the same key. Nobody sends compiled grammars.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag", "choices"]

GRAMMAR_MISSING = "grammar_missing"
"""`code` of the error of a row whose grammar the runner has dropped since it was ready: the scheduler asks again."""


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """One constraint. Equal specs have equal keys; the text is never re-sorted, as property order is part of a schema."""

    kind: GrammarKind
    text: str
    """The client's own text: JSON for json_schema, structural_tag and choices (a list of strings)."""
    backend: str = "auto"
    """auto | llguidance | outlines (--grammar-backend)."""
    whitespace: str = "flexible"
    """flexible: at most what a pretty printer makes | compact: none between JSON tokens | a regular expression."""
    lenient: bool = False
    """Ignore keywords that can't be enforced instead of refusing them (--grammar-lenient)."""

    max_tokens: int = 0
    """Tokens that the output may have (0: not known): bounds endless strings of expressions that describe JSON, so that they
    close in time. Of regular expressions only, and through `rounded_tokens`, so that like requests share a key."""

    @property
    def key(self) -> str:
        """SHA-256 (hex) of everything above."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


def rounded_tokens(tokens: int) -> int:
    """`tokens` rounded down to three binary digits: 200 -> 192, 1000 -> 896."""
    shift = max(tokens.bit_length() - 3, 0)
    return tokens >> shift << shift
