"""Automata of terminals (Glushkov's construction): only as much as telling whether a greedy lexer would go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixcast.actors.grammar.ebnf_parse import Alt, Chars, Ranges, Repeat, Seq, Tree, merged

_MAX_PLACES = 1_500
_MAX_PAIRS = 60_000

EVERYTHING: Ranges = ((0, 0x10FFFF),)


class TooLarge(Exception):
    """The terminal has too many places to look at them all."""


@dataclass(slots=True)
class Automaton:
    """States are the places of characters in an expression; `ranges[p]` is what place p reads."""

    ranges: list[Ranges] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    nullable: bool = True

    @property
    def starts(self) -> Ranges:
        """What the first character may be."""
        return merged([r for place in self.first for r in self.ranges[place]])


def automaton(tree: Tree) -> Automaton:
    """Raises TooLarge. The tree has no references."""
    made = Automaton()
    made.first, made.last, made.nullable = _build(tree, made)
    return made


def _build(tree: Tree, into: Automaton) -> tuple[set[int], set[int], bool]:
    if isinstance(tree, Chars):
        if len(into.ranges) >= _MAX_PLACES:
            raise TooLarge
        into.ranges.append(tree.ranges)
        into.follow.append(set())
        place = {len(into.ranges) - 1}
        return place, set(place), False
    if isinstance(tree, Alt):
        built = [_build(option, into) for option in tree.options]
        return set().union(*(b[0] for b in built)), set().union(*(b[1] for b in built)), any(b[2] for b in built)
    if isinstance(tree, Seq):
        return _chain(list(tree.items), into)
    assert isinstance(tree, Repeat)
    return _repeat(tree, into)


def _chain(items: list[Tree], into: Automaton) -> tuple[set[int], set[int], bool]:
    first: set[int] = set()
    last: set[int] = set()
    nullable = True
    for item in items:
        start, end, empty = _build(item, into)
        for place in last:
            into.follow[place] |= start
        first |= start if nullable else set()
        last = last | end if empty else end
        nullable = nullable and empty
    return first, last, nullable


def _repeat(tree: Repeat, into: Automaton) -> tuple[set[int], set[int], bool]:
    if tree.most is None and tree.least <= 1:
        first, last, empty = _build(tree.item, into)
        for place in last:
            into.follow[place] |= first
        return first, last, empty or tree.least == 0
    if tree.most == 1 and tree.least == 0:
        first, last, _ = _build(tree.item, into)
        return first, last, True
    if tree.most == 0:
        return set(), set(), True
    if (tree.most or tree.least) > _MAX_PLACES:
        raise TooLarge
    items: list[Tree] = [tree.item] * tree.least
    items += [Repeat(tree.item, 0, None)] if tree.most is None else [Repeat(tree.item, 0, 1)] * (tree.most - tree.least)
    return _chain(items, into)


def extensions(ended: Automaton, going_on: Automaton) -> Ranges:
    """Characters with which `going_on` may continue a text that is one of `ended` already."""
    seen: set[tuple[int, int]] = set()
    waiting = [(p, q) for p in ended.first for q in going_on.first]
    found: list[tuple[int, int]] = []
    while waiting:
        pair = waiting.pop()
        p, q = pair
        if pair in seen or not meet(ended.ranges[p], going_on.ranges[q]):
            continue
        seen.add(pair)
        if len(seen) > _MAX_PAIRS:
            return EVERYTHING
        if p in ended.last:
            found += [r for following in going_on.follow[q] for r in going_on.ranges[following]]
        waiting += [(a, b) for a in ended.follow[p] for b in going_on.follow[q]]
    return merged(found)


def meet(a: Ranges, b: Ranges) -> bool:
    """Whether two sets share a character."""
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][1] < b[j][0]:
            i += 1
        elif b[j][1] < a[i][0]:
            j += 1
        else:
            return True
    return False
