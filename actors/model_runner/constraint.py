"""Constraint: the grammar of one open row, kept in step with the row's output.

Its matcher has taken in the first `accepted` output tokens of the row. `catch_up` brings it to what the tables say, so a row
opened with output of an earlier life, and a step that failed behind its sampling, need no other care.

Whatever a backend does (an error, a panic of a native library, a fill that takes for ever) is told as the row's end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from radixcast.actors.grammar.interface import Compiled, GrammarError, Matcher
from radixcast.actors.model_runner.rows import Row
from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.errors import ErrorInfo, InternalError

log = logging.getLogger(__name__)

V = TypeVar("V")

WINDOW = 16
WINDOW_SECONDS = 0.25
"""CPU time that WINDOW masks of a row in succession may take; steps of all rows wait for them."""

_DEAD_END = GrammarError("The grammar has come to a dead end: no token can come next.", code="grammar_dead_end").info
_TOO_SLOW = GrammarError("This grammar takes too long to tell which tokens may come next.", code="grammar_too_slow").info
_REFUSED = InternalError("The grammar refused a token that it had allowed.", code="grammar_failed").info
_CRASHED = InternalError("The grammar's backend failed; the server's log has the details.", code="grammar_failed").info
_NOT_MATCHED = InternalError("The output so far does not match the grammar.", code="grammar_failed").info


class Constraint:
    """Used by one thread at a time."""

    def __init__(self, row: Row, compiled: Compiled) -> None:
        self.row = row
        self.error: ErrorInfo | None = None
        """Why the row can't go on."""
        self.finished = False
        """The output must end here."""
        self.may_force = True
        """Text may be forced here. False after `forced` has given all that there was."""
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._accepted = 0
        self._fills = 0
        self._fill_seconds = 0.0

    def catch_up(self, output_ids: Int32Array) -> None:
        """Take in output tokens that the matcher lacks; start again when it has more than there are."""
        self._guarded(lambda: self._catch_up(output_ids), None)

    def forced(self, limit: int) -> list[int]:
        """Take in, and return, at most `limit` tokens that the grammar forces here."""
        return [] if self.error else self._guarded(lambda: self._forced(limit), [])

    def fill(self, mask_W: Int32Array) -> None:
        """Write which tokens may come next (see Matcher.fill); all zero with an error."""
        mask_W[:] = 0
        if self.error:
            return
        started = time.thread_time()
        self._guarded(lambda: self.matcher.fill(mask_W), None)
        self._fill_seconds += time.thread_time() - started
        if self._fill_seconds > WINDOW_SECONDS:
            self.error = self.error or _TOO_SLOW
        self._fills += 1
        if self._fills % WINDOW == 0:
            self._fill_seconds = 0.0
        if not self.error and not mask_W.any():
            self.error = self._told() or _DEAD_END

    def accept(self, token: int) -> bool:
        """Take in a sampled token; False when the matcher does not."""
        return not self.error and self._guarded(lambda: self._accept(token), False)

    @property
    def matcher(self) -> Matcher:
        """The backend's state."""
        if self._matcher is None:
            self._matcher = self._compiled.matcher()
        return self._matcher

    # -- unguarded

    def _catch_up(self, output_ids: Int32Array) -> None:
        if len(output_ids) < self._accepted:
            self._matcher, self._accepted, self.error = None, 0, None
        if self._matcher is not None and len(output_ids) == self._accepted:
            return
        for token in output_ids[self._accepted :].tolist():
            if not self.matcher.accept(token):
                self.error = self._told() or _NOT_MATCHED
                return
            self._accepted += 1
        self._look()

    def _forced(self, limit: int) -> list[int]:
        tokens = self.matcher.forced(limit)[:limit]
        for used, token in enumerate(tokens):
            if not self.matcher.accept(token):
                tokens = tokens[:used]
                break
        self._accepted += len(tokens)
        if tokens:
            self._look()
        self.may_force = len(tokens) == limit
        return tokens

    def _accept(self, token: int) -> bool:
        if not self.matcher.accept(token):
            self.error = self._told() or _REFUSED
            return False
        self._accepted += 1
        self._look()
        return True

    def _look(self) -> None:
        """What the matcher is after it has taken in something."""
        self.may_force = True
        self.finished = self.matcher.finished
        if not self.finished:
            self.error = self._told()

    def _told(self) -> ErrorInfo | None:
        """The matcher's own error."""
        text = self.matcher.error
        return GrammarError(f"The grammar can't go on: {text}", code="grammar_failed").info if text else None

    def _guarded(self, call: Callable[[], V], otherwise: V) -> V:
        try:
            return call()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of a native library (pyo3's PanicException) is no Exception
            log.exception("a grammar's backend failed")
            self.error = _CRASHED
            return otherwise


def popcounts(mask_NW: Int32Array) -> npt.NDArray[np.int64]:
    """Bits set in each row, int64 [N]."""
    if hasattr(np, "bitwise_count"):  # numpy 2
        counted: npt.NDArray[np.int64] = np.bitwise_count(mask_NW.view(np.uint32)).sum(axis=1, dtype=np.int64)
    else:
        counted = np.unpackbits(mask_NW.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64)
    return counted
