"""Whether a normalised schema accepts any finite document: no reference may lead back to itself without entering a value,
and no property or item that must be there may need itself. Necessary conditions only; the rest is found when it compiles.
"""

from __future__ import annotations

from typing import Any

from radixcast.actors.grammar.interface import GrammarError

_SCALARS = frozenset(("null", "boolean", "number", "integer", "string"))
_PREFIX = "#/$defs/"


def check_live(schema: Any) -> None:
    """`schema` has all its references in `$defs` of the root. Raises GrammarError: unsatisfiable_schema or invalid_schema."""
    if not isinstance(schema, dict):
        if schema is False:
            raise GrammarError("nothing matches the schema false", code="unsatisfiable_schema", param="")
        return
    definitions: dict[str, Any] = schema.get("$defs", {})
    _check_loops(definitions)
    alive: set[str] = set()
    while found := {name for name, part in definitions.items() if name not in alive and _live(part, alive)}:
        alive |= found
    if not _live(schema, alive):
        raise GrammarError("no finite document matches this schema", code="unsatisfiable_schema", param="")


def _target(schema: dict[str, Any]) -> str | None:
    reference = schema.get("$ref")
    return reference.removeprefix(_PREFIX) if isinstance(reference, str) else None


def _in_place(schema: Any) -> set[str]:
    """Definitions that apply to the same value as `schema`."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if name := _target(part):
                found.add(name)
            for keyword in ("allOf", "anyOf", "oneOf"):
                waiting.extend(part.get(keyword, ()))
    return found


def _check_loops(definitions: dict[str, Any]) -> None:
    edges = {name: _in_place(part) for name, part in definitions.items()}
    state: dict[str, int] = {}
    for start in edges:
        stack = [(start, iter(sorted(edges[start])))] if start not in state else []
        state.setdefault(start, 1)
        while stack:
            name, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                state[name] = 2
                stack.pop()
            elif state.get(following) == 1:
                raise GrammarError("a $ref leads back to itself", code="unsatisfiable_schema", param="")
            elif following not in state:
                state[following] = 1
                stack.append((following, iter(sorted(edges[following]))))


def _live(schema: Any, alive: set[str]) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    if (name := _target(schema)) and name not in alive:
        return False
    if not all(_live(part, alive) for part in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_live(part, alive) for part in schema[keyword]):
            return False
    kinds = schema.get("type")
    named = {kinds} if isinstance(kinds, str) else set(kinds or ())
    if "enum" in schema or "const" in schema or not named or named & _SCALARS:
        return True
    return ("object" in named and _live_object(schema, alive)) or ("array" in named and _live_array(schema, alive))


def _live_object(schema: dict[str, Any], alive: set[str]) -> bool:
    properties = schema.get("properties", {})
    return all(_live(properties[name], alive) for name in schema.get("required", ()) if name in properties)


def _live_array(schema: dict[str, Any], alive: set[str]) -> bool:
    least = int(schema.get("minItems", 0))
    prefix = schema.get("prefixItems", [])
    if not all(_live(part, alive) for part in prefix[:least]):
        return False
    return least <= len(prefix) or _live(schema.get("items", True), alive)
