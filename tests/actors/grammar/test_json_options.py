"""White space of JSON: as much as a pretty printer makes of what the schema can hold, and no more."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fakes.grammar_walks import accepts
from radixcast.actors.grammar.json_options import nesting, pretty
from radixcast.actors.grammar.llg import compile_json_schema
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.grammar import GrammarSpec


def boxed(levels: int) -> tuple[dict[str, Any], Any]:
    """A schema of objects in objects, and its one kind of instance."""
    schema: dict[str, Any] = {"type": "integer"}
    value: Any = 1
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
        value = {"a": value}
    return schema, value


RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "depth"),
    [
        (True, 0),
        ({"type": "integer"}, 0),
        (boxed(1)[0], 1),
        (boxed(5)[0], 5),
        ({"type": "array", "items": {"type": "array", "items": {}}}, 2),
        ({"anyOf": [boxed(2)[0], {"$ref": "#/$defs/x"}], "$defs": {"x": boxed(3)[0]}}, 3),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, 0),
        (RECURSIVE, 12),
    ],
)
def test_nesting(schema: Any, depth: int) -> None:
    assert nesting(schema, 12) == depth


def test_a_flat_object_has_short_runs_and_a_deep_one_has_room() -> None:
    assert re.fullmatch(pretty(boxed(1)[0]), "\n" + 15 * " ")
    assert not re.fullmatch(pretty(boxed(1)[0]), "\n" + 16 * " ")
    assert re.fullmatch(pretty(RECURSIVE), "\n" + 48 * " ")


@pytest.mark.parametrize("levels", [1, 3, 6, 11])
@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_what_a_pretty_printer_makes_is_accepted(vocabulary: Vocabulary, levels: int, indent: int | str | None) -> None:
    schema, value = boxed(levels)
    made = compile_json_schema(GrammarSpec(kind="json_schema", text=json.dumps(schema)), vocabulary)
    assert accepts(made, vocabulary, json.dumps(value, indent=indent))
