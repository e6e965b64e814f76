"""What each keyword of JSON Schema becomes. See `schema` for what the whole promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
from radixcast.actors.grammar.schema_refs import escape
from radixcast.actors.grammar.schema_unevaluated import rewrite_unevaluated_items, rewrite_unevaluated_properties

if TYPE_CHECKING:
    from radixcast.actors.grammar.schema_walk import Walker

Node = dict[str, Any]
Handler = Callable[["Walker", Node, Node, Any, str, str], None]
"""(walker, out, schema, value, pointer of the keyword, base URI)"""


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
