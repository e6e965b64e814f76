"""Loops that a model may never leave are bounded, and an expression that describes JSON yields JSON.

Always: an unbounded loop over white space has at most `MAX_SPACES` characters.

When the expression is recognisably a JSON value (it begins with ``{"`` or ``[`` and ends with ``}`` or ``]``, white space
aside), also, as far as it is certain what is inside a string and what is not:

* white space between JSON tokens is nothing, a blank, or a line break and its indentation: what a pretty printer makes;
* a number has no leading zeros, and an unbounded one at most `MAX_DIGITS` digits;
* strings hold no control characters, as JSON has it;
* endless loops in strings share what `max_tokens` leaves beside the fixed text, so that the closing brace is reached in time.

All of that takes texts away and adds none.
"""

from __future__ import annotations

from typing import NamedTuple

from radixcast.actors.grammar.regex_parse import DIGITS, SPACE
from radixcast.actors.grammar.regex_tree import (
    EMPTY,
    Alt,
    Chars,
    Node,
    Ranges,
    Repeat,
    Seq,
    chars,
    either,
    has,
    intersect,
    minus,
    nullable,
    only,
    ranges,
    repeat,
    sequence,
)

MAX_SPACES = 16
"""Characters of an unbounded run of white space."""
MAX_DIGITS = 18
"""Digits of an unbounded number in JSON: the largest still fit 64 bits."""
USUAL_TOKENS = 192
"""Taken for the tokens of an output where that is not known."""
TOKENS_A_CHARACTER = 1.5
"""Taken for the tokens of a character: English has 0.25, Chinese in a small vocabulary 1.7. (Counting wide characters twice
would be fairer, but a mask inside such a loop takes llguidance 130 µs instead of 20.)"""
MIN_ROOM, MAX_ROOM = 16, 4096
"""Characters that a string may always have; and more than so many need no bound."""
INDENT_BLANKS, INDENT_TABS = 48, 16
"""Longest indentation of a line of JSON."""

_CONTROL = ranges([(0x00, 0x1F)])
_NUMBER_STARTS = frozenset(":[,-")


class _Place(NamedTuple):
    """Where the walk is: inside a JSON string or not (None: not known), and the last character that counts ('': not known)."""

    inside: bool | None
    last: str


def bound_loops(node: Node, max_tokens: int = 0) -> Node:
    """`node` with the bounds of the module, for outputs of at most `max_tokens` tokens (0: not known)."""
    if not _is_json(node):
        return _Walk(0).walk(node, _Place(None, ""))[0]
    counted = _Walk(0)
    counted.walk(node, _Place(False, ""))
    return _Walk(counted.room(max_tokens or USUAL_TOKENS)).walk(node, _Place(False, ""))[0]


# ------------------------------------------------------------------ what looks like JSON


def _is_json(node: Node) -> bool:
    items = node.items if isinstance(node, Seq) else (node,)
    solid = [item for item in items if not (_blank(item) and nullable(item))]
    if len(solid) < 2:
        return False
    first, second, last = only(solid[0]), only(solid[1]), only(solid[-1])
    return (first == "{" and second == '"' and last == "}") or (first == "[" and last == "]")


def _blank(node: Node) -> bool:
    """Whether `node` matches white space only."""
    match node:
        case Chars(given):
            return not minus(given, SPACE)
        case Repeat(item):
            return _blank(item)
    return all(_blank(item) for item in node.items) if isinstance(node, Seq | Alt) else False


# ------------------------------------------------------------------ the walk


class _Walk:
    """Goes through a tree from left to right. `room`: characters that an endless string may have (0: any number)."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._strings = 0
        self._fixed = 0.0

    def room(self, max_tokens: int) -> int:
        """What `room` should be, after a walk, so that all of an output fits into `max_tokens` tokens."""
        if not self._strings:
            return 0
        room = int((max_tokens - self._fixed) / (TOKENS_A_CHARACTER * self._strings))
        return 0 if room > MAX_ROOM else max(room, MIN_ROOM)

    def walk(self, node: Node, place: _Place) -> tuple[Node, _Place]:
        """`node` as it may stand at `place`, and the place behind it."""
        match node:
            case Chars():
                self._fixed += 0.5
                return _character(node, place)
            case Seq(items):
                result = []
                for item in _joined_digits(items):
                    walked, place = self.walk(item, place)
                    result.append(walked)
                return sequence(result), place
            case Alt(items):
                branches = [self.walk(item, place) for item in items]
                return either([item for item, _ in branches]), _merge([behind for _, behind in branches])
            case Repeat(item) if isinstance(item, Chars):
                self._fixed += 2
                return self._loop(node, item.ranges, place)
            case Repeat():
                return self._repeated(node, place)
        return node, place

    def _repeated(self, node: Repeat, place: _Place) -> tuple[Node, _Place]:
        """A loop over more than one character's class."""
        walked, behind = self.walk(node.item, place)
        if node.high != 1:
            again = _merge([place, behind])
            if again != place:  # the second round begins elsewhere
                place = again
                walked, behind = self.walk(node.item, place)
                if _merge([place, behind]) != place:
                    place = behind = _Place(None, "")
                    walked, _ = self.walk(node.item, place)
        return repeat(walked, node.low, node.high, node.lazy), _merge([place, behind]) if node.low == 0 else behind

    def _loop(self, node: Repeat, body: Ranges, place: _Place) -> tuple[Node, _Place]:
        """A loop over single characters."""
        if place.inside is False and _blank(node):
            return _between_tokens(node, body), place
        if place.inside is False and body == DIGITS:
            return _number(node, place.last in _NUMBER_STARTS), _Place(False, "")
        if place.inside:
            body = minus(body, _CONTROL) or body
        behind = _merge([place, _character(Chars(body), place)[1]])
        if node.high is None and not minus(body, SPACE):
            return repeat(Chars(body), node.low, max(node.low, MAX_SPACES)), behind
        if node.high is None and place.inside:
            self._strings += 1
            if self._room:
                return repeat(Chars(body), node.low, node.low + self._room), behind
        return repeat(Chars(body), node.low, node.high, node.lazy), behind


def _character(node: Chars, place: _Place) -> tuple[Node, _Place]:
    if place.inside is None:
        return node, place
    char = only(node)
    if char == '"':
        escaped = place.inside and place.last == "\\"
        return node, _Place(place.inside if escaped else not place.inside, "" if escaped else char)
    if place.inside:
        if char:
            return node, _Place(True, "" if place.last == "\\" else char)
        safe = minus(node.ranges, _CONTROL)
        return Chars(safe) if safe else node, _Place(None if has(node.ranges, '"') else True, "")
    if _blank(node):
        return node, place
    if node.ranges == DIGITS:
        return node, _Place(False, "")
    return node, _Place(None if has(node.ranges, '"') else False, char)


def _merge(places: list[_Place]) -> _Place:
    """What is certain of a place that can be any of these."""
    inside = places[0].inside if len({place.inside for place in places}) == 1 else None
    lasts = {place.last for place in places}
    if lasts <= _NUMBER_STARTS:
        return _Place(inside, min(lasts))
    return _Place(inside, places[0].last if len(lasts) == 1 else "")


# ------------------------------------------------------------------ white space and numbers


def _between_tokens(node: Repeat, body: Ranges) -> Node:
    """A loop over white space between JSON tokens, as a pretty printer would fill it."""
    body = intersect(body, chars(" \t\n\r")) or body
    if node.high is not None or node.low > 1 or not (has(body, " ") or has(body, "\n")):
        high = max(node.low, MAX_SPACES) if node.high is None else node.high
        return repeat(Chars(body), node.low, high)
    ways: list[Node] = [EMPTY] if node.low == 0 else []
    if has(body, " "):
        ways.append(Chars(chars(" ")))
    if has(body, "\n"):
        indents: list[Node] = [repeat(Chars(chars(" ")), 0, INDENT_BLANKS)] if has(body, " ") else [EMPTY]
        if has(body, "\t"):
            indents.append(repeat(Chars(chars("\t")), 0, INDENT_TABS))
        ways.append(sequence([Chars(chars("\n")), either(indents)]))
    return either(ways)


def _joined_digits(items: tuple[Node, ...]) -> list[Node]:
    """`items` with runs of digits as one loop: ``\\d\\d*`` is ``\\d+``."""
    result: list[Node] = []
    before: tuple[int, int | None] | None = None
    for item in items:
        counts = _digit_counts(item)
        if counts is None or before is None:
            result.append(item)
            before = counts
            continue
        top = None if counts[1] is None or before[1] is None else counts[1] + before[1]
        before = (counts[0] + before[0], top)
        result[-1] = Repeat(Chars(DIGITS), *before)
    return result


def _digit_counts(node: Node) -> tuple[int, int | None] | None:
    if node == Chars(DIGITS):
        return 1, 1
    if isinstance(node, Repeat) and node.item == Chars(DIGITS):
        return node.low, node.high
    return None


def _number(node: Repeat, at_start: bool) -> Node:
    """A loop over digits outside strings; `at_start`: a number begins with it."""
    high = max(node.low, MAX_DIGITS) if node.high is None else node.high
    if not at_start:
        return repeat(node.item, node.low, high)
    low = max(node.low, 1)
    more = sequence([Chars(ranges([(0x31, 0x39)])), repeat(Chars(DIGITS), low - 1, high - 1)])
    return either([Chars(chars("0")), more]) if low == 1 else more
