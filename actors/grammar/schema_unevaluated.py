"""unevaluatedProperties and unevaluatedItems where what is evaluated can be told from the schema alone.

Conditional applicators (anyOf, if, …) evaluate depending on the value: those are refused.
"""

from __future__ import annotations

from typing import Any

from radixcast.actors.grammar.schema_negate import Resolve, Unrewritable

_CONDITIONAL = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")


def rewrite_unevaluated_properties(schema: dict[str, Any], resolve: Resolve) -> Any:
    """As additionalProperties of a schema that names all evaluated properties; True when there are none left."""
    rest = schema["unevaluatedProperties"]
    names: dict[str, Any] = {}
    patterns: dict[str, Any] = {}
    for part in _parts(schema, resolve, "unevaluatedProperties"):
        if "additionalProperties" in part or (part is not schema and "unevaluatedProperties" in part):
            return True
        names |= dict.fromkeys(part.get("properties", {}), True)
        patterns |= dict.fromkeys(part.get("patternProperties", {}), True)
    if rest is True:
        return True
    return {"properties": names, "patternProperties": patterns, "additionalProperties": rest}


def rewrite_unevaluated_items(schema: dict[str, Any], resolve: Resolve) -> Any:
    """As items after the longest evaluated prefix; True when all items are evaluated."""
    rest = schema["unevaluatedItems"]
    longest = 0
    for part in _parts(schema, resolve, "unevaluatedItems"):
        if "contains" in part:
            raise Unrewritable("unevaluatedItems with contains")
        items = part.get("items")
        if isinstance(items, list):
            longest = max(longest, len(items))
            if "additionalItems" in part:
                return True
        elif "items" in part or (part is not schema and "unevaluatedItems" in part):
            return True
        longest = max(longest, len(part.get("prefixItems", ())))
    if rest is True:
        return True
    return {"prefixItems": [True] * longest, "items": rest} if longest else {"items": rest}


def _parts(schema: dict[str, Any], resolve: Resolve, keyword: str) -> list[dict[str, Any]]:
    """The schema and all that apply to the same value through allOf and $ref."""
    found: list[dict[str, Any]] = []
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or any(part is other for other in found):
            continue
        if conditional := next((name for name in _CONDITIONAL if name in part), None):
            raise Unrewritable(f"{keyword} beside {conditional}")
        if "$ref" in part:
            waiting.append(resolve(part["$ref"]))
        if isinstance(part.get("allOf"), list):
            waiting.extend(part["allOf"])
        found.append(part)
    return found
