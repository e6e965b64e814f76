"""The walk over a schema, keyword by keyword. See `schema` for what it promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.schema_formats import ALIASES, ENFORCED, LONGEST, NATIVE
from radixcast.actors.grammar.schema_negate import (
    ANNOTATIONS,
    TYPES,
    Unrewritable,
    negate,
    rewrite_contains,
    rewrite_dependency,
    rewrite_if,
    rewrite_one_of,
    rewrite_unique,
)
from radixcast.actors.grammar.schema_pattern import translate
from radixcast.actors.grammar.schema_refs import References, Target, escape
from radixcast.actors.grammar.schema_unevaluated import rewrite_unevaluated_items, rewrite_unevaluated_properties
from radixcast.protocols.limits import MAX_ENUM_VALUES, MAX_SCHEMA_NODES

_WIDER = frozenset(("nullable", "discriminator", "$vocabulary"))
"""Annotations that other dialects give a meaning to; a warning says that they have none here."""

_REFUSED = frozenset(("$dynamicRef", "$recursiveRef", "$recursiveAnchor", "extends", "disallow", "divisibleBy"))

Node = dict[str, Any]
Handler = Callable[["Walker", Node, Node, Any, str, str], None]
"""(walker, out, schema, value, pointer of the keyword, base URI)"""


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


# ------------------------------------------------------------------ any value


def _type(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not named or not all(isinstance(name, str) and name in TYPES for name in named):
        raise walker.invalid(f"type must be one of {', '.join(TYPES)}, or a list of them", pointer)
    out["type"] = value


def _enum(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if not isinstance(value, list):
        raise walker.invalid("enum must be a list", pointer)
    if not value:
        raise GrammarError("nothing matches an empty enum", code="unsatisfiable_schema", param=pointer)
    walker.constant(value, pointer)
    out["enum"] = value


def _const(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    walker.constant(value, pointer)
    out["const"] = value


def _ref(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if not isinstance(value, str):
        raise walker.invalid("$ref must be a string", pointer)
    target = walker.references.resolve(value, base, pointer)
    out["$ref"] = f"#/$defs/{walker.name_of(target)}"


def _all_of(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    out.setdefault("allOf", []).extend(walker.schema_list(value, pointer, base))


def _any_of(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    out["anyOf"] = walker.schema_list(value, pointer, base)


def _one_of(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if walker.expand_one_of and isinstance(value, list) and len(value) > 1:
        walker.conjunct(out, rewrite_one_of(value, walker.resolver(pointer, base)), pointer, base)
        return
    out["oneOf"] = walker.schema_list(value, pointer, base)
    walker.kept_one_of = walker.kept_one_of or len(out["oneOf"]) > 1


def _not(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    walker.conjunct(out, negate(value, walker.resolver(pointer, base)), pointer, base)


def _if(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    walker.conjunct(out, rewrite_if(schema, walker.resolver(pointer, base)), pointer, base)


# ------------------------------------------------------------------ numbers


def _bound(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    keyword = pointer.rsplit("/", 1)[1]
    if keyword.startswith("exclusive"):
        if isinstance(value, bool):  # draft 4: it qualifies the other keyword
            return
    elif schema.get(f"exclusive{keyword.capitalize()}") is True:
        keyword = f"exclusive{keyword.capitalize()}"
    out[keyword] = _inside(walker.number(value, pointer), upper=keyword.lower().endswith("maximum"))


def _inside(value: int | float, *, upper: bool) -> int | float:
    """The nearest number that a 64-bit float holds, not beyond the bound."""
    try:
        near = float(value)
    except OverflowError:
        near = math.inf if value > 0 else -math.inf
    if math.isinf(near):
        near = math.copysign(1.7976931348623157e308, near)
    if upper and near > value:
        near = math.nextafter(near, -math.inf)
    if not upper and near < value:
        near = math.nextafter(near, math.inf)
    return value if near == value else (int(near) if near.is_integer() else near)


def _multiple_of(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if walker.number(value, pointer) <= 0:
        raise walker.invalid("multipleOf must be greater than 0", pointer)
    out["multipleOf"] = value


# ------------------------------------------------------------------ strings


def _count(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    out[pointer.rsplit("/", 1)[1]] = walker.count(value, pointer)


def _pattern(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if not isinstance(value, str):
        raise walker.invalid("pattern must be a string", pointer)
    walker.pattern(out, translate(value, pointer))


def _format(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if not isinstance(value, str):
        raise walker.invalid("format must be a string", pointer)
    value = ALIASES.get(value, value)
    if value in NATIVE:
        out["format"] = value
    elif value in ENFORCED:
        walker.pattern(out, f"^(?:{ENFORCED[value]})$")
        if value in LONGEST:
            out.setdefault("allOf", []).append({"maxLength": LONGEST[value]})
    else:
        walker.warnings.append(f"{pointer}: unknown format {value[:100]!r}, taken for an annotation")


# ------------------------------------------------------------------ arrays


def _items(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if not isinstance(value, list):
        out["items"] = walker.node(value, pointer, base)
        return
    if value:
        out["prefixItems"] = walker.schema_list(value, pointer, base)
    if "additionalItems" in schema:
        place = f"{pointer.rsplit('/', 1)[0]}/additionalItems"
        out["items"] = walker.node(schema["additionalItems"], place, base)


def _prefix_items(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    out["prefixItems"] = walker.schema_list(value, pointer, base)


def _unique_items(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if not isinstance(value, bool):
        raise walker.invalid("uniqueItems must be a boolean", pointer)
    if value:
        walker.conjunct(out, rewrite_unique(schema), pointer, base)


def _contains(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    walker.conjunct(out, rewrite_contains(schema), pointer, base)


def _unevaluated_items(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    walker.conjunct(out, rewrite_unevaluated_items(schema, walker.resolver(pointer, base)), pointer, base)


# ------------------------------------------------------------------ objects


def _properties(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    parts = walker.schema_map(value, pointer)
    out["properties"] = {name: walker.node(part, f"{pointer}/{escape(name)}", base) for name, part in parts.items()}


def _pattern_properties(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    parts = walker.schema_map(value, pointer)
    out["patternProperties"] = {
        translate(name, f"{pointer}/{escape(name)}"): walker.node(part, f"{pointer}/{escape(name)}", base)
        for name, part in parts.items()
    }


def _additional(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    out["additionalProperties"] = walker.node(value, pointer, base)


def _min_properties(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    least = walker.count(value, pointer)
    required = schema.get("required")
    if isinstance(required, list) and len(set(map(str, required))) >= least:
        return
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if least > 1 and not closed:
        raise Unrewritable("minProperties above 1 where names are free (a name may come twice)")
    out["minProperties"] = least


def _required(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    if isinstance(value, bool):  # draft 3, met in hand-written schemas
        raise walker.invalid("required must be a list of property names", pointer)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise walker.invalid("required must be a list of property names", pointer)
    walker.constant(value, pointer)
    out["required"] = list(dict.fromkeys(value))


def _property_names(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    expression = _names_pattern(walker, value, pointer)
    if expression is None:
        return
    place = {"patternProperties": {expression: True}, "additionalProperties": False}
    out.setdefault("allOf", []).append(place)


def _names_pattern(walker: Walker, names: Any, pointer: str) -> str | None:
    """What a property's name must match (Rust); None: anything."""
    if names is True or names == {}:
        return None
    if names is False:
        return "^[^\\s\\S]$"
    if not isinstance(names, dict):
        raise walker.invalid("propertyNames must be a schema", pointer)
    asserted = {k: v for k, v in names.items() if k not in ANNOTATIONS and not (k == "type" and v == "string")}
    if not asserted:
        return None
    part = walker.node(asserted, pointer, "")
    if set(part) == {"pattern"}:
        return str(part["pattern"])
    if set(part) <= {"minLength", "maxLength"}:
        return f"^(?s:.){{{part.get('minLength', 0)},{part.get('maxLength', '')}}}$"
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if values is not None and len(part) == 1:
        strings = [v for v in values if isinstance(v, str)]
        quoted = ("".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text) for text in strings)
        return f"^(?:{'|'.join(quoted)})$" if strings else "^[^\\s\\S]$"
    raise Unrewritable(f"propertyNames with {', '.join(map(repr, asserted))}")


def _dependent_required(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    for name, wanted in walker.schema_map(value, pointer).items():
        if not isinstance(wanted, list) or not all(isinstance(other, str) for other in wanted):
            raise walker.invalid("must be a list of property names", f"{pointer}/{escape(name)}")
        if wanted:
            walker.conjunct(out, rewrite_dependency(name, wanted), f"{pointer}/{escape(name)}", base)


def _dependent_schemas(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    for name, wanted in walker.schema_map(value, pointer).items():
        if wanted is not True and wanted != []:
            walker.conjunct(out, rewrite_dependency(name, wanted), f"{pointer}/{escape(name)}", base)


def _unevaluated_properties(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    walker.conjunct(out, rewrite_unevaluated_properties(schema, walker.resolver(pointer, base)), pointer, base)


def _skip(walker: Walker, out: Node, schema: Node, value: Any, pointer: str, base: str) -> None:
    """Read by the handler of another keyword."""


HANDLERS: dict[str, Handler] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "$ref": _ref,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "then": _skip,
    "else": _skip,
    "minimum": _bound,
    "maximum": _bound,
    "exclusiveMinimum": _bound,
    "exclusiveMaximum": _bound,
    "multipleOf": _multiple_of,
    "minLength": _count,
    "maxLength": _count,
    "pattern": _pattern,
    "format": _format,
    "items": _items,
    "additionalItems": _skip,
    "prefixItems": _prefix_items,
    "minItems": _count,
    "maxItems": _count,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "minContains": _skip,
    "maxContains": _skip,
    "unevaluatedItems": _unevaluated_items,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "required": _required,
    "minProperties": _min_properties,
    "maxProperties": _count,
    "propertyNames": _property_names,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "dependencies": _dependent_schemas,
    "unevaluatedProperties": _unevaluated_properties,
}
"""Every keyword that is enforced."""
