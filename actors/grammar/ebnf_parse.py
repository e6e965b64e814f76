"""GBNF, as llama.cpp, xgrammar and SGLang's users write it, into a tree.

    rule      = name "::=" alternatives              rules may span lines; `#` starts a comment
    sequence  = { atom [ "*" | "+" | "?" | "{m}" | "{m,}" | "{m,n}" | "{,n}" ] }
    atom      = name | "text" | 'text' | [class] | . | ( alternatives )

Escapes: \\n \\r \\t \\xHH \\uHHHH \\UHHHHHHHH, and a backslash before any other character that is no letter or digit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from radixcast.actors.grammar.interface import GrammarError
from radixcast.protocols.limits import MAX_ENUM_VALUES, MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH

TOP = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Code points as sorted, disjoint, inclusive ranges."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Ref:
    """Another rule."""

    name: str
    place: int


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; none: the empty text."""

    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any one."""

    options: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Between `least` and `most` times (None: any number)."""

    item: Tree
    least: int
    most: int | None


Tree = Chars | Ref | Seq | Alt | Repeat

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*|[0-9][A-Za-z0-9_.-]*")
_RULE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)[ \t]*::=")
_BOUNDS = re.compile(r"\{\s*(\d*)\s*(,\s*(\d*)\s*)?\}", re.ASCII)
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_LETTERS = {"n": 10, "r": 13, "t": 9}
_HEX = {"x": 2, "u": 4, "U": 8}
_MOST_REPEATS = 10_000


def parse_gbnf(text: str) -> dict[str, Tree]:
    """All rules by name, in the text's order. Raises GrammarError (invalid_grammar, grammar_too_large) with line and column."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes", code="grammar_too_large")
    return _Parser(text).rules()


def merged(ranges: list[tuple[int, int]]) -> Ranges:
    """Any ranges, sorted and joined."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def inverted(ranges: Ranges) -> Ranges:
    """All other characters."""
    out: list[tuple[int, int]] = []
    following = 0
    for low, high in ranges:
        if low > following:
            out.append((following, low - 1))
        following = high + 1
    if following <= TOP:
        out.append((following, TOP))
    return tuple(out)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def rules(self) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        self._space()
        while self.at < len(self.text):
            head = _RULE.match(self.text, self.at)
            if head is None:
                raise self.error("expected a rule, as in: name ::= …")
            if head[1] in found:
                raise self.error(f"the rule {head[1]!r} is defined twice")
            if len(found) >= MAX_ENUM_VALUES:
                raise GrammarError(f"more than {MAX_ENUM_VALUES} rules", code="grammar_too_large")
            self.at = head.end()
            found[head[1]] = self._alternatives()
        return found

    def error(self, what: str, at: int | None = None) -> GrammarError:
        place = self.at if at is None else at
        line = self.text.count("\n", 0, place) + 1
        column = place - (self.text.rfind("\n", 0, place) + 1) + 1
        return GrammarError(f"line {line}, column {column}: {what}", code="invalid_grammar")

    def _space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _alternatives(self) -> Tree:
        options = [self._sequence()]
        while self.text.startswith("|", self.at):
            self.at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Tree:
        items: list[Tree] = []
        while True:
            self._space()
            if self.at >= len(self.text) or self.text[self.at] in "|)" or _RULE.match(self.text, self.at):
                return items[0] if len(items) == 1 else Seq(tuple(items))
            items.append(self._repeated(self._atom()))

    def _atom(self) -> Tree:
        c = self.text[self.at]
        if c in "\"'":
            return self._literal(c)
        if c == "[":
            return self._class()
        if c == ".":
            self.at += 1
            return Chars(((0, TOP),))
        if c == "(":
            return self._group()
        if found := _NAME.match(self.text, self.at):
            ref = Ref(found[0], self.at)
            self.at = found.end()
            return ref
        raise self.error(f"unexpected {c!r}")

    def _group(self) -> Tree:
        start = self.at
        self.depth += 1
        if self.depth > MAX_GRAMMAR_DEPTH:
            raise self.error("groups nest too deep")
        self.at += 1
        if self.text.startswith("=", self.at):
            raise self.error("look-ahead is not supported")
        inner = self._alternatives()
        if not self.text.startswith(")", self.at):
            raise self.error("an unmatched (", start)
        self.at += 1
        self.depth -= 1
        return inner

    def _repeated(self, item: Tree) -> Tree:
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in "*+?":
                self.at += 1
                item = Repeat(item, int(c == "+"), 1 if c == "?" else None)
            elif c == "{":
                item = self._bounded(item)
            else:
                break
        return item

    def _bounded(self, item: Tree) -> Tree:
        found = _BOUNDS.match(self.text, self.at)
        if found is None or not (found[1] or found[3]):
            raise self.error("expected {m}, {m,}, {m,n} or {,n}")
        least = int(found[1] or 0)
        most = least if found[2] is None else (int(found[3]) if found[3] else None)
        if most is not None and most < least:
            raise self.error("bounds are swapped")
        if max(least, most or 0) > _MOST_REPEATS:
            raise self.error(f"more than {_MOST_REPEATS} repeats")
        self.at = found.end()
        return Repeat(item, least, most)

    def _literal(self, quote: str) -> Tree:
        start = self.at
        self.at += 1
        items: list[Tree] = []
        while not self.text.startswith(quote, self.at):
            if self.at >= len(self.text) or self.text[self.at] == "\n":
                raise self.error("a text that does not end", start)
            code = self._char()
            items.append(Chars(((code, code),)))
        self.at += 1
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _class(self) -> Tree:
        start = self.at
        self.at += 1
        negated = self.text.startswith("^", self.at)
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while not self.text.startswith("]", self.at):
            if self.at >= len(self.text):
                raise self.error("a class that does not end", start)
            low = high = self._char()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self._char()
            if high < low:
                raise self.error("a range whose ends are swapped")
            ranges.append((low, high))
        self.at += 1
        found = inverted(merged(ranges)) if negated else merged(ranges)
        if not found:
            raise self.error("an empty class", start)
        return Chars(found)

    def _char(self) -> int:
        if self.at >= len(self.text):
            raise self.error("an unfinished rule")
        c = self.text[self.at]
        self.at += 1
        if c != "\\":
            return self._code(ord(c))
        c = self.text[self.at : self.at + 1]
        self.at += 1
        if c in _HEX and c:
            digits = self.text[self.at : self.at + _HEX[c]]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX[c]}}}", digits):
                raise self.error(f"\\{c} needs {_HEX[c]} hexadecimal digits")
            self.at += _HEX[c]
            return self._code(int(digits, 16))
        if c in _LETTERS:
            return _LETTERS[c]
        if not c or c.isalnum():
            raise self.error(f"the escape \\{c} does not exist")
        return ord(c)

    def _code(self, code: int) -> int:
        if code > TOP or 0xD800 <= code < 0xE000:
            raise self.error("not a Unicode character")
        return code
