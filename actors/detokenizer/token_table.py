"""What each token id says: one table for a tokenizer, shared by all requests.

The decoder of a tokenizer.json is read as one of three kinds:

* ``bytes``   ByteLevel (GPT-2, Llama 3, Qwen, SmolLM): a token is a byte string, text is their UTF-8, lossily decoded.
* ``pieces``  SentencePiece-like (Llama 2, Mistral, Gemma; Metaspace): a token is a string or one raw byte (byte fallback).
* ``window``  anything else: the tokenizer's own `decode` over a short window of tokens.

`decoding.py` turns ids into text with it; the rule is always that the whole equals `tokenizer.decode(ids)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

Kind = Literal["bytes", "pieces", "window", "none"]
Piece = str | int | None
"""Text of a token, or its raw byte, or None for a token that decoding drops."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class _Rules:
    """A tokenizer's decoder, as far as it works token by token."""

    kind: Kind
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    strip_count: int = 0
    first_drops: str = ""


class TokenTable:
    """Ids to bytes or strings. Build one for each tokenizer: O(vocabulary)."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int = 0) -> None:
        """`vocab_size`: rows of the model's embedding; ids that the tokenizer does not know have no text."""
        self.tokenizer = tokenizer
        rules = _read_rules(tokenizer)
        self.kind: Kind = rules.kind
        self.strip = rules.strip
        """A character cut from the front of the text, up to `strip_count` times (SentencePiece's dummy prefix)."""
        self.strip_count = rules.strip_count
        self.first_drops = rules.first_drops
        """A character dropped wherever it stands in the first token (Metaspace)."""
        added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        self.special: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True) if tokenizer else 0, *(i + 1 for i in added), 0)
        self.size = size
        tokens = [tokenizer.id_to_token(i) if tokenizer else None for i in range(size)]
        self.firsts: dict[int, str] = {}
        """Text of a token that differs when it is the first one."""
        self._raw: list[bytes] = []
        self._pieces: list[Piece] = []
        if self.kind == "bytes":
            self._raw = _byte_strings(tokens)
            self._raw_shown = [b"" if i in self.special else raw for i, raw in enumerate(self._raw)]
        elif self.kind == "pieces":
            self._pieces = [_piece(token, rules) for token in tokens]
            self._pieces_shown = [None if i in self.special else p for i, p in enumerate(self._pieces)]
            self.firsts = {
                i: _first(t, rules) for i, t in enumerate(tokens) if t and rules.first_drops and rules.first_drops in t
            }

    def raw(self, skip_special: bool) -> list[bytes]:
        """Kind ``bytes``: byte string of each id; empty for special tokens when they are skipped."""
        return self._raw_shown if skip_special else self._raw

    def pieces(self, skip_special: bool) -> list[Piece]:
        """Kind ``pieces``: piece of each id; None for special tokens when they are skipped."""
        return self._pieces_shown if skip_special else self._pieces

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 bytes of one token, special ones included (a part of a character for some)."""
        if not 0 <= token < self.size:
            return b""
        if self.kind == "bytes":
            return self._raw[token]
        if self.kind == "pieces":
            piece = self._pieces[token]
            return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()
        return self.tokenizer.decode([token], skip_special_tokens=False).encode() if self.tokenizer else b""

    def text_of(self, token: int) -> str:
        """Text of one token by itself; U+FFFD for a part of a character."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The whole text, by the tokenizer itself."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special) if self.tokenizer else ""


def _read_rules(tokenizer: Tokenizer | None) -> _Rules:
    if tokenizer is None:
        return _Rules("none")
    decoder = tokenizer.decoder
    if decoder is None:
        return _Rules("window")
    steps = _flatten(json.loads(decoder.__getstate__()))
    if [s["type"] for s in steps] == ["ByteLevel"]:
        return _Rules("bytes")
    if [s["type"] for s in steps] == ["Metaspace"]:
        mark, scheme = steps[0]["replacement"], steps[0].get("prepend_scheme", "always")
        return _Rules("pieces", ((mark, " "),), first_drops="" if scheme == "never" else mark)
    return _read_sequence(steps)


def _read_sequence(steps: list[dict[str, Any]]) -> _Rules:
    """Replace*, ByteFallback?, Fuse, Strip? in this order work token by token; all else needs a window."""
    rest = list(steps)
    replacements = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    if byte_fallback:
        rest.pop(0)
    if not rest or rest.pop(0)["type"] != "Fuse":
        return _Rules("window")
    strip, count = "", 0
    if rest and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        step = rest.pop(0)
        strip, count = step["content"], step["start"]
    if rest:
        return _Rules("window")
    return _Rules("pieces", tuple(replacements), byte_fallback, strip, count)


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] == "Sequence":
        return [inner for part in step["decoders"] for inner in _flatten(part)]
    return [step]


def _piece(token: str | None, rules: _Rules) -> Piece:
    if token is None:
        return None
    for old, new in rules.replacements:
        token = token.replace(old, new)
    byte = _BYTE_TOKEN.fullmatch(token) if rules.byte_fallback else None
    return int(byte[1], 16) if byte else token


def _first(token: str, rules: _Rules) -> str:
    """The text of a token that is the first of the text (Metaspace drops its marks there)."""
    return token.replace(rules.first_drops, "")


def _byte_strings(tokens: Sequence[str | None]) -> list[bytes]:
    """ByteLevel: each character stands for one byte; a token with any other character stands for its own UTF-8."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    table = {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}
    result = []
    for token in tokens:
        values = [table.get(char, -1) for char in token or ""]
        result.append(bytes(values) if -1 not in values else (token or "").encode())
    return result
