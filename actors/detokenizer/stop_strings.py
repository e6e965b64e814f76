"""Stop strings, found in a text that arrives in pieces (Aho and Corasick 1975).

The stop fires at the first character with which the text so far ends in a stop string; of several that end there the
longest counts. How the text is cut into pieces makes no difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_CACHED_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Match:
    """A stop in the piece last fed."""

    end: int
    """Characters of that piece up to and including the match; >= 1."""
    length: int
    """Characters of the match; its start may lie in earlier pieces."""
    what: str
    """The stop string or expression."""


class StopStrings:
    """The automaton: nodes are prefixes of stop strings. Immutable, shared by requests."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings. O(total length)."""
        self.goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.found: list[str | None] = [None]
        """The longest stop string that the node's prefix ends in."""
        for stop in stops:
            self._add(stop)
        self._link()
        self.first_chars = frozenset(stop[0] for stop in stops)

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self.goto[node].get(char)
            if child is None:
                child = len(self.goto)
                self.goto[node][char] = child
                self.goto.append({})
                self.depth.append(self.depth[node] + 1)
                self.fail.append(0)
                self.found.append(None)
            node = child
        self.found[node] = stop

    def _link(self) -> None:
        queue = deque(self.goto[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.goto[node].items():
                fail = self.fail[node]
                while fail and char not in self.goto[fail]:
                    fail = self.fail[fail]
                self.fail[child] = self.goto[fail].get(char, 0)
                self.found[child] = self.found[child] or self.found[self.fail[child]]
                queue.append(child)


class StopStringScan:
    """Where one text stands in the automaton."""

    def __init__(self, automaton: StopStrings) -> None:
        self._automaton = automaton
        self._node = 0

    @property
    def hold(self) -> int:
        """Characters at the end of the text that may still become a stop string; nothing less and nothing more."""
        return self._automaton.depth[self._node]

    def feed(self, text: str) -> Match | None:
        """Go on with `text`; the first stop in it, after which the scan is over."""
        auto, node = self._automaton, self._node
        if not node and auto.first_chars.isdisjoint(text):
            return None
        goto, fail, found = auto.goto, auto.fail, auto.found
        for index, char in enumerate(text):
            child = goto[node].get(char)
            while child is None and node:
                node = fail[node]
                child = goto[node].get(char)
            node = child or 0
            stop = found[node]
            if stop is not None:
                self._node = node
                return Match(index + 1, len(stop), stop)
        self._node = node
        return None


def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of `stops`; small ones are kept for the next request."""
    return _cached(stops) if sum(map(len, stops)) <= _CACHED_CHARS else StopStrings(stops)


@lru_cache(maxsize=256)
def _cached(stops: tuple[str, ...]) -> StopStrings:
    return StopStrings(stops)
