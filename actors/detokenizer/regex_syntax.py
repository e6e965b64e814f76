"""The stop_regex dialect: Python's `re` syntax without what needs backtracking or looking ahead.

Understood: literals, classes, ``.``, groups, ``|``, ``* + ? {m,n}`` (greedy or lazy: the same here), inline flags ``i s m x``,
``^``, and ``$`` at the end. Refused, with the reason: back references, look-around, atomic and possessive parts, ``\\b``.

A stop fires as soon as the text so far ends in a match. So nothing optional at the end of an expression can ever matter:
``[.!?]\\s*$`` stops where ``[.!?]`` does. `parse` drops such tails; what is left must not match the empty text, and its longest
match must be bounded, because so much text may have to be held back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from re import _constants as sre  # type: ignore[attr-defined]  # Python's own parser: exact dialect, no compilation
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from radixcast.protocols import limits
from radixcast.protocols.errors import InvalidRequest

Test = Callable[[str], bool]


@dataclass(frozen=True)
class Char:
    """One character for which `test` holds."""

    test: Test


@dataclass(frozen=True)
class Seq:
    """`items` one after another; none: the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """One of `items`."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`item`, `low` to `high` times (None: any number)."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Begin:
    """``^``: the start of the text, or of a line."""

    line: bool


@dataclass(frozen=True)
class End:
    """``$``, ``\\Z``: true where the text so far ends."""


Node = Char | Seq | Alt | Repeat | Begin | End
EMPTY = Seq(())


def parse(expression: str) -> Node:
    """`expression` as a tree whose matches are bounded and never empty. Raises InvalidRequest naming `stop_regex`."""
    try:
        parsed = sre_parser.parse(expression)
        node = _trim(_sequence(parsed, parsed.state.flags))
        low, high = _width(node)
    except re.error as error:
        raise _refused(expression, f"is no regular expression: {error}") from None
    except (RecursionError, OverflowError):
        raise _refused(expression, "is nested too deep") from None
    except _Unsupported as error:
        raise _refused(expression, f"uses {error}, which stop expressions don't have") from None
    if low == 0:
        raise _refused(expression, "matches the empty text, so it would stop at once")
    if high is None or high > limits.MAX_STOP_REGEX_MATCH:
        got = "any number of" if high is None else str(high)
        raise _refused(
            expression,
            f"can match {got} characters, at most {limits.MAX_STOP_REGEX_MATCH} are allowed: "
            "use a bound such as {0,16} instead of * or +",
        )
    return node


class _Unsupported(Exception):
    """A construct that has no linear-time form here; the text names it."""


def _refused(expression: str, why: str) -> InvalidRequest:
    shown = expression if len(expression) <= 80 else expression[:80] + "…"
    return InvalidRequest(f"stop_regex {shown!r} {why}", param="sampling_params.stop_regex")


def _sequence(parsed: Sequence[tuple[Any, Any]], flags: int) -> Node:
    return Seq(tuple(_node(op, arg, flags) for op, arg in parsed))


def _node(op: Any, arg: Any, flags: int) -> Node:
    """One item of Python's parse tree."""
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
        return Char(_test(op, arg, flags))
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, item = arg
        return Repeat(_sequence(item, flags), int(low), None if high is sre.MAXREPEAT else int(high))
    if op is sre.SUBPATTERN:
        _, add, remove, item = arg
        return _sequence(item, (flags | add) & ~remove)
    if op is sre.BRANCH:
        return Alt(tuple(_sequence(item, flags) for item in arg[1]))
    if op is sre.AT:
        return _anchor(arg, flags)
    raise _Unsupported(_NAMES.get(op, str(op).lower()))


_NAMES = {
    sre.GROUPREF: "a back reference",
    sre.GROUPREF_EXISTS: "a conditional group",
    sre.ASSERT: "look-around",
    sre.ASSERT_NOT: "look-around",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive quantifier",
}


def _anchor(where: Any, flags: int) -> Node:
    if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return Begin(line=where is sre.AT_BEGINNING and bool(flags & re.MULTILINE))
    if where in (sre.AT_END, sre.AT_END_STRING):
        return End()
    raise _Unsupported("a word boundary")


def _test(op: Any, arg: Any, flags: int) -> Test:
    """The test of one character."""
    if op is sre.ANY:
        return (lambda c: True) if flags & re.DOTALL else (lambda c: c != "\n")
    members = arg if op is sre.IN else [(sre.LITERAL, arg)]
    negated = op is sre.NOT_LITERAL or members[0][0] is sre.NEGATE
    tests = [_member(kind, value, bool(flags & re.ASCII)) for kind, value in members if kind is not sre.NEGATE]
    if flags & re.IGNORECASE:
        return lambda c: any(t(v) for t in tests for v in {c, c.lower(), c.upper()}) != negated
    return lambda c: any(t(c) for t in tests) != negated


def _member(kind: Any, value: Any, ascii_only: bool) -> Test:
    """One entry of a class: a character, a range or a category."""
    if kind is sre.LITERAL:
        char = chr(value)
        return lambda c: c == char
    if kind is sre.RANGE:
        low, high = chr(value[0]), chr(value[1])
        return lambda c: len(c) == 1 and low <= c <= high
    name = str(value)
    base = _CATEGORIES[name.removeprefix("CATEGORY_").removeprefix("NOT_")]
    negated = "_NOT_" in name
    if ascii_only:
        return lambda c: (c.isascii() and base(c)) != negated
    return lambda c: base(c) != negated


_CATEGORIES: dict[str, Test] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda c: c.isalnum() or c == "_",
}


def _trim(node: Node) -> Node:
    """`node` without what can't matter at the end of an expression: the same earliest ends, and the same starts for them."""
    match node:
        case End():
            return EMPTY
        case Seq(items):
            rest = list(items)
            while rest:
                last = _trim(rest.pop())
                if last != EMPTY:
                    return Seq((*rest, last))
            return EMPTY
        case Alt(items):
            trimmed = tuple(_trim(item) for item in items)
            return EMPTY if EMPTY in trimmed else Alt(trimmed)
        case Repeat(item, low, _):
            if low == 0:
                return EMPTY
            last = _trim(item)
            if last == EMPTY:
                return EMPTY
            return last if low == 1 else Seq((Repeat(item, low - 1, low - 1), last))
    return node


def _width(node: Node) -> tuple[int, int | None]:
    """Characters of the shortest and of the longest match (None: unbounded). Raises _Unsupported for a ``$`` inside."""
    match node:
        case Char():
            return 1, 1
        case Begin():
            return 0, 0
        case End():
            raise _Unsupported("`$` before the end")
        case Repeat(item, low, high):
            least, most = _width(item)
            if most == 0:
                return 0, 0
            return least * low, None if high is None or most is None else most * high
        case Seq(items) | Alt(items):
            widths = [_width(item) for item in items]
            pick_low, pick_high = (sum, sum) if isinstance(node, Seq) else (min, max)
            mosts = [most for _, most in widths]
            return pick_low(w for w, _ in widths), None if None in mosts else pick_high(m for m in mosts if m is not None)
