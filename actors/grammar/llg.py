"""Grammars enforced by llguidance: an Earley parser over a derivative lexer, walked through the vocabulary's trie.

llguidance never raises for a grammar: it goes into an error state and stays there, so that state is polled after each call
that can enter it. A matcher here never lets it see an EOS id (whether the output may end is our question, not its) and takes
bits of control tokens out of each mask.
"""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np

from radixcast.actors.grammar.ebnf import to_lark
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.json_options import check_spelling, json_options
from radixcast.actors.grammar.schema import AdmittedSchema, admit_value, locate_empty, parse
from radixcast.actors.grammar.structural_tag import tags_to_lark
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.limits import MAX_GRAMMAR_BYTES


class LlguidanceCompiled:
    """A grammar that llguidance has compiled, with one matcher at its start to copy from."""

    def __init__(self, grammar: str, vocabulary: Vocabulary, *, code: str) -> None:
        """`grammar`: llguidance's own form. Raises GrammarError with `code`, or unsatisfiable_schema for an empty language."""
        limits = llguidance.LLParserLimits(verbose_errors=False)
        self.vocabulary = vocabulary
        start = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if start.is_error():
            raise GrammarError(_reason(start.get_error()), code=_code(start.get_error(), code))
        self.nbytes = (2 << 20) + 64 * len(grammar)
        # Its mask comes with every copy: the first one of a large grammar takes longer than a step may.
        self._first = first = LlguidanceMatcher(start, vocabulary)
        allowed = first.allowed()
        if first.error or not allowed.any():
            raise GrammarError(first.error or "nothing matches this grammar", code=_empty_code(code))
        if not first.complete and not (allowed & ~vocabulary.eos_bits).any():
            raise GrammarError("nothing matches this grammar", code=_empty_code(code))

    def matcher(self) -> LlguidanceMatcher:
        """A matcher at the start of the output."""
        return self._first.fork()


class LlguidanceMatcher:
    """The state of one output. Not thread-safe; different matchers of one grammar may be used by different threads."""

    def __init__(self, state: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._state = state
        self._vocabulary = vocabulary
        self._ended = False
        self._mask: Int32Array | None = None
        self._error = ""

    def fill(self, mask_W: Int32Array) -> None:
        """Write the tokens that may come next (int32 [words]); all zero after the end, in a dead end and after an error."""
        mask_W[:] = self.allowed()

    def allowed(self) -> Int32Array:
        """The mask of `fill` (int32 [words]), computed once per state; not to be written to."""
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and no change, when it is not allowed."""
        if self._ended or self.error:
            return False
        if token in self._vocabulary.eos_ids:
            self._ended = self.complete
            self._mask = None if self._ended else self._mask
            return self._ended
        if not 0 <= token < self._vocabulary.rows or _bit(self._vocabulary.never_bits, token):
            return False
        if self._state.try_consume_tokens([token]) != 1:
            return False
        self._mask = None
        return True

    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` accepted tokens."""
        if tokens <= 0:
            return
        self._mask = None
        if self._ended:
            self._ended = False
            tokens -= 1
        if tokens and not self._state.rollback(tokens):
            self._error = self._error or "can't take back more tokens than were accepted"

    def fork(self) -> LlguidanceMatcher:
        """An independent copy."""
        copy = LlguidanceMatcher(self._state.deep_copy(), self._vocabulary)
        copy._ended, copy._error, copy._mask = self._ended, self._error, self._mask
        return copy

    def forced(self, limit: int) -> list[int]:
        """At most `limit` canonical tokens that must come next."""
        if limit <= 0 or self._ended or self.error or self._state.is_stopped():
            return []
        vocabulary = self._vocabulary
        forced: list[int] = []
        for token in self._state.compute_ff_tokens()[:limit]:
            if token in vocabulary.eos_ids or token >= vocabulary.rows or _bit(vocabulary.never_bits, token):
                break
            forced.append(token)
        return forced

    @property
    def complete(self) -> bool:
        """The output may end here."""
        return self._ended or (not self.error and self._state.is_accepting())

    @property
    def finished(self) -> bool:
        """The output must end here."""
        if self._ended:
            return True
        if not self.complete:
            return False
        return self._state.is_stopped() or not (self.allowed() & ~self._vocabulary.eos_bits).any()

    @property
    def error(self) -> str:
        """Why the matcher can't go on; empty: it can."""
        if not self._error and self._state.is_error():
            self._error = _reason(self._state.get_error())
        return self._error

    def _compute(self) -> Int32Array:
        vocabulary = self._vocabulary
        wide = np.zeros((vocabulary.tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        if self._ended or self.error:
            return np.zeros(vocabulary.words, dtype=np.int32)
        if self._state.is_stopped():
            mask = np.zeros(vocabulary.words, dtype=np.int32)
        else:
            self._state.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
            mask = wide[: vocabulary.words]
            if self._state.is_error():
                mask[:] = 0
        if tail := vocabulary.rows % 32:
            mask[-1] &= np.int32((1 << tail) - 1)
        mask &= ~(vocabulary.never_bits | vocabulary.eos_bits)
        if self.complete:
            mask |= vocabulary.eos_bits
        return mask


def compile_json_schema(spec: GrammarSpec, vocabulary: Vocabulary) -> LlguidanceCompiled:
    """A `json_schema` spec. Raises GrammarError: unsupported_schema_keyword, invalid_schema, unsatisfiable_schema or
    grammar_too_large, with a JSON pointer in `param`."""
    document = parse(spec.text)
    admitted = admit_value(document, lenient=spec.lenient)
    try:
        return compile_admitted(admitted, spec.whitespace, vocabulary)
    except GrammarError as error:
        if not (admitted.one_of and "oneOf" in str(error)):
            raise _placed(error, document) from None
    expanded = admit_value(document, lenient=spec.lenient, expand_one_of=True)
    try:
        return compile_admitted(expanded, spec.whitespace, vocabulary)
    except GrammarError as error:
        raise _placed(error, document) from None


def compile_admitted(admitted: AdmittedSchema, whitespace: str, vocabulary: Vocabulary) -> LlguidanceCompiled:
    """An admitted schema, with `GrammarSpec.whitespace`."""
    check_spelling(admitted, vocabulary)
    overrides = json_options(whitespace, admitted)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(admitted.text, overrides=overrides)
    return LlguidanceCompiled(grammar, vocabulary, code="invalid_schema")


def compile_ebnf(spec: GrammarSpec, vocabulary: Vocabulary) -> LlguidanceCompiled:
    """An `ebnf` spec: GBNF (rules `name ::= …`, one of them `root`) or Lark (rules `name: …`, one of them `start`)."""
    return compile_lark(to_lark(spec.text), vocabulary)


def compile_structural_tag(spec: GrammarSpec, vocabulary: Vocabulary) -> LlguidanceCompiled:
    """A `structural_tag` spec: free text with constrained parts."""
    try:
        return compile_lark(tags_to_lark(spec, vocabulary), vocabulary)
    except GrammarError as error:
        if "oneOf" not in str(error) or error.info.param is not None:
            raise
    return compile_lark(tags_to_lark(spec, vocabulary, expand_one_of=True), vocabulary)


def compile_lark(lark: str, vocabulary: Vocabulary) -> LlguidanceCompiled:
    """A grammar in llguidance's Lark."""
    return LlguidanceCompiled(llguidance.LLMatcher.grammar_from_lark(lark), vocabulary, code="invalid_grammar")


def compile_regex_llg(pattern: str, vocabulary: Vocabulary) -> LlguidanceCompiled:
    """A regular expression (Rust syntax) that the whole output must match."""
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the expression is longer than {MAX_GRAMMAR_BYTES} bytes", code="grammar_too_large")
    return LlguidanceCompiled(llguidance.LLMatcher.grammar_from_regex(pattern), vocabulary, code="invalid_regex")


def _placed(error: GrammarError, document: Any) -> GrammarError:
    """The error with a JSON pointer."""
    if error.info.param is not None:
        return error
    return GrammarError(str(error), code=error.info.code, param=locate_empty(document))


def _bit(mask_W: Int32Array, token: int) -> bool:
    return bool((int(mask_W[token >> 5]) >> (token & 31)) & 1)


def _reason(error: str) -> str:
    """The part of llguidance's message that concerns a client."""
    return error.strip().split("\n", 1)[0][:500] or "llguidance can't use this grammar"


def _code(error: str, code: str) -> str:
    lowered = error.lower()
    if "unsatisfiable" in lowered:
        return "unsatisfiable_schema"
    if "unimplemented" in lowered or "not supported" in lowered or "not disjoint" in lowered:
        return "unsupported_schema_keyword" if code == "invalid_schema" else code
    if "too large" in lowered or "too complex" in lowered or "fuel" in lowered or "too many" in lowered or "limit" in lowered:
        return "grammar_too_large"
    return code


def _empty_code(code: str) -> str:
    return "unsatisfiable_schema" if code == "invalid_schema" else code
