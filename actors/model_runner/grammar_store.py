"""GrammarStore: compiled grammars of the runner, by key. Built beside the steps, kept by size and age.

    GrammarPrepare ──► prepare ──► side thread ──► GrammarReady
    RowOpen.grammar ──► get (compute thread)

A row holds what it uses itself, so dropping a grammar here takes nothing from an open row. A row that is opened when its
grammar has been dropped ends with GRAMMAR_MISSING, and the scheduler asks for it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from radixcast.actors.grammar.cache import MAX_BYTES, GrammarCache
from radixcast.actors.grammar.interface import Compiled
from radixcast.actors.model_runner.side_thread import SideThread
from radixcast.protocols.errors import ErrorInfo, InternalError, RequestError
from radixcast.protocols.grammar import GRAMMAR_MISSING, GrammarSpec
from radixcast.protocols.internal import GrammarReady

log = logging.getLogger(__name__)

_TRIVIAL = GrammarSpec(kind="ebnf", text='root ::= "a"')
_MISSING = "The runner does not have this request's grammar (any more)."
_FAILED = InternalError("The grammar could not be built; the server's log has the details.", code="grammar_failed").info


class Builder(Protocol):
    """Makes grammars."""

    def build(self, spec: GrammarSpec) -> Compiled:
        """Raises GrammarError for a grammar that can't be used."""


class GrammarStore:
    """Thread-safe. `make_builder` loads the model's vocabulary; it is called on the side thread, when first needed."""

    def __init__(self, make_builder: Callable[[], Builder], *, max_bytes: int = MAX_BYTES) -> None:
        self._make_builder = make_builder
        self._builder: Builder | None = None
        self._thread = SideThread("model_runner.grammar")
        self._cache = GrammarCache[Compiled](lambda compiled: compiled.nbytes, max_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return self._cache.nbytes

    def warm_up(self) -> None:
        """Begin to load the vocabulary. That holds the GIL (0.25 s for 49 000 tokens): better before streams run."""
        self._thread.submit(self._warm_up)

    def prepare(self, spec: GrammarSpec, ready: Callable[[GrammarReady], None]) -> None:
        """Build a grammar unless it is there. `ready` is called at once, or by the side thread when that is done."""
        key = spec.key
        if self._cache.peek(key) is not None:
            ready(GrammarReady(key=key))
        else:
            self._thread.submit(lambda: ready(self._answer(spec, key)))

    def get(self, key: str) -> Compiled:
        """A grammar that was prepared. Raises InternalError with GRAMMAR_MISSING when it is not there."""
        kept = self._cache.peek(key)
        if kept is None:
            raise InternalError(_MISSING, code=GRAMMAR_MISSING)
        return kept

    # -- on the side thread

    def _warm_up(self) -> None:
        try:
            self._builder = self._builder or self._make_builder()
            self._builder.build(_TRIVIAL).matcher().forced(1)  # what libraries do once, they do now
        except Exception as error:
            # Whoever needs it is told when it is tried again.
            log.warning("the vocabulary can't be loaded for grammars: %s", error)

    def _answer(self, spec: GrammarSpec, key: str) -> GrammarReady:
        """Never raises: what a grammar does to its backend is its request's misfortune only."""
        if self._cache.peek(key) is not None:  # asked for twice
            return GrammarReady(key=key)
        started = time.perf_counter()
        error: ErrorInfo | None = None
        try:
            self._builder = builder = self._builder or self._make_builder()
            self._cache.get(key, lambda: builder.build(spec))
        except RequestError as refused:
            error = refused.info
        except BaseException:  # a panic of a native library (pyo3's PanicException) is no Exception
            log.exception("grammar %s (%s) could not be built", key[:12], spec.kind)
            error = _FAILED
        return GrammarReady(key=key, error=error, seconds=time.perf_counter() - started)
