"""Context-free grammars: GBNF or Lark into the Lark that llguidance takes, without changing the language.

llguidance reads text with a greedy lexer: of the terminals that may come, the longest one wins. A terminal that swallows
what its successor needs (``[a-z]+ "b"``) would narrow the language. So a grammar without recursion becomes one terminal,
which is exact, and in the others terminals are as long as `ebnf_lexing` proves safe; at worst one character each.
A Lark grammar is passed on as it is: whoever writes terminals decides about them.
"""

from __future__ import annotations

import re

from radixcast.actors.grammar.ebnf_lexing import LAlt, Lexing, Lowered, LRepeat, LSeq, Terminal, tree_size
from radixcast.actors.grammar.ebnf_parse import Alt, Chars, Ref, Repeat, Seq, Tree, parse_gbnf
from radixcast.actors.grammar.interface import GrammarError
from radixcast.protocols.limits import MAX_GRAMMAR_BYTES

_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|\??start\s*(?:\[[^\]]*\]\s*)?:)")
_INLINED = (4_000, 400, 40)
"""Largest rule (nodes) that is written out where it is used; a smaller one when that makes the grammar too large."""

_MAX_TOTAL = 40_000


def to_lark(text: str) -> str:
    """GBNF (`root ::= …`) or Lark (`start: …`) -> llguidance's Lark.

    Raises GrammarError: invalid_grammar (with line and column where it is a mistake in the text) or grammar_too_large.
    """
    if not text.strip():
        raise GrammarError("the grammar is empty", code="invalid_grammar")
    if _LARK.search(text) and not re.search(r"(?m)^\s*root\s*::=", text):
        return _checked_lark(text)
    return write_lark(lex(text))


def lex(text: str) -> Lexing:
    """GBNF, checked and cut into terminals. Raises GrammarError."""
    rules = parse_gbnf(text)
    check_rules(rules)
    return Lexing(inlined(rules, "root"), "root")


def check_rules(rules: dict[str, Tree]) -> None:
    """There is a `root`, nothing is undefined, and every rule can end. Raises GrammarError."""
    if "root" not in rules:
        raise GrammarError("there is no rule called root", code="invalid_grammar")
    for name, tree in rules.items():
        for other in references(tree):
            if other not in rules:
                raise GrammarError(f"the rule {name!r} uses {other!r}, which is not defined", code="invalid_grammar")
    ending: set[str] = set()
    while found := {name for name, tree in rules.items() if name not in ending and _ends(tree, ending)}:
        ending |= found
    for name in rules:
        if name not in ending:
            raise GrammarError(f"the rule {name!r} can never end: no finite text matches it", code="invalid_grammar")


def references(tree: Tree) -> set[str]:
    """Names of the rules that a tree uses."""
    found: set[str] = set()
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Ref):
            found.add(part.name)
        elif isinstance(part, Seq):
            waiting.extend(part.items)
        elif isinstance(part, Alt):
            waiting.extend(part.options)
        elif isinstance(part, Repeat):
            waiting.append(part.item)
    return found


def inlined(rules: dict[str, Tree], start: str) -> dict[str, Tree]:
    """The rules that take part in recursion, and `start`, with all others written out in them (up to a size)."""
    uses = {name: references(tree) for name, tree in rules.items()}
    recursive = {name for name in rules if name in _reachable(uses, uses[name])}
    order = _dependencies_first(uses, recursive)
    kept: dict[str, Tree] = {}
    for most in _INLINED:
        kept = _written_out(rules, order, recursive, most)
        live = {start} | _reachable({name: references(tree) for name, tree in kept.items()}, references(kept[start]))
        kept = {name: tree for name, tree in kept.items() if name in live}
        if sum(map(tree_size, kept.values())) <= _MAX_TOTAL:
            break
    return kept


def _written_out(rules: dict[str, Tree], order: list[str], recursive: set[str], most: int) -> dict[str, Tree]:
    done: dict[str, Tree] = {}
    small: set[str] = set()

    def resolve(tree: Tree) -> Tree:
        if isinstance(tree, Ref):
            return done[tree.name] if tree.name in small else tree
        if isinstance(tree, Seq):
            return Seq(tuple(map(resolve, tree.items)))
        if isinstance(tree, Alt):
            return Alt(tuple(map(resolve, tree.options)))
        return Repeat(resolve(tree.item), tree.least, tree.most) if isinstance(tree, Repeat) else tree

    for name in order:
        done[name] = resolve(rules[name])
        if tree_size(done[name]) <= most:
            small.add(name)
    return {name: resolve(rules[name]) if name in recursive else done[name] for name in rules}


def write_lark(lexing: Lexing) -> str:
    """The cut grammar as Lark text."""
    return "\n".join(["%llguidance {}", *lark_lines(lexing, "start", "")]) + "\n"


def lark_lines(lexing: Lexing, start: str, prefix: str) -> list[str]:
    """The rules and terminals of a cut grammar: the first rule is called `start`, all other names begin with `prefix`."""
    names = {name: start if name == lexing.start else f"{prefix}r{i}" for i, name in enumerate(lexing.rules)}
    terminal = f"{prefix.upper()}T"

    def write(tree: Lowered) -> str:
        if isinstance(tree, Terminal):
            return f"{terminal}{tree.index}" + ("?" if lexing.nullable(tree) else "")
        if isinstance(tree, Ref):
            return names[tree.name]
        if isinstance(tree, LSeq):
            return f"({' '.join(map(write, tree.items))})" if tree.items else '""'
        if isinstance(tree, LAlt):
            return f"({' | '.join(map(write, tree.options))})"
        assert isinstance(tree, LRepeat)
        return f"({write(tree.item)}){_bounds(tree.least, tree.most)}"

    lines = [f"{names[name]}: {write(tree)}" for name, tree in lexing.rules.items()]
    return lines + [f"{terminal}{i}: /{expression(tree)}/" for i, tree in enumerate(lexing.terminals)]


def literal(text: str) -> str:
    """A regular expression of exactly this text (Rust; no slash, blank or line break in it)."""
    return "".join(_char(ord(c)) for c in text)


def expression(tree: Tree) -> str:
    """A tree without references as a regular expression (Rust; no slash, blank or line break in it)."""
    if isinstance(tree, Chars):
        if tree.ranges == ((tree.ranges[0][0],) * 2,):
            return _char(tree.ranges[0][0])
        return f"[{''.join(_char(low) if low == high else f'{_char(low)}-{_char(high)}' for low, high in _scalars(tree))}]"
    if isinstance(tree, Seq):
        return "".join(map(expression, tree.items)) or "(?:)"
    if isinstance(tree, Alt):
        return f"(?:{'|'.join(map(expression, tree.options))})"
    assert isinstance(tree, Repeat)
    return f"(?:{expression(tree.item)}){_bounds(tree.least, tree.most)}"


def _bounds(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def _char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}"


def _scalars(tree: Chars) -> list[tuple[int, int]]:
    """The ranges without surrogates."""
    found: list[tuple[int, int]] = []
    for low, high in tree.ranges:
        if low < 0xD800:
            found.append((low, min(high, 0xD7FF)))
        if high > 0xDFFF:
            found.append((max(low, 0xE000), high))
    return found


def _reachable(uses: dict[str, set[str]], start: set[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(uses[name])
    return found


def _dependencies_first(uses: dict[str, set[str]], recursive: set[str]) -> list[str]:
    """Rules that are not recursive, each after the ones that it uses."""
    order: list[str] = []
    seen: set[str] = set(recursive)
    for start in uses:
        stack = [(start, iter(sorted(uses[start])))] if start not in seen else []
        seen.add(start)
        while stack:
            name, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                order.append(name)
                stack.pop()
            elif following not in seen:
                seen.add(following)
                stack.append((following, iter(sorted(uses[following]))))
    return order


def _ends(tree: Tree, ending: set[str]) -> bool:
    if isinstance(tree, Ref):
        return tree.name in ending
    if isinstance(tree, Seq):
        return all(_ends(item, ending) for item in tree.items)
    if isinstance(tree, Alt):
        return any(_ends(option, ending) for option in tree.options)
    return not isinstance(tree, Repeat) or tree.least == 0 or _ends(tree.item, ending)


def _checked_lark(text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes", code="grammar_too_large")
    if "x-guidance" in text:
        raise GrammarError("x-guidance is not allowed in a grammar", code="invalid_grammar")
    return text
