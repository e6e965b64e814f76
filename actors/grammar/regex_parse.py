"""Python's `re` syntax -> trees. What a finite automaton can't do is refused, with its position.

``\\d``, ``\\w`` and ``\\s`` mean ASCII (Unicode's tables differ between libraries, and JSON's digits are ASCII). The whole
output must match, so anchors at its outer ends say nothing and are dropped; anywhere else they are refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from re import _constants as sre  # type: ignore[attr-defined]  # Python's own parser: exact dialect, no compilation
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.regex_tree import (
    EMPTY,
    LAST,
    Anchor,
    Chars,
    Node,
    Ranges,
    Repeat,
    Seq,
    chars,
    either,
    invert,
    ranges,
    repeat,
    sequence,
)

DIGITS = ranges([(0x30, 0x39)])
WORD = ranges([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACE = chars(" \t\n\r\f\v")
_CATEGORIES = {"DIGIT": DIGITS, "WORD": WORD, "SPACE": SPACE}


def parse(pattern: str) -> Node:
    """`pattern` as a tree without anchors. Raises GrammarError (invalid_regex) naming the construct and its position."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what may change its meaning in a later Python is no news to a client
            parsed = sre_parser.parse(pattern)
        return _without_anchors(_sequence(parsed, parsed.state.flags), pattern)
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        raise refused(f"{error.msg}{where}") from None
    except (RecursionError, OverflowError):
        raise refused("it is nested too deep") from None
    except _Unsupported as error:
        raise refused(_located(pattern, error.name)) from None


def refused(why: str) -> GrammarError:
    """The error for an expression that can't be used."""
    return GrammarError(f"invalid regular expression: {why}", code="invalid_regex", param="regex")


# ------------------------------------------------------------------ Python's parse tree


class _Unsupported(Exception):
    """A construct without an automaton."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _sequence(parsed: Sequence[tuple[Any, Any]], flags: int) -> Node:
    return sequence([_node(op, arg, flags) for op, arg in parsed])


def _node(op: Any, arg: Any, flags: int) -> Node:
    """One item of Python's parse tree."""
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
        return Chars(_class(op, arg, flags))
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, item = arg
        top = None if high is sre.MAXREPEAT else int(high)
        return repeat(_sequence(item, flags), int(low), top, lazy=op is sre.MIN_REPEAT)
    if op is sre.SUBPATTERN:
        _, add, remove, item = arg
        return _sequence(item, (flags | add) & ~remove)
    if op is sre.BRANCH:
        return either([_sequence(item, flags) for item in arg[1]])
    if op is sre.AT and arg in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return Anchor(end=False)
    if op is sre.AT and arg in (sre.AT_END, sre.AT_END_STRING):
        return Anchor(end=True)
    raise _Unsupported(_NAMES.get(op, "a word boundary" if op is sre.AT else str(op).lower()))


_NAMES = {
    sre.GROUPREF: "a back reference",
    sre.GROUPREF_IGNORE: "a back reference",
    sre.GROUPREF_EXISTS: "a conditional group",
    sre.ASSERT: "look-around",
    sre.ASSERT_NOT: "look-around",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive quantifier",
}


def _class(op: Any, arg: Any, flags: int) -> Ranges:
    """The characters that one item matches."""
    if op is sre.ANY:
        return ranges([(0, LAST)]) if flags & re.DOTALL else invert(chars("\n"))
    if op is sre.LITERAL:
        given = ranges([(arg, arg)])
        return _any_case(given, bool(flags & re.ASCII)) if flags & re.IGNORECASE else given
    members = arg if op is sre.IN else [(sre.LITERAL, arg)]
    negated = op is sre.NOT_LITERAL or members[0][0] is sre.NEGATE
    given = ranges(pair for kind, value in members if kind is not sre.NEGATE for pair in _member(kind, value))
    if flags & re.IGNORECASE:
        given = _any_case(given, bool(flags & re.ASCII))
    return invert(given) if negated else given


def _member(kind: Any, value: Any) -> Ranges:
    """One entry of a class: a character, a range or a category."""
    if kind is sre.LITERAL:
        return ((value, value),)
    if kind is sre.RANGE:
        return ((value[0], value[1]),)
    name = str(value).removeprefix("CATEGORY_")
    base = _CATEGORIES[name.removeprefix("NOT_")]
    return invert(base) if name.startswith("NOT_") else base


@lru_cache(maxsize=256)
def _any_case(given: Ranges, ascii_only: bool) -> Ranges:
    """`given` with the other case of each character."""
    first, last = (0x41, 0x7A) if ascii_only else (0, LAST)
    touched = [
        (other, other)
        for code, others in _cases()
        if first <= code <= last and any(low <= code <= high for low, high in given)
        for other in others
        if first <= other <= last
    ]
    return ranges([*given, *touched])


@lru_cache(maxsize=1)
def _cases() -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Characters with a case, each with its other forms (one character each): a set closed under changing case."""
    groups: dict[str, set[int]] = {}
    for code in range(0x1E944):  # past the last script with two cases
        char = chr(code)
        lower, upper = char.lower(), char.upper()
        if (lower != char or upper != char) and len(lower) == 1 and len(upper) == 1:
            groups.setdefault(upper.lower(), set()).update((code, ord(lower), ord(upper)))
    return tuple((code, tuple(group)) for group in groups.values() for code in group)


# ------------------------------------------------------------------ anchors


def _without_anchors(node: Node, pattern: str) -> Node:
    try:
        return _strip(node, True, True)
    except _Inner as error:
        raise refused(_located(pattern, "an anchor inside", "$" if error.anchor.end else "^")) from None


class _Inner(Exception):
    """An anchor that is not at an outer end."""

    def __init__(self, anchor: Anchor) -> None:
        super().__init__()
        self.anchor = anchor


def _strip(node: Node, at_start: bool, at_end: bool) -> Node:
    """`node` without the anchors at the ends of the text, where they always hold."""
    if isinstance(node, Anchor):
        if not (at_end if node.end else at_start):
            raise _Inner(node)
        return EMPTY
    if isinstance(node, Seq):
        wide = [_has_width(item) for item in node.items]
        first = wide.index(True) if True in wide else len(wide)
        last = len(wide) - 1 - wide[::-1].index(True) if True in wide else -1
        stripped = [_strip(item, at_start and n <= first, at_end and n >= last) for n, item in enumerate(node.items)]
        return sequence(stripped)
    if isinstance(node, Repeat):
        once = node.high == 1
        return repeat(_strip(node.item, at_start and once, at_end and once), node.low, node.high, node.lazy)
    if isinstance(node, Chars):
        return node
    return either([_strip(item, at_start, at_end) for item in node.items])


def _has_width(node: Node) -> bool:
    """Whether `node` can match a character."""
    match node:
        case Chars():
            return True
        case Anchor():
            return False
        case Repeat(item):
            return _has_width(item)
    return any(_has_width(item) for item in node.items)


# ------------------------------------------------------------------ positions

_MARKS = {
    "look-around": r"\(\?<?[=!]",
    "a back reference": r"\\[1-9]|\(\?P=",
    "a conditional group": r"\(\?\(",
    "an atomic group": r"\(\?>",
    "a possessive quantifier": r"(?:[*+?]|\{[0-9]*,?[0-9]*\})\+",
    "a word boundary": r"\\[bB]",
    "^": r"\^|\\A",
    "$": r"\$|\\Z",
}
_SKIPPED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""What is passed over as a whole: an escaped character, a class."""


def _located(pattern: str, name: str, mark: str = "") -> str:
    """The construct, its position and what to do instead."""
    found = list(_positions(pattern, _MARKS.get(mark or name, r"(?!)")))
    if mark == "^":
        found = [position for position in found if position > 0] or found
    elif mark == "$":
        found = [position for position in found if position < len(pattern) - 1] or found
    where = f" at position {found[0]}" if found else ""
    if mark:
        return f"{name} the expression ({mark}){where} can't hold: the whole output must match"
    return f"{name}{where} is not supported"


def _positions(pattern: str, mark: str) -> Iterator[int]:
    wanted = re.compile(mark)
    position = 0
    while position < len(pattern):
        if wanted.match(pattern, position):
            yield position
        skipped = _SKIPPED.match(pattern, position)
        position = skipped.end() if skipped else position + 1
