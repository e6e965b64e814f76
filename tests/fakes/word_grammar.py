"""A grammar backend whose language is a finite set of token sequences: what is allowed, forced and complete is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.errors import InternalError
from radixcast.protocols.grammar import GRAMMAR_MISSING

Word = tuple[int, ...]


class Panic(BaseException):
    """What a native library's panic looks like to Python."""


@dataclass(eq=False)
class WordGrammar:
    """An interface.Compiled. Nothing leads on from prefixes in `dead`; fills after prefixes in `panics` raise Panic."""

    words: frozenset[Word]
    eos_ids: tuple[int, ...] = ()
    dead: frozenset[Word] = frozenset()
    panics: frozenset[Word] = frozenset()
    nbytes: int = 100
    fills: int = 0
    matchers: int = 0
    next_tokens: dict[Word, set[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.next_tokens = {}
        for word in self.words | self.dead:
            for at, token in enumerate(word):
                self.next_tokens.setdefault(word[:at], set()).add(token)

    def matcher(self) -> WordMatcher:
        """A matcher at the start."""
        self.matchers += 1
        return WordMatcher(self)


class WordMatcher:
    """An interface.Matcher."""

    def __init__(self, grammar: WordGrammar, done: Word = ()) -> None:
        self.grammar = grammar
        self.done = done
        self.ended = False
        self.error = ""

    def fill(self, mask_W: Int32Array) -> None:
        self.grammar.fills += 1
        if self.done in self.grammar.panics:
            raise Panic("told to")
        flags = np.zeros(32 * len(mask_W), np.uint8)
        flags[list(self._next())] = 1
        if self.complete:
            flags[list(self.grammar.eos_ids)] = 1
        mask_W[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        if token in self.grammar.eos_ids and self.complete and not self.ended:
            self.ended = True
            return True
        if self.ended or token not in self._next():
            return False
        self.done += (token,)
        return True

    def rollback(self, tokens: int) -> None:
        raise NotImplementedError

    def fork(self) -> WordMatcher:
        return WordMatcher(self.grammar, self.done)

    def forced(self, limit: int) -> list[int]:
        ahead, tokens = WordMatcher(self.grammar, self.done), list[int]()
        while len(tokens) < limit and not ahead.complete and len(ahead._next()) == 1:
            tokens += ahead._next()
            ahead.accept(tokens[-1])
        return tokens

    @property
    def complete(self) -> bool:
        return self.done in self.grammar.words

    @property
    def finished(self) -> bool:
        return self.ended or (self.complete and not self._next())

    def _next(self) -> set[int]:
        return self.grammar.next_tokens.get(self.done, set())


class Grammars(dict[str, WordGrammar]):
    """Prepared grammars by key: a constraints.Source."""

    def get(self, key: str) -> WordGrammar:  # type: ignore[override]
        if key not in self:
            raise InternalError("it is not there", code=GRAMMAR_MISSING)
        return self[key]


def grammar(words: Iterable[Iterable[int]], **fields: object) -> WordGrammar:
    """Words from lists of ids, or from strings' bytes."""
    return WordGrammar(frozenset(tuple(w) for w in words), **fields)  # type: ignore[arg-type]
