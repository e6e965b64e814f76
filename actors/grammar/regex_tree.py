"""Regular expressions as trees over sets of characters, and how they are written for the automata libraries.

The text written is the common core of every dialect: explicit classes, groups, ``|`` and counts. So all backends read the
same language, and none of their own ideas of ``\\d``, ``.`` or case gets in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]
"""A set of characters: inclusive code point ranges, ascending, apart from each other, without surrogates."""

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True)
class Chars:
    """One character of `ranges` (none: nothing matches)."""

    ranges: Ranges


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
    """`item`, `low` to `high` times (None: any number). `lazy`: written with ``?`` behind the count."""

    item: Node
    low: int
    high: int | None
    lazy: bool = False


@dataclass(frozen=True)
class Anchor:
    """``^`` or ``$`` (or ``\\A``, ``\\Z``)."""

    end: bool


Node = Chars | Seq | Alt | Repeat | Anchor
EMPTY = Seq(())
NEVER = Chars(())


# ------------------------------------------------------------------ sets of characters


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Any inclusive pairs as a set: sorted, joined, surrogates taken out (no text holds one)."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(pairs)):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(result)


def _without_surrogates(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, last = _SURROGATES
    for low, high in pairs:
        for part in ((low, min(high, first - 1)), (max(low, last + 1), high)):
            if part[0] <= part[1]:
                yield part


@lru_cache(maxsize=1024)
def chars(text: str) -> Ranges:
    """The characters of `text`."""
    return ranges((ord(char), ord(char)) for char in text)


@lru_cache(maxsize=256)
def invert(given: Ranges) -> Ranges:
    """Every other character."""
    edges: list[tuple[int, int]] = []
    start = 0
    for low, high in given:
        edges.append((start, low - 1))
        start = high + 1
    edges.append((start, LAST))
    return ranges(pair for pair in edges if pair[0] <= pair[1])


def minus(left: Ranges, right: Ranges) -> Ranges:
    """Characters of `left` that are not in `right`."""
    return intersect(left, invert(right))


def intersect(left: Ranges, right: Ranges) -> Ranges:
    """Characters of both."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            result.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return ranges(result)


def has(given: Ranges, char: str) -> bool:
    """Whether `char` is in the set."""
    return any(low <= ord(char) <= high for low, high in given)


def only(node: Node) -> str:
    """The character, when `node` is exactly one; else ''."""
    if isinstance(node, Chars) and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return chr(node.ranges[0][0])
    return ""


# ------------------------------------------------------------------ trees


def sequence(items: Iterable[Node]) -> Node:
    """One after another: nested sequences are laid flat."""
    flat: list[Node] = []
    for item in items:
        if item == NEVER:
            return NEVER
        flat.extend(item.items if isinstance(item, Seq) else [item])
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def either(items: Iterable[Node]) -> Node:
    """One of them: nested choices are laid flat, single characters joined, repeated ones dropped."""
    flat: dict[Node, None] = {}
    for item in items:
        flat.update(dict.fromkeys(item.items if isinstance(item, Alt) else [item]))
    single = ranges(pair for item in flat if isinstance(item, Chars) for pair in item.ranges)
    rest: list[Node] = [item for item in flat if not isinstance(item, Chars)]
    if single:
        rest.insert(0, Chars(single))
    if not rest:
        return NEVER
    return rest[0] if len(rest) == 1 else Alt(tuple(rest))


_SPELLED = 16
"""A character that comes exactly so many times is text like any other."""


def repeat(item: Node, low: int, high: int | None, lazy: bool = False) -> Node:
    """`item` so many times."""
    if high == 0 or item == EMPTY or (item == NEVER and low == 0):
        return EMPTY
    if item == NEVER or (low == 1 and high == 1):
        return item
    if low == high and low <= _SPELLED and only(item):
        return Seq((item,) * low)
    return Repeat(item, low, high, lazy)


def without(node: Node, removed: Ranges) -> Node:
    """`node` without the texts that have a character of `removed`."""
    if not removed:
        return node
    match node:
        case Chars(given):
            return Chars(minus(given, removed))
        case Seq(items):
            return sequence([without(item, removed) for item in items])
        case Alt(items):
            return either([without(item, removed) for item in items])
        case Repeat(item, low, high, lazy):
            return repeat(without(item, removed), low, high, lazy)
    return node


def nullable(node: Node) -> bool:
    """Whether the empty text matches."""
    match node:
        case Chars():
            return False
        case Seq(items):
            return all(nullable(item) for item in items)
        case Alt(items):
            return any(nullable(item) for item in items)
        case Repeat(item, low, _):
            return low == 0 or nullable(item)
    return True


# ------------------------------------------------------------------ writing


def write(node: Node) -> str:
    """`node` as text that Rust's regex-syntax (outlines-core, llguidance) and Python read alike. No anchors may be left."""
    match node:
        case Chars(given):
            return _write_chars(given)
        case Seq(items):
            return "".join(f"(?:{write(item)})" if isinstance(item, Alt) else write(item) for item in items)
        case Alt(items):
            return "|".join(write(item) for item in items)
        case Repeat(item, low, high):
            body = write(item)
            return (body if isinstance(item, Chars) else f"(?:{body})") + _write_count(low, high)
    raise AssertionError(node)


def escape(text: str) -> str:
    """Exactly `text`, written like `write` does."""
    return "".join(_write_char(ord(char)) for char in text)


def _write_count(low: int, high: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    if short:
        return short
    return f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"


@lru_cache(maxsize=1024)
def _write_chars(given: Ranges) -> str:
    if len(given) == 1 and given[0][0] == given[0][1]:
        return _write_char(given[0][0])
    parts = [_write_char(low) if low == high else f"{_write_char(low)}-{_write_char(high)}" for low, high in given]
    return f"[{''.join(parts)}]"


_PLAIN = "_ !\"'%,/:;<=>@`"
"""Punctuation without a meaning anywhere; behind a backslash some of it would have one (``\\<`` is a word's start)."""


def _write_char(code: int) -> str:
    char = chr(code)
    if char.isascii():
        if char.isalnum() or char in _PLAIN:
            return char
        return "\\" + char if char.isprintable() else f"\\x{code:02x}"
    return char if char.isprintable() else (f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}")
