"""Keywords that a generator can't enforce directly, written as ones that it can.

`negate` turns a schema into one that holds exactly where the other does not. `rewrite_*` express a keyword by others. All
work on raw schemas and are exact; what has no exact form raises Unrewritable.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from radixcast.actors.grammar.schema_pattern import none_of

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
_MAX_NEGATED_STRINGS = 256
_MAX_NEGATED_OPTIONS = 8
_MAX_PERMUTED = 5

ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$dynamicAnchor",
        "$defs",
        "definitions",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "then",
        "else",
        "nullable",
        "discriminator",
    )
)
"""Keywords that say nothing about validity by themselves."""


class Unrewritable(Exception):
    """There is no exact form; the text names what stands in the way."""


Resolve = Callable[[str], Any]
"""The schema that a `$ref` text points at."""


def negate(schema: Any, resolve: Resolve, depth: int = 0) -> Any:
    """A schema of exactly the instances that `schema` does not accept."""
    if depth > 16:
        raise Unrewritable("a negation nested more than 16 deep")
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        raise Unrewritable("a value that is no schema")
    options: list[Any] = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        options += _negate_keyword(schema, keyword, value, resolve, depth)
    options = [option for option in options if option is not False]
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": options}


def _negate_keyword(schema: dict[str, Any], keyword: str, value: Any, resolve: Resolve, depth: int) -> list[Any]:
    def inner(other: Any) -> Any:
        return negate(other, resolve, depth + 1)

    match keyword:
        case "type":
            return [other_types(value)]
        case "const":
            return [not_values([value])]
        case "enum":
            return [not_values(value)]
        case "not":
            return [value]
        case "allOf":
            return [inner(part) for part in value]
        case "anyOf":
            return [{"allOf": [inner(part) for part in value]}]
        case "oneOf" if len(value) <= _MAX_NEGATED_OPTIONS:
            none = {"allOf": [inner(part) for part in value]}
            return [none, *({"allOf": list(pair)} for pair in itertools.combinations(value, 2))]
        case "$ref":
            return [inner(resolve(value))]
        case "if":
            then, other = schema.get("then", True), schema.get("else", True)
            return [{"allOf": [value, inner(then)]}, {"allOf": [inner(value), inner(other)]}]
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties":
            return [{"type": "object", "required": [name], "properties": {name: inner(part)}} for name, part in value.items()]
    return [_negate_bound(keyword, value)]


def _negate_bound(keyword: str, value: Any) -> Any:
    opposite = {
        "minimum": ("number", "exclusiveMaximum"),
        "maximum": ("number", "exclusiveMinimum"),
        "exclusiveMinimum": ("number", "maximum"),
        "exclusiveMaximum": ("number", "minimum"),
    }
    counts = {"Length": "string", "Items": "array", "Properties": "object"}
    if keyword in opposite and not isinstance(value, bool):
        kind, other = opposite[keyword]
        return {"type": kind, other: value}
    side, noun = keyword[:3], keyword[3:]
    if side in ("min", "max") and noun in counts and isinstance(value, (int, float)):
        bound = int(value) + (-1 if side == "min" else 1)
        if bound < 0:
            return False
        return {"type": counts[noun], f"{'max' if side == 'min' else 'min'}{noun}": bound}
    raise Unrewritable(f"the negation of {keyword!r}")


def other_types(value: Any) -> Any:
    """The complement of a `type`."""
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not all(name in TYPES for name in named):
        raise Unrewritable("a type that does not exist")
    if "integer" in named and "number" not in named:
        raise Unrewritable("the negation of type 'integer'")
    rest = [name for name in TYPES if name not in named and name != "integer"]
    return {"type": rest} if rest else False


def not_values(values: Any) -> Any:
    """Everything but these values (scalars only)."""
    if not isinstance(values, list):
        raise Unrewritable("an enum that is no list")
    strings = [v for v in values if isinstance(v, str)]
    numbers = sorted({v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)})
    if any(isinstance(v, (list, dict)) for v in values):
        raise Unrewritable("the negation of objects and arrays")
    if len(strings) > _MAX_NEGATED_STRINGS or len(numbers) > _MAX_NEGATED_STRINGS:
        raise Unrewritable(f"the negation of more than {_MAX_NEGATED_STRINGS} values")
    options: list[Any] = [{"type": ["object", "array"]}]
    if not any(v is None for v in values):
        options.append({"type": "null"})
    flags = [flag for flag in (False, True) if not any(v is flag for v in values)]
    if flags:
        options.append({"type": "boolean", "enum": flags} if len(flags) == 1 else {"type": "boolean"})
    options.append({"type": "string", "pattern": none_of(strings)} if strings else {"type": "string"})
    if not numbers:
        return {"anyOf": [*options, {"type": "number"}]}
    options.append({"type": "number", "exclusiveMaximum": numbers[0]})
    for low, high in itertools.pairwise(numbers):
        options.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    options.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return {"anyOf": options}


def rewrite_one_of(options: list[Any], resolve: Resolve) -> Any:
    """Exactly one of: any of them, each without all the others."""
    others = [negate(option, resolve) for option in options]
    return {
        "anyOf": [{"allOf": [option, *(other for j, other in enumerate(others) if j != i)]} for i, option in enumerate(options)]
    }


def rewrite_if(schema: dict[str, Any], resolve: Resolve) -> Any:
    """if/then/else; True when it says nothing."""
    condition, then, other = schema["if"], schema.get("then", True), schema.get("else", True)
    if then is True and other is True:
        return True
    return {"anyOf": [{"allOf": [condition, then]}, {"allOf": [negate(condition, resolve), other]}]}


def rewrite_dependency(name: str, wanted: Any) -> Any:
    """An object with the property `name` also has the properties, or matches the schema, that is `wanted`."""
    if isinstance(wanted, list):
        return {"anyOf": [{"properties": {name: False}}, {"required": [name, *wanted]}]}
    return {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, wanted]}]}


def rewrite_unique(schema: dict[str, Any]) -> Any:
    """uniqueItems, where the items are a few constants or there is at most one; True when nothing is left to say."""
    most = schema.get("maxItems")
    if isinstance(most, (int, float)) and most <= 1:
        return True
    items = schema.get("items")
    if isinstance(items, dict):
        values = items.get("enum", [items["const"]] if "const" in items else None)
        if values is None and items.get("type") == "boolean":
            values = [False, True]
        if values is None and items.get("type") == "null":
            values = [None]
        if isinstance(values, list):
            distinct = list({json.dumps(v, sort_keys=True): v for v in values}.values())
            if len(distinct) <= _MAX_PERMUTED and not any(isinstance(v, (float, list, dict)) for v in distinct):
                return _permutations(distinct)
    raise Unrewritable("uniqueItems, unless the items are an enum of at most 5 values or maxItems is 1,")


def _permutations(values: list[Any]) -> Any:
    options: list[Any] = [{"type": "array", "maxItems": 0}]
    options += [
        {"type": "array", "prefixItems": [{"const": v} for v in chosen], "items": False, "minItems": length}
        for length in range(1, len(values) + 1)
        for chosen in itertools.permutations(values, length)
    ]
    return {"anyOf": [{"type": ["null", "boolean", "object", "number", "string"]}, *options]}


def rewrite_contains(schema: dict[str, Any]) -> Any:
    """contains, for arrays of at most 16 items; True when it says nothing."""
    least = schema.get("minContains", 1)
    if least == 0 and "maxContains" not in schema:
        return True
    most = schema.get("maxItems")
    if least == 1 and "maxContains" not in schema and isinstance(most, (int, float)) and most <= 16:
        wanted = schema["contains"]
        options = [{"type": "array", "prefixItems": [True] * i + [wanted], "minItems": i + 1} for i in range(int(most))]
        return {"anyOf": [{"type": ["null", "boolean", "object", "number", "string"]}, *options]}
    raise Unrewritable("contains, unless maxItems is at most 16,")
