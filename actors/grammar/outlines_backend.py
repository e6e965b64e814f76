"""Regular expressions enforced by outlines-core's token automata: a state is a number, a mask a row that was packed before.

A mask costs a dictionary look-up and a copy (about 1 µs; llguidance: 8 to 20 µs), a token a binary search. Where the text is
certain, the mask allows the first token of its canonical tokenisation only, as llguidance does: so what is sampled token by
token and what is appended by jump-forward are the same.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from radixcast.actors.grammar.outlines_index import TokenAutomaton
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.buffers import Int32Array

MAX_ROW_BYTES = 64 << 20
"""Packed masks that one automaton keeps."""
_MAX_CERTAIN = 256
"""Bytes of certain text that are looked ahead."""


class OutlinesCompiled:
    """A regular expression as an automaton, with the masks of the states that outputs have been in. Thread-safe."""

    def __init__(self, automaton: TokenAutomaton, vocabulary: Vocabulary) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self._pieces = _pieces(vocabulary)
        self._rows: dict[int, Int32Array] = {}
        self._certain: dict[int, int] = {}
        self._lock = threading.Lock()
        states = len(automaton.final)
        self._max_rows = max(1, min(states, MAX_ROW_BYTES // (4 * vocabulary.words)))
        self.nbytes = automaton.nbytes + self._max_rows * 4 * vocabulary.words
        """The arrays, and all masks that may be kept."""

    def matcher(self) -> OutlinesMatcher:
        """A matcher at the start of the output."""
        return OutlinesMatcher(self, [self.automaton.initial])

    def row(self, state: int) -> Int32Array:
        """The mask of a state (int32 [words]); not to be written to."""
        row = self._rows.get(state)
        if row is None:
            row = self._make_row(state)
            with self._lock:
                while len(self._rows) >= self._max_rows:
                    del self._rows[next(iter(self._rows))]
                self._rows[state] = row
        return row

    def ways(self, state: int) -> tuple[Int32Array, Int32Array]:
        """Tokens out of a state (ascending), and where they lead; both [n]."""
        automaton = self.automaton
        start, end = automaton.starts[state], automaton.starts[state + 1]
        return automaton.tokens[start:end], automaton.targets[start:end]

    def step(self, state: int, token: int) -> int:
        """Where a token leads from a state; -1: nowhere."""
        tokens, targets = self.ways(state)
        at = int(np.searchsorted(tokens, token))
        return int(targets[at]) if at < len(tokens) and tokens[at] == token else -1

    def certain_token(self, state: int) -> int:
        """The one token that may come next; -1: there is a choice (or none)."""
        token = self._certain.get(state)
        if token is None:
            token = self._certain[state] = self._first_certain(state)
        return token

    def _make_row(self, state: int) -> Int32Array:
        flags = np.zeros(self.vocabulary.words * 32, dtype=np.uint8)
        token = self.certain_token(state)
        flags[self.ways(state)[0] if token < 0 else token] = 1
        row = np.packbits(flags, bitorder="little").view(np.int32)
        if self.automaton.final[state]:
            row |= self.vocabulary.eos_bits
        return row

    def _first_certain(self, state: int) -> int:
        if self.automaton.final[state]:
            return -1
        tokens = self.ways(state)[0]
        if len(tokens) == 1:
            return int(tokens[0])
        text, ended = self._certain_text(state)
        if not text:
            return -1
        tokenizer = self.vocabulary.tokenizer
        canonical = tokenizer.tokenize_bytes(text) if ended else tokenizer.tokenize_partial(text)[0]
        return canonical[0] if canonical and self.step(state, canonical[0]) >= 0 else -1

    def _certain_text(self, state: int) -> tuple[bytes, bool]:
        """The bytes that must come next, and whether the output ends with them."""
        pieces, automaton = self._pieces, self.automaton
        text = b""
        while len(text) < _MAX_CERTAIN and not automaton.final[state]:
            tokens = self.ways(state)[0]
            if len(tokens) == 1:
                token = int(tokens[0])
            else:
                firsts = pieces.first_byte[tokens]
                token = pieces.of_byte[int(firsts[0])]
                if (firsts != firsts[0]).any() or self.step(state, token) < 0:
                    return text, False
            text += self.vocabulary.tokens[token]
            state = self.step(state, token)
        return text, bool(automaton.final[state]) and not len(self.ways(state)[0])


class OutlinesMatcher:
    """The state of one output: the states that it went through."""

    def __init__(self, compiled: OutlinesCompiled, states: list[int], ended: bool = False) -> None:
        self._compiled = compiled
        self._states = states
        self._ended = ended

    def fill(self, mask_W: Int32Array) -> None:
        """Write the tokens that may come next (int32 [words]); all zero after the end."""
        mask_W[:] = 0 if self._ended else self._compiled.row(self._states[-1])

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and no change, when it is not allowed."""
        if self._ended:
            return False
        if token in self._compiled.vocabulary.eos_ids:
            self._ended = self.complete
            return self._ended
        target = self._compiled.step(self._states[-1], token)
        if target < 0:
            return False
        self._states.append(target)
        return True

    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` accepted tokens."""
        if tokens > 0 and self._ended:
            self._ended = False
            tokens -= 1
        if tokens > 0:
            del self._states[max(1, len(self._states) - tokens) :]

    def fork(self) -> OutlinesMatcher:
        """An independent copy."""
        return OutlinesMatcher(self._compiled, list(self._states), self._ended)

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that must come next."""
        forced: list[int] = []
        state = self._states[-1]
        while len(forced) < limit and not self._ended:
            token = self._compiled.certain_token(state)
            if token < 0:
                break
            forced.append(token)
            state = self._compiled.step(state, token)
        return forced

    @property
    def complete(self) -> bool:
        """The output may end here."""
        return self._ended or bool(self._compiled.automaton.final[self._states[-1]])

    @property
    def finished(self) -> bool:
        """The output must end here."""
        return self._ended or (self.complete and not len(self._compiled.ways(self._states[-1])[0]))

    @property
    def error(self) -> str:
        """Never one: from every state an end can be reached."""
        return ""


class _Pieces:
    """First byte of each token (uint8 [rows]), and the token that is one byte (int [256]; -1: none)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.first_byte: npt.NDArray[np.uint8] = np.array([data[0] if data else 0 for data in vocabulary.tokens], np.uint8)
        self.of_byte = [-1] * 256
        ends = set(vocabulary.eos_ids)
        for token, data in enumerate(vocabulary.tokens):
            if len(data) == 1 and token not in ends:
                self.of_byte[data[0]] = token


@lru_cache(maxsize=2)
def _pieces(vocabulary: Vocabulary) -> _Pieces:
    return _Pieces(vocabulary)
