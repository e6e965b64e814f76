"""Where the references of a JSON Schema point: identifiers, anchors and JSON pointers inside one document.

Nothing is ever fetched: a reference that leaves the document is an error. Bases follow RFC 3986 and `$id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from radixcast.actors.grammar.interface import GrammarError

SUBSCHEMA = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
"""Keywords whose value is a schema (`items` may also be a list of them)."""

SUBSCHEMA_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
SUBSCHEMA_MAPS = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))


class Target(NamedTuple):
    """What a reference points at."""

    schema: Any
    pointer: str
    """From the document's root."""
    base: str


def escape(part: str | int) -> str:
    """One step of a JSON pointer."""
    return str(part).replace("~", "~0").replace("/", "~1")


def children(schema: dict[str, Any], pointer: str) -> Iterator[tuple[Any, str]]:
    """The subschemas of one schema, with their pointers (values that are no schemas are left out)."""
    for keyword, value in schema.items():
        here = f"{pointer}/{escape(keyword)}"
        if keyword in SUBSCHEMA and isinstance(value, dict):
            yield value, here
        elif keyword in SUBSCHEMA_LISTS and isinstance(value, list):
            yield from ((item, f"{here}/{i}") for i, item in enumerate(value))
        elif keyword in SUBSCHEMA_MAPS and isinstance(value, dict):
            yield from ((item, f"{here}/{escape(name)}") for name, item in value.items())


class References:
    """Index of one document's identifiers."""

    def __init__(self, document: Any) -> None:
        self._resources: dict[str, Target] = {}
        self._anchors: dict[tuple[str, str], Target] = {}
        self._bases: dict[int, str] = {}
        self._resources[""] = Target(document, "", self._own_base(document, ""))
        self._index(document)

    def base_of(self, schema: Any, default: str) -> str:
        """The URI that references in `schema` are relative to."""
        return self._bases.get(id(schema), default)

    def resolve(self, reference: str, base: str, pointer: str) -> Target:
        """Follow `reference`, met at `pointer`. Raises GrammarError when it leaves the document or points at nothing."""
        if reference.startswith("#"):
            url, fragment = base, reference[1:]
        else:
            url, fragment = urldefrag(urljoin(base, reference))
        resource = self._resources.get(url)
        if resource is None:
            message = f"$ref {reference[:200]!r}: only references inside the schema can be followed"
            raise GrammarError(message, code="unsupported_schema_keyword", param=pointer)
        fragment = unquote(fragment)
        if not fragment:
            return resource
        found = self._walk(resource, fragment) if fragment.startswith("/") else self._anchors.get((url, fragment))
        if found is None:
            raise GrammarError(f"$ref {reference[:200]!r} points at nothing", code="invalid_schema", param=pointer)
        return found

    def _index(self, document: Any) -> None:
        waiting = [(document, "", "")]
        while waiting:
            schema, pointer, outer = waiting.pop()
            if not isinstance(schema, dict):
                continue
            base = self._own_base(schema, outer)
            self._bases[id(schema)] = base
            if base != outer or not pointer:
                self._resources.setdefault(base, Target(schema, pointer, base))
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(keyword), str):
                    self._anchors.setdefault((base, anchor), Target(schema, pointer, base))
            if isinstance(old := schema.get("$id", schema.get("id")), str) and old.startswith("#"):
                self._anchors.setdefault((base, old[1:]), Target(schema, pointer, base))
            waiting.extend((child, place, base) for child, place in children(schema, pointer))

    @staticmethod
    def _own_base(schema: Any, outer: str) -> str:
        if isinstance(schema, dict):
            for keyword in ("$id", "id"):
                if isinstance(found := schema.get(keyword), str) and not found.startswith("#"):
                    return urldefrag(urljoin(outer, found)).url
        return outer

    def _walk(self, start: Target, fragment: str) -> Target | None:
        value, base, pointer = start.schema, start.base, start.pointer
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
            pointer += f"/{escape(key)}"
            base = self._bases.get(id(value), base)
        return Target(value, pointer, base)
