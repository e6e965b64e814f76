"""Ids to text, token by token: what has been pushed so far, joined, is what the tokenizer says of the whole.

::

    ids      [ 12 ][ 240 159 ][ 152 128 ][ 9 ]
    push     "Hi"   ""         "😀"       "!"        a character appears with the token that completes it
    end      what is still incomplete, as plain decoding shows it (U+FFFD)

A U+FFFD is never pushed for a character that a later token may still complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from radixcast.actors.detokenizer.token_table import REPLACEMENT, TokenTable

_new_utf8 = codecs.getincrementaldecoder("utf-8")

WINDOW_LIMIT = 64
"""Tokens without certain text after which the window decoder shows what it has."""
WINDOW_CONTEXT = 6
"""Tokens already shown that the window decoder keeps in front, since a decoder may look at its neighbours."""


class StreamDecoder(Protocol):
    """State of one text being decoded."""

    def push(self, token: int) -> str:
        """Text that has become certain with this token."""

    def push_many(self, tokens: Sequence[int]) -> str:
        """The same for several tokens at once."""

    def end(self) -> str:
        """What was still uncertain, now that nothing follows."""


def stream_decoder(table: TokenTable, *, skip_special: bool = True, context: Sequence[int] = ()) -> StreamDecoder:
    """The decoder that fits the tokenizer. `context`: tokens before the text; with some, the text is not a beginning
    (SentencePiece then keeps its leading space)."""
    if table.kind == "bytes":
        return ByteDecoder(table.raw(skip_special))
    if table.kind == "pieces":
        return PieceDecoder(table, skip_special, context)
    if table.kind == "window":
        return WindowDecoder(table, skip_special, context)
    return NoDecoder()


class NoDecoder:
    """A model without a tokenizer: there is no text."""

    def push(self, token: int) -> str:
        return ""

    def push_many(self, tokens: Sequence[int]) -> str:
        return ""

    def end(self) -> str:
        return ""


class ByteDecoder:
    """ByteLevel: UTF-8 over the tokens' bytes; Python's and Rust's lossy decoding replace the same maximal parts."""

    def __init__(self, raw: list[bytes]) -> None:
        self._raw = raw
        self._utf8 = _new_utf8("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._raw[token])

    def push_many(self, tokens: Sequence[int]) -> str:
        raw = self._raw
        return self._utf8.decode(b"".join([raw[token] for token in tokens]))

    def end(self) -> str:
        return self._utf8.decode(b"", True)


class PieceDecoder:
    """SentencePiece-like: strings, and runs of raw bytes.

    The tokenizer decodes a run of byte tokens as one: to its text when all of it is UTF-8, else to one U+FFFD a byte. So a run
    is certain only when it ends.
    """

    def __init__(self, table: TokenTable, skip_special: bool, context: Sequence[int]) -> None:
        self._pieces = table.pieces(skip_special)
        self._firsts = table.firsts
        self._strip = table.strip
        self._run = bytearray()
        begins = all(self._pieces[token] is None for token in context)
        self._strip_left = table.strip_count if begins else 0
        self._first = begins and bool(self._firsts)

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if piece is None:
            return ""
        if self._first:
            self._first = False
            piece = self._firsts.get(token, piece)
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._run:
            piece = self._end_run() + piece
        return self._without_prefix(piece) if self._strip_left else piece

    def push_many(self, tokens: Sequence[int]) -> str:
        return "".join([self.push(token) for token in tokens])

    def end(self) -> str:
        text = self._end_run() if self._run else ""
        return self._without_prefix(text) if self._strip_left else text

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _without_prefix(self, text: str) -> str:
        while text and self._strip_left:
            if not text.startswith(self._strip):
                self._strip_left = 0
                break
            text = text[len(self._strip) :]
            self._strip_left -= 1
        return text


class WindowDecoder:
    """Any other decoder: decode a short window with and without its new tokens, and show the difference."""

    def __init__(self, table: TokenTable, skip_special: bool, context: Sequence[int]) -> None:
        self._table = table
        self._skip = skip_special
        self._dropped = table.special if skip_special else frozenset()
        self._window = [token for token in context if token not in self._dropped][-WINDOW_CONTEXT:]
        self._shown = len(self._window)

    def push(self, token: int) -> str:
        if token in self._dropped:
            return ""
        self._window.append(token)
        text = self._table.decode(self._window, self._skip)
        if text.endswith(REPLACEMENT) and len(self._window) - self._shown < WINDOW_LIMIT:
            return ""
        return self._take(text)

    def push_many(self, tokens: Sequence[int]) -> str:
        return "".join([self.push(token) for token in tokens])

    def end(self) -> str:
        return self._take(self._table.decode(self._window, self._skip))

    def _take(self, text: str) -> str:
        before = self._table.decode(self._window[: self._shown], self._skip)
        self._window = self._window[-WINDOW_CONTEXT:]
        self._shown = len(self._window)
        return text[len(before) :]
