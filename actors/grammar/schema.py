"""Which JSON Schemas can be enforced, and the same schema in the dialect that llguidance enforces completely.

The walk has an allow-list: each keyword is enforced as it stands, rewritten exactly (`schema_negate`), known to be an
annotation, or refused with the pointer of its place. The result has only keywords of that list, references into its own
`$defs` and no identifiers, so nothing in a client's schema can reach llguidance's own options (`x-guidance`).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.schema_live import check_live
from radixcast.actors.grammar.schema_refs import children
from radixcast.actors.grammar.schema_walk import Walker
from radixcast.protocols.limits import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH

ANY_JSON = "$$ANY$$"
"""SGLang's text for any JSON value."""

_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_BOUNDS = tuple((f"min{noun}", f"max{noun}") for noun in ("imum", "Length", "Items", "Properties"))
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)


class AdmittedSchema(NamedTuple):
    """A schema that can be enforced."""

    text: str
    """JSON for llguidance; properties in the client's order."""
    warnings: tuple[str, ...]
    """What is ignored, with its place."""
    constants: tuple[tuple[str, str], ...]
    """(pointer, string) of each text that an output may have to contain literally."""
    one_of: bool
    """Some oneOf is left to llguidance, which must prove it disjoint; `admit(..., expand_one_of=True)` rewrites them."""
    unicode_escapes: bool
    """Strings may hold \\uXXXX. Not where an object is open: llguidance would take an escaped name for another property."""


def admit(text: str, *, lenient: bool, expand_one_of: bool = False) -> AdmittedSchema:
    """Check a schema's JSON text. `lenient`: keywords that can't be enforced are ignored with a warning.

    Raises GrammarError: grammar_too_large, invalid_schema, unsupported_schema_keyword, invalid_regex or unsatisfiable_schema,
    with a JSON pointer in `param`.
    """
    return admit_value(parse(text), lenient=lenient, expand_one_of=expand_one_of)


def admit_value(schema: Any, *, lenient: bool, expand_one_of: bool = False) -> AdmittedSchema:
    """The same for a schema that `parse` has read."""
    walker = Walker(schema, lenient=lenient, expand_one_of=expand_one_of)
    admitted = walker.run()
    check_live(admitted)
    try:
        written = json.dumps({} if admitted is True else admitted, ensure_ascii=False, allow_nan=False)
        written.encode("utf-8")
    except UnicodeEncodeError:
        raise GrammarError("the schema holds half a surrogate pair", code="invalid_schema", param="") from None
    if walker.open_objects and (place := next((p for p, text in walker.constants if _CONTROL.search(text)), None)) is not None:
        message = "a control character in a constant can't be written where an object has additionalProperties"
        raise GrammarError(message, code="unsupported_schema_keyword", param=place)
    warnings, constants = tuple(walker.warnings), tuple(walker.constants)
    return AdmittedSchema(written, warnings, constants, walker.kept_one_of, not walker.open_objects)


def locate_empty(schema: Any) -> str:
    """Pointer of the first subschema whose bounds exclude each other; the document's root when there is none."""
    waiting = [(schema, "")]
    while waiting:
        part, pointer = waiting.pop()
        if not isinstance(part, dict):
            continue
        for least, most in _BOUNDS:
            low, high = part.get(least), part.get(most)
            if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
                return f"{pointer}/{least}"
        waiting.extend(children(part, pointer))
    return ""


def parse(text: str) -> Any:
    """JSON text -> value. Raises GrammarError: invalid_schema or grammar_too_large."""
    if text.strip() == ANY_JSON:
        return True
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the schema has {size} bytes; at most {MAX_GRAMMAR_BYTES}", code="grammar_too_large", param="")
    if _depth(text) > MAX_GRAMMAR_DEPTH:
        raise GrammarError(f"the schema nests deeper than {MAX_GRAMMAR_DEPTH}", code="grammar_too_large", param="")
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}", code="invalid_schema", param="") from None


def _depth(text: str) -> int:
    deepest = depth = 0
    for c in re.findall(r"[\[\]{}]", _STRINGS.sub("", text)):
        depth += 1 if c in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value
