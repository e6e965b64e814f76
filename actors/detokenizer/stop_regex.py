"""Stop expressions, found in a text that arrives in pieces, in time linear in the text.

A Thompson automaton (Thompson 1968) whose threads know their age, the characters since they started; sets of threads become
nodes that are built when first met, so a character costs one dictionary look-up afterwards (a lazy DFA). The oldest thread
tells exactly how much text must be held back, and a match's start.

Like the stop strings, the stop fires at the first character with which the text so far ends in a match; of several
matches that end there the longest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from radixcast.actors.detokenizer.regex_syntax import Alt, Begin, Char, End, Node, Repeat, Seq, Test, parse
from radixcast.actors.detokenizer.stop_strings import Match
from radixcast.protocols.errors import InvalidRequest

MAX_STATES = 1024
"""States of the automaton of one request, which bound the work that a hostile one makes of a character (about 0.3 ms); a larger
one is refused. `.{0,300}` takes 600, an ordinary expression a few dozen."""
MAX_CELLS = 50_000
"""Threads kept in nodes of one automaton; past it, nodes are built anew."""

Context = int
"""Where a position is: AT_START of the text, after a NEWLINE, or INSIDE a line."""
AT_START, NEWLINE, INSIDE = 0, 1, 2


@dataclass(slots=True)
class _State:
    """Either takes a character (`test`), or forks (`forks`), or accepts expression number `accepts`."""

    test: Test | None = None
    next: int = -1
    forks: tuple[int, ...] = ()
    begin: Begin | None = None
    """Forks only where this holds."""
    accepts: int = -1


class _NodeOfThreads:
    """A set of threads, and where each character leads from it."""

    __slots__ = ("accept", "edges", "hold", "threads")

    def __init__(self, threads: tuple[tuple[int, int], ...], accept: tuple[int, int] | None) -> None:
        self.threads = threads
        """(age, state) of states that take a character, oldest first."""
        self.accept = accept
        """(length, expression) of the longest match that ends here."""
        self.hold = threads[0][0] if threads else 0
        self.edges: dict[str, _NodeOfThreads] = {}


class StopRegex:
    """The automaton of some expressions. Immutable but for its memory of nodes; shared by requests of one process."""

    def __init__(self, expressions: Sequence[str]) -> None:
        """Raises InvalidRequest, naming `stop_regex`, for what `regex_syntax` refuses and for too large expressions."""
        self.expressions = tuple(expressions)
        self._states: list[_State] = []
        starts = tuple(
            self._build(parse(expression), self._add(_State(accepts=number)))
            for number, expression in enumerate(self.expressions)
        )
        self._start = self._add(_State(forks=starts))
        self._cells = 0
        self._nodes: dict[tuple[tuple[tuple[int, int], ...], tuple[int, int] | None], _NodeOfThreads] = {}
        self.initial = self._node([], AT_START)

    def step(self, node: _NodeOfThreads, char: str) -> _NodeOfThreads:
        """The node after `char`; remembered."""
        states = self._states
        moved = [(age + 1, states[s].next) for age, s in node.threads if (test := states[s].test) and test(char)]
        if self._cells > MAX_CELLS:
            self._forget()
        following = self._node(moved, NEWLINE if char == "\n" else INSIDE)
        node.edges[char] = following
        return following

    def _forget(self) -> None:
        """Drop all nodes but those that scans stand on; they lose their edges, so nothing keeps the others alive."""
        for node in self._nodes.values():
            node.edges.clear()
        self._nodes.clear()
        self._cells = 0

    def _node(self, moved: list[tuple[int, int]], context: Context) -> _NodeOfThreads:
        """Follow all forks from `moved` (oldest first) and from a new thread of age 0."""
        seen: set[int] = set()
        threads: list[tuple[int, int]] = []
        accept: tuple[int, int] | None = None
        for age, origin in (*moved, (0, self._start)):
            stack = [origin]
            while stack:
                number = stack.pop()
                if number in seen:
                    continue
                seen.add(number)
                state = self._states[number]
                if state.accepts >= 0:
                    accept = accept or (age, state.accepts)
                elif state.test:
                    threads.append((age, number))
                elif state.begin is None or context == AT_START or (state.begin.line and context == NEWLINE):
                    stack.extend(reversed(state.forks))
        key = (tuple(threads), accept)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _NodeOfThreads(*key)
            self._cells += len(threads) + 1
        return node

    # -- construction, from the end to the start: build(node, next) is the state that `node` begins with

    def _add(self, state: _State) -> int:
        if len(self._states) >= MAX_STATES:
            raise InvalidRequest(
                f"stop_regex is too large: it needs more than {MAX_STATES} states", param="sampling_params.stop_regex"
            )
        self._states.append(state)
        return len(self._states) - 1

    def _build(self, node: Node, following: int) -> int:
        match node:
            case Char(test):
                return self._add(_State(test=test, next=following))
            case Begin():
                return self._add(_State(forks=(following,), begin=node))
            case Seq(items):
                for item in reversed(items):
                    following = self._build(item, following)
                return following
            case Alt(items):
                return self._add(_State(forks=tuple(self._build(item, following) for item in items)))
            case Repeat(item, low, high):
                end = following
                for _ in range((high or low) - low):
                    following = self._add(_State(forks=(self._build(item, following), end)))
                for _ in range(low):
                    before, following = following, self._build(item, following)
                    if following == before:  # an empty item: `(){1000000000}` is no work
                        break
                return following
            case End():
                raise AssertionError("parse drops every $")


class StopRegexScan:
    """Where one text stands in the automaton."""

    def __init__(self, automaton: StopRegex) -> None:
        self._automaton = automaton
        self._node = automaton.initial

    @property
    def hold(self) -> int:
        """Characters at the end of the text that may still become a match; nothing less and nothing more."""
        return self._node.hold

    def feed(self, text: str) -> Match | None:
        """Go on with `text`; the first stop in it, after which the scan is over."""
        node, step = self._node, self._automaton.step
        for index, char in enumerate(text):
            following = node.edges.get(char)
            node = following if following is not None else step(node, char)
            if node.accept is not None:
                length, number = node.accept
                return Match(index + 1, length, self._automaton.expressions[number])
        self._node = node
        return None


@lru_cache(maxsize=16)
def stop_regex(expressions: tuple[str, ...]) -> StopRegex:
    """The automaton of `expressions`, kept for the next request. Raises InvalidRequest naming `stop_regex`."""
    return StopRegex(expressions)
