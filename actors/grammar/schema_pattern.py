"""Regular expressions of JSON Schema (ECMA-262) -> Rust's, never wider than the original.

A schema's pattern is searched for in the string; the translation matches the whole string. Where dialects read a class
differently (ECMA-262, Python's `re`, Rust), the translation takes what all of them agree on: `\\d` is [0-9] and `\\D` no
decimal digit of any script. Look-around, back-references, word boundaries and anchors in the middle are refused.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from radixcast.actors.grammar.interface import GrammarError
from radixcast.protocols.limits import MAX_GRAMMAR_DEPTH

ANYTHING = "(?s:.)*"
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_MAX_BRANCHES = 256

# What a class escape becomes: where the class is what may be written (inner) and where it is what must not be (outer).
_INNER = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\x0B\x0C", "D": r"\D", "W": r"\W", "S": r"[^\s\x{FEFF}\x{1C}-\x{1F}]"}
_OUTER = {
    "d": r"\d",
    "w": r"\w",
    "s": r"\s\x{FEFF}\x{1C}-\x{1F}",
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": r"[^ \t\n\r\x0B\x0C]",
}
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_BOUNDS = re.compile(r"\{(\d+)(,(\d*))?\}", re.ASCII)


class _Anchor(NamedTuple):
    kind: str


class _Text(NamedTuple):
    rust: str


class _Group(NamedTuple):
    branches: list[list[_Item]]


_Item = _Anchor | _Text | _Group
_Branch = list[_Item]


def translate(pattern: str, pointer: str) -> str:
    """`^(?:…)$` in Rust's syntax. Raises GrammarError (invalid_regex) with `pointer` as its place."""
    parser = _Parser(pattern, pointer)
    branches = parser.parse()
    return f"^(?:{'|'.join(_whole(branch, parser) for branch in branches)})$"


def literal(text: str) -> str:
    """A regular expression (ECMA-262 with the u flag, and Rust) that matches exactly this text."""
    return "".join(_char(ord(c)) if c.isascii() and c.isalnum() else f"\\u{{{ord(c):X}}}" for c in text)


def none_of(texts: list[str]) -> str:
    """A regular expression, anchored, that matches every string except these: the complement of a trie."""

    def branch(tails: list[str]) -> str:
        first: dict[str, list[str]] = {}
        for tail in tails:
            if tail:
                first.setdefault(tail[0], []).append(tail[1:])
        parts = [] if "" in tails else [""]
        other = "".join(literal(c) for c in first)
        parts.append(f"[^{other}][\\s\\S]*" if other else "[\\s\\S]+")
        parts += [literal(c) + branch(rest) for c, rest in first.items()]
        return f"(?:{'|'.join(parts)})"

    return f"^{branch(texts)}$"


def _whole(branch: _Branch, parser: _Parser) -> str:
    """One alternative, anchored at both ends: `.*` where it had no anchor of its own."""
    start = bool(branch) and branch[0] == _Anchor("^")
    body = branch[1:] if start else branch
    end = bool(body) and body[-1] == _Anchor("$")
    body = body[:-1] if end else body
    if body and (group := _edge(body)) is not None:
        at, inner = group
        head, tail = ([_Anchor("^")] if start else []), ([_Anchor("$")] if end else [])
        parser.spend(len(inner.branches))
        return "|".join(_whole([*head, *body[:at], *option, *body[at + 1 :], *tail], parser) for option in inner.branches)
    text = "".join(_emit(item, parser) for item in body)
    return ("" if start else ANYTHING) + text + ("" if end else ANYTHING)


def _edge(body: _Branch) -> tuple[int, _Group] | None:
    """The first or last item, when it is a group with anchors in it."""
    for at in (0, len(body) - 1):
        item = body[at]
        if isinstance(item, _Group) and _anchored(item):
            return at, item
    return None


def _anchored(item: _Item) -> bool:
    if isinstance(item, _Group):
        return any(_anchored(inner) for branch in item.branches for inner in branch)
    return isinstance(item, _Anchor)


def _emit(item: _Item, parser: _Parser) -> str:
    if isinstance(item, _Anchor):
        raise parser.refuse("an anchor inside a pattern")
    if isinstance(item, _Text):
        return item.rust
    return f"(?:{'|'.join(''.join(_emit(inner, parser) for inner in branch) for branch in item.branches)})"


def _char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}"


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, pointer: str) -> None:
        self.pattern = pattern
        self.pointer = pointer
        self.at = 0
        self.depth = 0
        self.branches = 0

    def parse(self) -> list[_Branch]:
        """The alternatives of the whole pattern."""
        branches = self._alternatives()
        if self.at < len(self.pattern):
            raise self.refuse("an unmatched )")
        return branches

    def refuse(self, what: str) -> GrammarError:
        """The error for something that can't be translated."""
        text = f"pattern {self.pattern[:200]!r}: {what} is not supported (at character {self.at})"
        return GrammarError(text, code="invalid_regex", param=self.pointer)

    def spend(self, branches: int) -> None:
        """Count alternatives that distributing an anchor makes."""
        self.branches += branches
        if self.branches > _MAX_BRANCHES:
            raise self.refuse(f"anchors in more than {_MAX_BRANCHES} alternatives")

    def _peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def _take(self) -> str:
        if self.at >= len(self.pattern):
            raise self.refuse("an unfinished expression")
        self.at += 1
        return self.pattern[self.at - 1]

    def _alternatives(self) -> list[_Branch]:
        branches = [self._sequence()]
        while self._peek("|"):
            self.at += 1
            branches.append(self._sequence())
        return branches

    def _sequence(self) -> _Branch:
        items: _Branch = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            item = self._atom()
            quantifier = self._quantifier()
            if quantifier:
                if _anchored(item):
                    raise self.refuse("a repeated anchor")
                item = _Text(f"(?:{_emit(item, self)}){quantifier}")
            items.append(item)
        return items

    def _atom(self) -> _Item:
        c = self._take()
        if c in "^$":
            return _Anchor(c)
        if c == "(":
            return self._group()
        if c == "[":
            return _Text(self._class())
        if c == ".":
            return _Text(_DOT)
        if c == "\\":
            return _Text(self._escape())
        if c in "*+?":
            raise self.refuse("a quantifier without an expression")
        if c == "{" and _BOUNDS.match(self.pattern, self.at - 1):
            raise self.refuse("a quantifier without an expression")
        return _Text(_char(ord(c)))

    def _group(self) -> _Group:
        self.depth += 1
        if self.depth > MAX_GRAMMAR_DEPTH:
            raise self.refuse("nesting this deep")
        if self._peek("?:"):
            self.at += 2
        elif named := re.compile(r"\?<[A-Za-z_]\w*>").match(self.pattern, self.at):
            self.at = named.end()
        elif self._peek("?"):
            raise self.refuse("look-around or an inline flag")
        group = _Group(self._alternatives())
        if self._take() != ")":
            raise self.refuse("an unmatched (")
        self.depth -= 1
        return group

    def _quantifier(self) -> str:
        found = ""
        if self.at < len(self.pattern) and self.pattern[self.at] in "*+?":
            found = self._take()
        elif bounds := _BOUNDS.match(self.pattern, self.at):
            low, high = int(bounds[1]), bounds[3]
            if bounds[2] and high and int(high) < low:
                raise self.refuse("a quantifier whose bounds are swapped")
            self.at, found = bounds.end(), bounds[0]
        elif self._peek("{,"):
            raise self.refuse("{,n}")
        if found and self._peek("?"):
            self.at += 1  # laziness changes which match is found, not whether there is one
        if found and self.at < len(self.pattern) and self.pattern[self.at] in "*+?":
            raise self.refuse("a quantifier of a quantifier")
        return found

    def _escape(self) -> str:
        c = self._take()
        if c in _INNER:
            return f"[{_INNER[c]}]"
        if c in "pP":
            return self._property(c)
        if c in "bB":
            raise self.refuse("a word boundary")
        if c == "k" or c in "123456789":
            raise self.refuse("a back-reference")
        return _char(self._code(c))

    def _property(self, c: str) -> str:
        found = re.compile(r"\{\^?[A-Za-z_0-9=]+\}").match(self.pattern, self.at)
        if found is None:
            raise self.refuse(f"\\{c} without a name")
        self.at = found.end()
        return f"\\{c}{found[0]}"

    def _code(self, c: str) -> int:
        """The character of the escape that begins with `c`."""
        if c in _CONTROL:
            if c == "0" and self.pattern[self.at : self.at + 1].isdigit():
                raise self.refuse("an octal escape")
            return _CONTROL[c]
        if c == "x":
            return self._hex(2)
        if c == "c" and self.pattern[self.at : self.at + 1].isascii() and self.pattern[self.at : self.at + 1].isalpha():
            return ord(self._take()) % 32
        if c == "u":
            return self._unicode()
        if c.isalnum():
            raise self.refuse(f"the escape \\{c}")
        return ord(c)

    def _unicode(self) -> int:
        if self._peek("{"):
            end = self.pattern.find("}", self.at)
            digits = self.pattern[self.at + 1 : end] if end > 0 else ""
            if not re.fullmatch("[0-9A-Fa-f]{1,6}", digits) or int(digits, 16) > 0x10FFFF:
                raise self.refuse("\\u{…} without a code point")
            self.at = end + 1
            return int(digits, 16)
        code = self._hex(4)
        if 0xD800 <= code < 0xDC00 and self._peek("\\u"):
            self.at += 2
            low = self._hex(4)
            if not 0xDC00 <= low < 0xE000:
                raise self.refuse("half a surrogate pair")
            return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= code < 0xE000:
            raise self.refuse("half a surrogate pair")
        return code

    def _hex(self, digits: int) -> int:
        text = self.pattern[self.at : self.at + digits]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{digits}}}", text):
            raise self.refuse("an escape without its hexadecimal digits")
        self.at += digits
        return int(text, 16)

    def _class(self) -> str:
        negated = self._peek("^")
        self.at += negated
        sets = _OUTER if negated else _INNER
        parts: list[str] = []
        while not self._peek("]"):
            low = self._class_member(sets)
            if self._peek("-") and not self._peek("-]"):
                self.at += 1
                high = self._class_member(sets)
                if isinstance(low, str) or isinstance(high, str):  # no range: the hyphen is itself
                    parts += [part if isinstance(part, str) else _char(part) for part in (low, ord("-"), high)]
                elif high < low:
                    raise self.refuse("a range whose ends are swapped")
                else:
                    parts.append(f"{_char(low)}-{_char(high)}")
            else:
                parts.append(low if isinstance(low, str) else _char(low))
        self.at += 1
        if not parts:
            return "(?s:.)" if negated else r"[^\x{0}-\x{10FFFF}]"
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _class_member(self, sets: dict[str, str]) -> int | str:
        c = self._take()
        if c != "\\":
            return ord(c)
        c = self._take()
        if c in sets:
            return sets[c]
        if c in "pP":
            return self._property(c)
        if c == "b":
            return 8
        return self._code(c)
