"""How JSON is written: white space and escapes, as llguidance is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.schema import AdmittedSchema
from radixcast.actors.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

INDENT_STEP = 4
"""Blanks a level that the usual pretty printers make at most."""
INDENT_BLANKS = (15, 48)
"""Least and most blanks behind a line break: a model that loops on blanks wastes no more than a shallow schema needs, and a
schema that nests deeper, or without end, gets the room that its pretty-printed form takes."""
INDENT_TABS = 15
_MOST_NODES = 4096
"""Parts of a schema that are looked at for its depth; one that has more counts as deep."""


def pretty(schema: Any) -> str:
    """The white space between the JSON tokens of an instance: nothing, a blank, or one line break and its indentation."""
    least, most = INDENT_BLANKS
    blanks = min(max(INDENT_STEP * nesting(schema, most // INDENT_STEP), least), most)
    return rf"( |\n( {{0,{blanks}}}|\t{{0,{INDENT_TABS}}}))?"


def nesting(schema: Any, most: int) -> int:
    """How deep the objects and arrays of an instance nest at most by what the schema spells out; `most` at most, and for
    recursion. What an open schema lets a model add beyond that is not counted."""
    level, depth, seen, looked = [schema], 0, 0, set[tuple[int, int]]()
    while level and depth < most:
        here, below = list(level), list[Any]()
        while here:
            part = here.pop()
            seen += 1
            if seen > _MOST_NODES:
                return most
            if not isinstance(part, dict) or (id(part), depth) in looked:
                continue
            looked.add((id(part), depth))
            same, inner = _parts(part, schema)
            here += same
            below += inner
        level = below
        depth += bool(below)
    return depth


_INNER_MAPS = ("properties", "patternProperties", "dependentSchemas")
_INNER = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "prefixItems")
_SAME = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not")


def _parts(part: dict[str, Any], root: Any) -> tuple[list[Any], list[Any]]:
    """Subschemas of the same instance, and of what it holds."""
    same = [s for key in _SAME for s in _listed(part.get(key))]
    inner = [s for key in _INNER for s in _listed(part.get(key))]
    for key in _INNER_MAPS:
        if isinstance(members := part.get(key), dict):
            inner += members.values()
    if isinstance(ref := part.get("$ref"), str) and ref.startswith("#"):
        same.append(_resolve(ref, root))
    return same, inner


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _resolve(ref: str, root: Any) -> Any:
    for name in ref[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdigit() and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, dict):
            root = root.get(name)
        else:
            return None
    return root


def json_options(whitespace: str, admitted: AdmittedSchema) -> JsonCompileOptions:
    """llguidance's JSON options for `GrammarSpec.whitespace`."""
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": whitespace != "compact"}
    if whitespace != "compact":
        options["whitespace_pattern"] = pretty(json.loads(admitted.text)) if whitespace == "flexible" else whitespace
    if not admitted.unicode_escapes:
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return options


def check_spelling(admitted: AdmittedSchema, vocabulary: Vocabulary) -> None:
    """Raise GrammarError when the vocabulary can't write one of the schema's constants."""
    for pointer, text in admitted.constants:
        if not vocabulary.can_spell(text):
            message = f"the model's vocabulary has no tokens for the constant at {pointer}"
            raise GrammarError(message, code="unsatisfiable_schema", param=pointer)
