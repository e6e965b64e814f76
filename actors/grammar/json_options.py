"""How JSON is written: white space and escapes, as llguidance is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.schema import AdmittedSchema
from radixcast.actors.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

PRETTY = r"( |\n( {0,48}|\t{0,16}))?"
"""White space between JSON tokens: nothing, a blank, or one line break and its indentation."""


def json_options(whitespace: str, admitted: AdmittedSchema) -> JsonCompileOptions:
    """llguidance's JSON options for `GrammarSpec.whitespace`."""
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": whitespace != "compact"}
    if whitespace != "compact":
        options["whitespace_pattern"] = PRETTY if whitespace == "flexible" else whitespace
    if not admitted.unicode_escapes:
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return options


def check_spelling(admitted: AdmittedSchema, vocabulary: Vocabulary) -> None:
    """Raise GrammarError when the vocabulary can't write one of the schema's constants."""
    for pointer, text in admitted.constants:
        if not vocabulary.can_spell(text):
            message = f"the model's vocabulary has no tokens for the constant at {pointer}"
            raise GrammarError(message, code="unsatisfiable_schema", param=pointer)
