"""The walk over a schema. See `schema` for what it promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.schema_keywords import HANDLERS, Node
from radixcast.actors.grammar.schema_negate import ANNOTATIONS, Unrewritable
from radixcast.actors.grammar.schema_refs import References, Target, escape
from radixcast.protocols.limits import MAX_ENUM_VALUES, MAX_SCHEMA_NODES

_WIDER = frozenset(("nullable", "discriminator", "$vocabulary"))
"""Annotations that other dialects give a meaning to; a warning says that they have none here."""

_REFUSED = frozenset(("$dynamicRef", "$recursiveRef", "$recursiveAnchor", "extends", "disallow", "divisibleBy"))


class Walker:
    """One schema's walk. `run` gives the normalised schema."""

    def __init__(self, document: Any, *, lenient: bool, expand_one_of: bool) -> None:
        self.document = document
        self.lenient = lenient
        self.expand_one_of = expand_one_of
        self.references = References(document)
        self.warnings: list[str] = []
        self.constants: list[tuple[str, str]] = []
        self.kept_one_of = False
        self.open_objects = False
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Target]] = []
        self._keep: list[Any] = []
        self._nodes = 0
        self._values = 0

    def run(self) -> Any:
        """The whole schema: a boolean, or an object with all referenced schemas in `$defs`."""
        root = self.node(self.document, "", "")
        definitions: Node = {}
        while self._waiting:
            name, target = self._waiting.pop()
            definitions[name] = self.node(target.schema, target.pointer, target.base)
        if not definitions:
            return root
        return {**(root if isinstance(root, dict) else {"allOf": [root]}), "$defs": definitions}

    def node(self, schema: Any, pointer: str, base: str) -> Any:
        """One schema, normalised."""
        self._nodes += 1
        if self._nodes > MAX_SCHEMA_NODES:
            raise GrammarError(f"the schema has more than {MAX_SCHEMA_NODES} parts", code="grammar_too_large", param=pointer)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self.invalid("a schema must be an object or a boolean", pointer)
        base = self.references.base_of(schema, base)
        out: Node = {}
        for keyword, value in schema.items():
            self.keyword(out, schema, keyword, value, f"{pointer}/{escape(keyword)}", base)
        if (out.get("properties") or out.get("patternProperties")) and out.get("additionalProperties") is not False:
            self.open_objects = True
        return out

    def keyword(self, out: Node, schema: Node, keyword: str, value: Any, pointer: str, base: str) -> None:
        """Enforce, rewrite, skip or refuse one keyword."""
        handler = HANDLERS.get(keyword)
        if handler is not None:
            try:
                handler(self, out, schema, value, pointer, base)
            except Unrewritable as problem:
                self.unsupported(keyword, f"{problem} can't be enforced", pointer)
        elif keyword == "x-guidance":
            self.warnings.append(f"{pointer}: ignored")
        elif keyword in _WIDER:
            self.warnings.append(f"{pointer}: {keyword} is no keyword of JSON Schema and has no effect")
        elif keyword in ANNOTATIONS or keyword.startswith("x-"):
            pass
        elif keyword in _REFUSED:
            self.unsupported(keyword, f"{keyword!r} can't be enforced", pointer)
        elif (meant := _meant(keyword)) is not None:
            self.unsupported(keyword, f"unknown keyword {keyword!r}: did you mean {meant!r}?", pointer)
        else:
            self.warnings.append(f"{pointer}: unknown keyword, taken for an annotation")

    def unsupported(self, keyword: str, why: str, pointer: str) -> None:
        """Refuse a keyword, or ignore it with a warning when lenient."""
        if not self.lenient:
            raise GrammarError(f"{keyword}: {why}", code="unsupported_schema_keyword", param=pointer)
        self.warnings.append(f"{pointer}: ignored ({why})")

    def invalid(self, why: str, pointer: str) -> GrammarError:
        """The error for something that is no schema."""
        return GrammarError(why, code="invalid_schema", param=pointer)

    def conjunct(self, out: Node, schema: Any, pointer: str, base: str) -> None:
        """Add a raw schema that must hold too."""
        if schema is not True:
            self._keep.append(schema)  # an id() must not be used twice while bases are looked up by it
            try:
                out.setdefault("allOf", []).append(self.node(schema, pointer, base))
            except GrammarError as error:  # its pointer leads into the rewritten schema, which nobody has seen
                raise GrammarError(str(error), code=error.info.code, param=pointer) from None

    def pattern(self, out: Node, rust: str) -> None:
        """Add a translated pattern; a second one goes beside the first."""
        if "pattern" in out:
            out.setdefault("allOf", []).append({"pattern": rust})
        else:
            out["pattern"] = rust

    def name_of(self, target: Target) -> str:
        """The definition of a reference's target."""
        name = self._names.get(id(target.schema))
        if name is None or isinstance(target.schema, bool):
            name = f"r{len(self._names)}"
            self._keep.append(target.schema)
            self._names[id(target.schema)] = name
            self._waiting.append((name, target))
        return name

    def resolver(self, pointer: str, base: str) -> Callable[[str], Any]:
        """`$ref` text -> raw schema, for rewriting. Targets with a base of their own can't be moved."""

        def resolve(reference: str) -> Any:
            if not isinstance(reference, str):
                raise self.invalid("$ref must be a string", pointer)
            target = self.references.resolve(reference, base, pointer)
            if target.base != base:
                raise Unrewritable(f"$ref {reference[:100]!r} into another resource")
            return target.schema

        return resolve

    def constant(self, value: Any, pointer: str) -> None:
        """Remember the strings of a value that must be written literally."""
        waiting = [value]
        while waiting:
            part = waiting.pop()
            self._values += 1
            if self._values > MAX_ENUM_VALUES:
                message = f"more than {MAX_ENUM_VALUES} constants in one schema"
                raise GrammarError(message, code="grammar_too_large", param=pointer)
            if isinstance(part, str):
                self.constants.append((pointer, part))
            elif isinstance(part, list):
                waiting.extend(part)
            elif isinstance(part, dict):
                waiting.extend(part)
                waiting.extend(part.values())

    def schema_list(self, value: Any, pointer: str, base: str) -> list[Any]:
        """A non-empty list of schemas."""
        if not isinstance(value, list) or not value:
            raise self.invalid("must be a list of schemas that is not empty", pointer)
        return [self.node(part, f"{pointer}/{i}", base) for i, part in enumerate(value)]

    def schema_map(self, value: Any, pointer: str) -> dict[str, Any]:
        """An object of anything."""
        if not isinstance(value, dict):
            raise self.invalid("must be an object", pointer)
        return value

    def count(self, value: Any, pointer: str) -> int:
        """A non-negative integer (2.0 is one)."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or int(value) != value:
            raise self.invalid("must be an integer that is not negative", pointer)
        return int(value)

    def number(self, value: Any, pointer: str) -> int | float:
        """A number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.invalid("must be a number", pointer)
        return value


def _meant(keyword: str) -> str | None:
    """The keyword of which this one is a misspelling: other letter case or separators, or one letter off."""
    folded = keyword.lower().replace("_", "").replace("-", "")
    for known in HANDLERS:
        other = known.lower()
        if folded == other or (len(other) > 6 and known[0] != "$" and _one_off(folded, other)):
            return known
    return None


def _one_off(a: str, b: str) -> bool:
    """One insertion, deletion or substitution apart."""
    if abs(len(a) - len(b)) > 1 or a == b:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[start + (len(a) >= len(b)) :] == b[start + (len(b) >= len(a)) :]
