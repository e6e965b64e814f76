"""What ``*?`` means when the whole output must match: the loop ends at the first place where what follows could stand.

A backtracking engine gives laziness its meaning by trying the shortest match first; an automaton has no order, so a lazy loop
would be any loop, and a sampled ``".*?"`` would run over its closing quote for ever. Here a lazy loop over single characters
is narrowed to the texts that a lazy match would pick, always a subset of what the expression says:

* before one character (or a class): the loop can't hold it. ``<.*?>`` is ``<[^>\\n]*>``;
* before a longer literal: the loop can't run into it. ``/\\*.*?\\*/`` may hold ``*`` and ``/`` but ends with the first ``*/``;
* between two ``"``: a JSON string without escapes: no quote, backslash or control character.

A lazy loop over longer parts (``(ab|c)*?``), or with nothing definite behind it, stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixcast.actors.grammar.regex_tree import (
    EMPTY,
    NEVER,
    Alt,
    Chars,
    Node,
    Ranges,
    Repeat,
    Seq,
    chars,
    either,
    has,
    minus,
    nullable,
    only,
    ranges,
    repeat,
    sequence,
)

JSON_UNSAFE = ranges([(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)])
"""What a JSON string can't hold as it is (and DEL, which no JSON writer leaves as it is in the models' data)."""
_LONGEST = 64
"""Characters of a literal that a loop is kept from running into; of longer ones the first so many count."""


@dataclass(frozen=True)
class _Next:
    """What must come behind a place: a text (as much of it as is certain), or else one character of a set."""

    text: str = ""
    first: Ranges = ()


_NOTHING = _Next()


def narrow_lazy(node: Node) -> Node:
    """`node` with its lazy loops narrowed as the module says."""
    return _narrow(node, "", _NOTHING)


def _narrow(node: Node, before: str, behind: _Next) -> Node:
    """`before`: the character in front of `node`, where that is certain."""
    if isinstance(node, Seq):
        return _narrow_sequence(list(node.items), before, behind)
    if isinstance(node, Alt):
        return either([_narrow(item, before, behind) for item in node.items])
    if isinstance(node, Repeat):
        if node.lazy and isinstance(node.item, Chars):
            return _narrow_loop(node, node.item.ranges, before, behind)
        once = node.high == 1
        inner = _narrow(node.item, before if once else "", behind if once else _NOTHING)
        return repeat(inner, node.low, node.high, node.lazy)
    return node


def _narrow_sequence(items: list[Node], before: str, behind: _Next) -> Node:
    result: list[Node] = []
    position = 0
    ahead = _all_next(items, behind) if any(_has_lazy(item) for item in items) else []
    while position < len(items):
        item = items[position]
        if not _has_lazy(item):
            result.append(item)
            position += 1
            continue
        char = (only(items[position - 1]) if position else before) or ""
        text = _text(items, position + 1) if _can_run(item) else ""
        if len(text) > 1 and _runs_into(item, text) and not (char == '"' and text[0] == '"'):
            result.append(up_to(text, _ranges_of(item)))
            position += 1 + len(text)
            continue
        result.append(_narrow(item, char, ahead[position + 1]))
        position += 1
    return sequence(result)


def _has_lazy(node: Node) -> bool:
    """Whether a lazy loop is in it."""
    match node:
        case Repeat(item, _, _, lazy):
            return lazy or _has_lazy(item)
        case Seq(items) | Alt(items):
            return any(_has_lazy(item) for item in items)
    return False


def _can_run(item: Node) -> bool:
    """Whether `item` is an unbounded lazy loop over single characters."""
    return isinstance(item, Repeat) and item.lazy and item.low == 0 and item.high is None and isinstance(item.item, Chars)


def _runs_into(item: Node, text: str) -> bool:
    """Whether such a loop could hold `text`."""
    return all(has(_ranges_of(item), char) for char in text)


def _ranges_of(item: Node) -> Ranges:
    assert isinstance(item, Repeat)
    assert isinstance(item.item, Chars)
    return item.item.ranges


def _narrow_loop(loop: Repeat, body: Ranges, before: str, behind: _Next) -> Node:
    """A lazy loop over `body` that is not followed at once by a literal of several characters."""
    text = behind.text
    if before == '"' and text.startswith('"') and has(body, '"'):
        body = minus(body, JSON_UNSAFE)
    elif text:
        if all(has(body, char) for char in text):
            body = minus(body, chars(text[0]))
    else:
        body = minus(body, behind.first)
    if not body:  # what follows could stand anywhere: the shortest match
        return repeat(loop.item, loop.low, loop.low)
    return repeat(Chars(body), loop.low, loop.high, loop.lazy)


# ------------------------------------------------------------------ what comes next


def _text(items: list[Node], start: int) -> str:
    """The literal that begins right at items[start]."""
    text = ""
    for item in items[start : start + _LONGEST]:
        char = only(item)
        if not char:
            break
        text += char
    return text


def _all_next(items: list[Node], behind: _Next) -> list[_Next]:
    """For each place before, between and behind `items`: the first thing that must come; what may be missing is passed over."""
    result = [behind]
    text = ""
    for item in reversed(items):
        char = only(item)
        text = char + text[: _LONGEST - 1] if char else ""
        if text:
            result.append(_Next(text))
        else:
            result.append(result[-1] if nullable(item) else _first(item))
    return result[::-1]


def _first(node: Node) -> _Next:
    """What a node that is never empty begins with."""
    match node:
        case Chars(given):
            return _Next(only(node)) if only(node) else _Next(first=given)
        case Seq(items):
            return _all_next(list(items), _NOTHING)[0]
        case Repeat(item):
            return _Next(only(item)) if only(item) else _first(item)
        case Alt(items):
            return _first_of([_first(item) for item in items])
    return _NOTHING


def _first_of(branches: list[_Next]) -> _Next:
    if all(len(branch.text) == 1 or branch.first for branch in branches):
        return _Next(first=ranges(pair for branch in branches for pair in (branch.first or chars(branch.text))))
    common = branches[0].text
    for branch in branches[1:]:
        while not branch.text.startswith(common):
            common = common[:-1]
    return _Next(common)


# ------------------------------------------------------------------ the first occurrence of a literal


def up_to(text: str, body: Ranges) -> Node:
    """Characters of `body`, then `text`, which occurs nowhere before: Knuth, Morris and Pratt's automaton as an expression.

    States are how much of `text` the last characters spell. They are eliminated from the longest to the shortest; from
    state j one can then only go to states <= j, or be done. All characters of `text` are in `body`.
    """
    targets: dict[int, Node] = {}
    done: Node = EMPTY
    for state in reversed(range(len(text))):
        step = Chars(chars(text[state]))
        steps = _failures(text, state, body)
        if state == len(text) - 1:
            done = step
        else:
            # One step further, around there for a while, and back (or done).
            around = repeat(targets.pop(state + 1, NEVER), 0, None)
            done = sequence([step, around, done])
            for target, way in targets.items():
                steps[target] = either([steps.get(target, NEVER), sequence([step, around, way])])
        targets = steps
    return sequence([repeat(targets.get(0, NEVER), 0, None), done])


def _failures(text: str, state: int, body: Ranges) -> dict[int, Node]:
    """From `state`, where each character leads that is not the next one of `text`."""
    rest = minus(body, chars(text[state]))
    result: dict[int, Node] = {}
    for char in sorted(set(text)):
        if char != text[state] and has(rest, char):
            seen = text[:state] + char
            length = next(n for n in range(len(seen), -1, -1) if text.startswith(seen[len(seen) - n :]) or n == 0)
            if length:
                result[length] = either([result.get(length, NEVER), Chars(chars(char))])
                rest = minus(rest, chars(char))
    if rest:
        result[0] = Chars(rest)
    return result
