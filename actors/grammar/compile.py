"""From a constraint to what enforces it: the one entry, whatever the kind. Whatever goes wrong in a backend is a GrammarError.

Which backend: llguidance, except that a regular expression takes outlines-core's automaton where the prover's worker has
left one in the run folder (it does when that was made within its budget of time and memory, see `prover`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from radixcast.actors.grammar.choices import choices_regex
from radixcast.actors.grammar.interface import Compiled, GrammarError
from radixcast.actors.grammar.llg import compile_ebnf, compile_json_schema, compile_regex_llg, compile_structural_tag
from radixcast.actors.grammar.outlines_backend import OutlinesCompiled
from radixcast.actors.grammar.outlines_index import index_file, load
from radixcast.actors.grammar.regex import normalize
from radixcast.actors.grammar.unwritable import unwritable
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.errors import RequestError
from radixcast.protocols.grammar import GrammarSpec


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary, *, run_dir: str | Path | None = None) -> Compiled:
    """Compile in this thread, without a deadline; a result allows at least one token.

    `run_dir`: where automata may lie (None: don't look). Raises GrammarError for everything that can be wrong, panics of
    native code included.
    """
    try:
        compiled = _compile(spec, vocabulary, run_dir)
        _check_start(compiled, vocabulary, spec)
        return compiled
    except RequestError:
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except (RecursionError, MemoryError, OverflowError) as error:
        raise GrammarError(
            f"the {what(spec)} is too large or nested too deep ({type(error).__name__})", code="grammar_too_large"
        ) from None
    except BaseException as error:  # a panic in Rust is no Exception
        raise GrammarError(f"the {what(spec)} can't be compiled: {_first_line(error)}", code=_CODES[spec.kind]) from None


def wants_outlines(spec: GrammarSpec) -> bool:
    """Whether an automaton of outlines-core is worth a try."""
    return spec.kind == "regex" and spec.backend != "llguidance"


def what(spec: GrammarSpec) -> str:
    """The kind in words."""
    return {"regex": "regular expression", "json_schema": "JSON schema", "ebnf": "grammar"}.get(spec.kind, spec.kind)


_CODES = {
    "json_schema": "invalid_schema",
    "regex": "invalid_regex",
    "ebnf": "invalid_grammar",
    "structural_tag": "invalid_grammar",
    "choices": "invalid_grammar",
}


def _compile(spec: GrammarSpec, vocabulary: Vocabulary, run_dir: str | Path | None) -> Compiled:
    match spec.kind:
        case "json_schema":
            return compile_json_schema(spec, vocabulary)
        case "ebnf":
            return compile_ebnf(spec, vocabulary)
        case "structural_tag":
            return compile_structural_tag(spec, vocabulary)
        case "choices":
            return compile_regex_llg(choices_regex(spec.text, vocabulary), vocabulary)
        case "regex":
            if run_dir is not None and wants_outlines(spec):
                automaton = load(index_file(run_dir, spec.key), vocabulary.rows)
                if automaton is not None:
                    return OutlinesCompiled(automaton, vocabulary)
            return compile_regex_llg(normalize(spec.text, spec.max_tokens, unwritable(vocabulary)), vocabulary)


def _check_start(compiled: Compiled, vocabulary: Vocabulary, spec: GrammarSpec) -> None:
    """A grammar that allows no first token, or takes too long to find it, is of no use."""
    matcher = compiled.matcher()
    mask_W = np.zeros(vocabulary.words, dtype=np.int32)
    matcher.fill(mask_W)
    if matcher.error:
        raise GrammarError(f"the {what(spec)} is too large: {matcher.error}", code="grammar_too_large")
    if not mask_W.any():
        code = "unsatisfiable_schema" if spec.kind == "json_schema" else _CODES[spec.kind]
        raise GrammarError(f"no output can match the {what(spec)}", code=code)


def _first_line(error: BaseException) -> str:
    return (str(error).split("\n", 1)[0] or type(error).__name__)[:300]
