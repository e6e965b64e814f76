"""structural_tag: free text in which some parts are constrained.

Two forms: SGLang's older one (`structures` with `begin`, `schema`, `end`, and `triggers`), and xgrammar's `format`: a tree of
const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags and tags_with_separator. Free text ends
where the constant text that follows it first stands; it holds no trigger. Tags are plain text: special tokens never count.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from llguidance import regex_to_lark

from radixcast.actors.grammar.ebnf import expression, lark_lines, lex, literal
from radixcast.actors.grammar.ebnf_lexing import Terminal
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.json_options import check_spelling, json_options
from radixcast.actors.grammar.regex import normalize
from radixcast.actors.grammar.schema import admit_value, parse
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec

_MAX_TAGS = 1_000
_ANY = "(?s:.)*"


class _Regular(NamedTuple):
    """A regular expression; neighbours are joined to one lexeme, so that no lexer divides them."""

    rust: str
    constant: bool = False
    """One text, or any of a few: free text may end where it stands first."""


class _Lark(NamedTuple):
    """Anything else: a Lark expression."""

    expression: str


class _Free(NamedTuple):
    """Any text without one of `triggers`."""

    triggers: tuple[str, ...] = ()


_Piece = _Regular | _Lark | _Free


def tags_to_lark(spec: GrammarSpec, vocabulary: Vocabulary, *, expand_one_of: bool = False) -> str:
    """A structural_tag spec -> Lark. Raises GrammarError with a JSON pointer in `param`."""
    document = parse(spec.text)
    if not isinstance(document, dict):
        raise _invalid("structural_tag must be an object", "")
    writer = _Writer(spec, vocabulary, expand_one_of)
    if "structures" in document:
        pieces = writer.legacy(document)
    elif "format" in document:
        pieces = writer.pieces(document["format"], "/format")
    else:
        raise _invalid("structural_tag needs structures and triggers, or format", "")
    start = writer.assemble(pieces, "")
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.lines]) + "\n"


class _Writer:
    """Collects the rules that a structural tag needs."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary, expand_one_of: bool) -> None:
        self.lines: list[str] = []
        self._spec = spec
        self._vocabulary = vocabulary
        self._expand_one_of = expand_one_of
        self._names = 0
        self._tags = 0

    def legacy(self, document: dict[str, Any]) -> list[_Piece]:
        """`structures` and `triggers`."""
        structures = _list(document, "structures", "")
        tags = [
            {
                "begin": part.get("begin") if isinstance(part, dict) else None,
                "content": {"type": "json_schema", "json_schema": part.get("schema", True) if isinstance(part, dict) else None},
                "end": part.get("end", "") if isinstance(part, dict) else None,
            }
            for part in structures
        ]
        return self._triggered({"triggers": document.get("triggers"), "tags": tags}, "", "/structures")

    def pieces(self, node: Any, pointer: str) -> list[_Piece]:
        """One node of a format tree."""
        if not isinstance(node, dict):
            raise _invalid("a format must be an object", pointer)
        match node.get("type"):
            case "const_string":
                return [_constant(_string(node, "value", pointer))]
            case "json_schema":
                return [self._json(node.get("json_schema"), f"{pointer}/json_schema", node.get("style", "json"))]
            case "regex":
                return [_Regular(f"(?:{normalize(_string(node, 'pattern', pointer))})")]
            case "grammar":
                return [self._grammar(_string(node, "grammar", pointer))]
            case "any_text":
                return [_Free(_texts(node.get("excludes", []), f"{pointer}/excludes"))]
            case "sequence":
                parts = enumerate(_list(node, "elements", pointer))
                return [piece for i, part in parts for piece in self.pieces(part, f"{pointer}/elements/{i}")]
            case "or":
                return [self._any(node, pointer)]
            case "tag":
                return self._tag(node, pointer)
            case "triggered_tags":
                return self._triggered(node, pointer, f"{pointer}/tags")
            case "tags_with_separator":
                return self._separated(node, pointer)
        raise GrammarError(f"unknown format type {node.get('type')!r}", code="invalid_grammar", param=f"{pointer}/type")

    def assemble(self, pieces: list[_Piece], pointer: str) -> str:
        """Pieces one after the other, as a Lark expression."""
        out: list[str] = []
        at = 0
        while at < len(pieces):
            piece = pieces[at]
            end = at + 1
            if isinstance(piece, _Lark):
                out.append(piece.expression)
            elif isinstance(piece, _Free):
                following = pieces[end] if end < len(pieces) else None
                out.append(self._free(piece, following, pointer))
                end += following is not None
            else:
                while end < len(pieces) and isinstance(pieces[end], _Regular):
                    end += 1
                out.append(self._terminal("".join(part.rust for part in pieces[at:end] if isinstance(part, _Regular))))
            at = end
        return f"({' '.join(out)})" if out else '""'

    # -------------------------------------------------------------- nodes

    def _json(self, schema: Any, pointer: str, style: Any) -> _Lark:
        if style != "json":
            raise GrammarError(f"style {style!r} is not supported", code="invalid_grammar", param=f"{pointer}")
        if isinstance(schema, str):
            schema = parse(schema)
        try:
            admitted = admit_value(schema, lenient=self._spec.lenient, expand_one_of=self._expand_one_of)
            check_spelling(admitted, self._vocabulary)
        except GrammarError as error:
            raise GrammarError(str(error), code=error.info.code, param=f"{pointer}{error.info.param or ''}") from None
        content = {**json.loads(admitted.text), "x-guidance": json_options(self._spec.whitespace, admitted)}
        return _Lark(self._rule(f"%json {json.dumps(content, ensure_ascii=False)}"))

    def _grammar(self, text: str) -> _Piece:
        lexing = lex(text)
        whole = lexing.rules[lexing.start]
        if isinstance(whole, Terminal):
            return _Regular(f"(?:{expression(lexing.terminals[whole.index])})")
        name = self._name("g")
        self.lines += lark_lines(lexing, name, f"{name}_")
        return _Lark(name)

    def _any(self, node: dict[str, Any], pointer: str) -> _Piece:
        options = [self.pieces(part, f"{pointer}/elements/{i}") for i, part in enumerate(_list(node, "elements", pointer))]
        if not options:
            raise _invalid("elements is empty", f"{pointer}/elements")
        joined = [_joined(option) for option in options]
        if all(isinstance(option, _Regular) for option in joined):
            return _Regular(f"(?:{'|'.join(option.rust for option in joined if isinstance(option, _Regular))})")
        return _Lark(self._rule(" | ".join(self.assemble(option, pointer) for option in options)))

    def _tag(self, node: Any, pointer: str, skip: int = 0) -> list[_Piece]:
        """begin (without its first `skip` characters), content, end."""
        self._tags += 1
        if self._tags > _MAX_TAGS:
            raise GrammarError(f"more than {_MAX_TAGS} tags", code="grammar_too_large", param=pointer)
        if not isinstance(node, dict):
            raise _invalid("a tag must be an object", pointer)
        content = self.pieces(node.get("content"), f"{pointer}/content")
        ends = node.get("end", "")
        if isinstance(ends, list):
            texts = _texts(ends, f"{pointer}/end")
            end = _Regular(f"(?:{'|'.join(map(literal, texts))})", constant=True) if texts else _constant("")
        else:
            end = _constant(_string(node, "end", pointer, ""))
        begin = _string(node, "begin", pointer)[skip:]
        return [*([_constant(begin)] if begin else []), *content, *([end] if end.rust else [])]

    def _triggered(self, node: dict[str, Any], pointer: str, place: str) -> list[_Piece]:
        triggers = _texts(node.get("triggers"), f"{pointer}/triggers")
        if not triggers:
            raise _invalid("there are no triggers", f"{pointer}/triggers")
        if clash := next((a for a in triggers for b in triggers if a != b and b in a), None):
            raise _invalid(f"the trigger {clash!r} holds another one", f"{pointer}/triggers")
        bodies: dict[str, list[str]] = {}
        for i, tag in enumerate(_list(node, "tags", pointer)):
            here = f"{place}/{i}"
            begin = _string(tag, "begin", here) if isinstance(tag, dict) else ""
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not found:
                raise _invalid("begin must start with one of the triggers", f"{here}/begin")
            trigger = found[0]
            bodies.setdefault(trigger, []).append(self.assemble(self._tag(tag, here, len(trigger)), here))
        if not bodies:
            raise _invalid("there are no tags", place)
        options = []
        for trigger, alternatives in bodies.items():
            lead = self._name("f")
            self.lines.append(f"{lead}[lazy]: /{_ANY}{literal(trigger)}/")
            options.append(f"{lead} ({' | '.join(alternatives)})")
        one = self._rule(" | ".join(options))
        tail = _Free(triggers)
        if node.get("stop_after_first"):
            if node.get("at_least_one"):
                return [_Lark(one)]
            return [_Lark(self._rule(f"{one} | {self._free(tail, None, pointer)}"))]
        return [_Lark(f"{one}+" if node.get("at_least_one") else f"{one}*"), tail]

    def _separated(self, node: dict[str, Any], pointer: str) -> list[_Piece]:
        tags = _list(node, "tags", pointer)
        if not tags:
            raise _invalid("there are no tags", f"{pointer}/tags")
        bodies = (self.assemble(self._tag(tag, f"{pointer}/tags/{i}"), pointer) for i, tag in enumerate(tags))
        one = self._rule(" | ".join(bodies))
        separator = _string(node, "separator", pointer, "")
        between = self._terminal(literal(separator)) if separator else ""
        many = one if node.get("stop_after_first") else self._rule(f"{one} ({between} {one})*")
        return [_Lark(many if node.get("at_least_one") else f"{many}?")]

    # -------------------------------------------------------------- Lark

    def _free(self, free: _Free, following: _Piece | None, pointer: str) -> str:
        """Free text, with the constant text that ends it or as the last part."""
        if following is None:
            name = self._name("F")
            without = f" & ~/{_ANY}(?:{'|'.join(map(literal, free.triggers))}){_ANY}/" if free.triggers else ""
            self.lines.append(f"{name}: /{_ANY}/{without}")
            return f"{name}?"
        if free.triggers or not isinstance(following, _Regular) or not (following.constant and following.rust):
            raise _invalid("free text must be the last part, or constant text must follow it", pointer)
        name = self._name("f")
        self.lines.append(f"{name}[lazy]: /{_ANY}{following.rust}/")
        return name

    def _terminal(self, rust: str) -> str:
        name = self._name("C")
        self.lines.append(f"{name}: /{regex_to_lark(rust, use_ascii='')}/")
        return name

    def _rule(self, body: str) -> str:
        name = self._name("x")
        self.lines.append(f"{name}: {body}")
        return name

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"


def _constant(text: str) -> _Regular:
    return _Regular(literal(text), constant=True)


def _joined(pieces: list[_Piece]) -> _Piece | None:
    """The pieces as one regular expression, when all are."""
    texts = [piece.rust for piece in pieces if isinstance(piece, _Regular)]
    return _Regular("".join(texts)) if len(texts) == len(pieces) else None


def _invalid(why: str, pointer: str) -> GrammarError:
    return GrammarError(why, code="invalid_grammar", param=pointer)


def _string(node: dict[str, Any], key: str, pointer: str, default: str | None = None) -> str:
    value = node.get(key, default)
    if not isinstance(value, str):
        raise _invalid(f"{key} must be a text", f"{pointer}/{key}")
    return value


def _list(node: dict[str, Any], key: str, pointer: str) -> list[Any]:
    value = node.get(key)
    if not isinstance(value, list):
        raise _invalid(f"{key} must be a list", f"{pointer}/{key}")
    return value


def _texts(value: Any, pointer: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise _invalid("must be a list of texts that are not empty", pointer)
    return tuple(value)
