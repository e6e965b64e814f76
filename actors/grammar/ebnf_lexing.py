"""How a context-free grammar is cut into terminals for a greedy lexer.

Every maximal part without recursion starts as one terminal. Two terminals that may come at the same place are in conflict
when, after the first is complete, the other goes on with a character that may also follow the first: a greedy lexer would
always go on. Then the one that goes on is cut one level finer, until nothing is in conflict; single characters never are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from radixcast.actors.grammar.ebnf_automaton import Automaton, TooLarge, automaton, extensions, meet
from radixcast.actors.grammar.ebnf_parse import Alt, Chars, Ranges, Ref, Repeat, Seq, Tree, merged
from radixcast.actors.grammar.interface import GrammarError

_MAX_NODES = 20_000
_MAX_ROUNDS = 300
_MAX_SETS = 500


@dataclass(frozen=True, slots=True)
class Terminal:
    """A part that is one lexeme: an index into `Lexing.terminals`."""

    index: int


@dataclass(frozen=True, slots=True)
class LSeq:
    """Lowered Seq."""

    items: tuple[Lowered, ...]


@dataclass(frozen=True, slots=True)
class LAlt:
    """Lowered Alt."""

    options: tuple[Lowered, ...]


@dataclass(frozen=True, slots=True)
class LRepeat:
    """Lowered Repeat."""

    item: Lowered
    least: int
    most: int | None


Lowered = Terminal | Ref | LSeq | LAlt | LRepeat


class Lexing:
    """The cut grammar: `rules` whose leaves are terminals and references, and the tree of each terminal."""

    def __init__(self, rules: dict[str, Tree], start: str) -> None:
        """`rules`: only those left that take part in recursion, and `start`. Raises GrammarError (grammar_too_large) when no
        safe cut is found in reasonable time."""
        self.start = start
        self._source = rules
        self._cut: set[Tree] = set()
        self._automata: dict[Tree, Automaton] = {}
        self._extensions: dict[tuple[Tree, Tree], Ranges] = {}
        self.terminals: list[Tree] = []
        self.rules: dict[str, Lowered] = {}
        for _ in range(_MAX_ROUNDS):
            self._lower()
            if self._single or (worse := self._conflict()) is None:
                return
            self._cut.add(worse)
        raise GrammarError("the grammar is too ambiguous for its lexer", code="grammar_too_large")

    @property
    def _single(self) -> bool:
        """One terminal is the whole grammar: nothing follows it."""
        return isinstance(self.rules[self.start], Terminal)

    def nullable(self, terminal: Terminal) -> bool:
        """Whether the terminal may be empty."""
        return _may_be_empty(self.terminals[terminal.index])

    # -------------------------------------------------------------- cutting

    def _lower(self) -> None:
        self.terminals = []
        self._indices: dict[Tree, int] = {}
        self.rules = {name: self._lowered(tree) for name, tree in self._source.items()}

    def _lowered(self, tree: Tree) -> Lowered:
        if isinstance(tree, Ref):
            return tree
        if isinstance(tree, Chars) or (tree not in self._cut and not has_references(tree)):
            return self._terminal(tree)
        if isinstance(tree, Repeat):
            return LRepeat(self._lowered(tree.item), tree.least, tree.most)
        whole = tree in self._cut
        if isinstance(tree, Seq):
            return LSeq(tuple(self._lowered(part) for part in (tree.items if whole else _runs(tree.items, Seq))))
        return LAlt(tuple(self._lowered(part) for part in (tree.options if whole else _runs(tree.options, Alt))))

    def _terminal(self, tree: Tree) -> Terminal:
        index = self._indices.setdefault(tree, len(self.terminals))
        if index == len(self.terminals):
            self.terminals.append(tree)
        return Terminal(index)

    # -------------------------------------------------------------- conflicts

    def _conflict(self) -> Tree | None:
        """A terminal that must be cut finer."""
        automata: list[Automaton] = []
        for tree in self.terminals:
            try:
                automata.append(
                    self._automata.setdefault(tree, automaton(tree)) if tree not in self._automata else self._automata[tree]
                )
            except TooLarge:
                return tree
        flow = _Flow(self, [a.nullable for a in automata])
        after = [merged([r for t in flow.follow[i] for r in automata[t].starts]) for i in range(len(automata))]
        seen: set[frozenset[int]] = set()
        waiting = [frozenset(flow.first(self.rules[self.start]))]
        while waiting:
            together = waiting.pop()
            if together in seen:
                continue
            seen.add(together)
            for a in together:
                partners = [b for b in together if meet(automata[a].starts, automata[b].starts)]
                for b in partners:
                    if not isinstance(self.terminals[b], Chars) and meet(self._extending(a, b, automata), after[a]):
                        return self.terminals[b]
                waiting.append(frozenset(itertools.chain.from_iterable(flow.follow[b] for b in partners)))
            if len(seen) > _MAX_SETS:
                return max((t for t in self.terminals if not isinstance(t, Chars)), key=tree_size, default=None)
        return None

    def _extending(self, a: int, b: int, automata: list[Automaton]) -> Ranges:
        key = (self.terminals[a], self.terminals[b])
        if key not in self._extensions:
            self._extensions[key] = extensions(automata[a], automata[b])
        return self._extensions[key]


class _Flow:
    """Which terminals may come first in a part, and after each terminal."""

    def __init__(self, lexing: Lexing, empty: list[bool]) -> None:
        self._empty_terminals = empty
        self._empty = dict.fromkeys(lexing.rules, False)
        self._first: dict[str, set[int]] = {name: set() for name in lexing.rules}
        self.follow: list[set[int]] = [set() for _ in empty]
        self._after: dict[str, set[int]] = {name: set() for name in lexing.rules}
        changed = True
        while changed:
            changed = False
            for name, tree in lexing.rules.items():
                before = (self._empty[name], len(self._first[name]))
                self._empty[name] = self.empty(tree)
                self._first[name] |= self.first(tree)
                changed = changed or before != (self._empty[name], len(self._first[name]))
        self._changed = True
        while self._changed:
            self._changed = False
            for name, tree in lexing.rules.items():
                self._spread(tree, self._after[name])

    def empty(self, tree: Lowered) -> bool:
        """Whether the part may be empty."""
        if isinstance(tree, Terminal):
            return self._empty_terminals[tree.index]
        if isinstance(tree, Ref):
            return self._empty[tree.name]
        if isinstance(tree, LSeq):
            return all(map(self.empty, tree.items))
        if isinstance(tree, LAlt):
            return any(map(self.empty, tree.options))
        return tree.least == 0 or self.empty(tree.item)

    def first(self, tree: Lowered) -> set[int]:
        """Terminals that the part may begin with."""
        if isinstance(tree, Terminal):
            return {tree.index}
        if isinstance(tree, Ref):
            return self._first[tree.name]
        if isinstance(tree, LAlt):
            return set().union(*map(self.first, tree.options))
        if isinstance(tree, LRepeat):
            return self.first(tree.item)
        found: set[int] = set()
        for item in tree.items:
            found |= self.first(item)
            if not self.empty(item):
                break
        return found

    def _spread(self, tree: Lowered, after: set[int]) -> None:
        if isinstance(tree, (Terminal, Ref)):
            known = self.follow[tree.index] if isinstance(tree, Terminal) else self._after[tree.name]
            if not after <= known:
                known |= after
                self._changed = True
        elif isinstance(tree, LAlt):
            for option in tree.options:
                self._spread(option, after)
        elif isinstance(tree, LRepeat):
            self._spread(tree.item, after if tree.most == 1 else after | self.first(tree.item))
        else:
            for item in reversed(tree.items):
                self._spread(item, after)
                after = self.first(item) | (after if self.empty(item) else set())


def has_references(tree: Tree) -> bool:
    """Whether the tree uses any rule."""
    if isinstance(tree, Seq):
        return any(map(has_references, tree.items))
    if isinstance(tree, Alt):
        return any(map(has_references, tree.options))
    if isinstance(tree, Repeat):
        return has_references(tree.item)
    return isinstance(tree, Ref)


def tree_size(tree: Tree) -> int:
    """Nodes of the tree."""
    if isinstance(tree, Seq):
        return 1 + sum(map(tree_size, tree.items))
    if isinstance(tree, Alt):
        return 1 + sum(map(tree_size, tree.options))
    return 1 + tree_size(tree.item) if isinstance(tree, Repeat) else 1


def _may_be_empty(tree: Tree) -> bool:
    if isinstance(tree, Seq):
        return all(map(_may_be_empty, tree.items))
    if isinstance(tree, Alt):
        return any(map(_may_be_empty, tree.options))
    return isinstance(tree, Repeat) and (tree.least == 0 or _may_be_empty(tree.item))


def _runs(parts: tuple[Tree, ...], join: type[Seq] | type[Alt]) -> list[Tree]:
    """The parts, neighbours without references joined to one."""
    found: list[Tree] = []
    for recursive, run in itertools.groupby(parts, has_references):
        items = tuple(run)
        found += items if recursive or len(items) == 1 else (join(items),)
    return found
