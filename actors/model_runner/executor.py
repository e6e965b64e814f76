"""Executor: what the runner's actor drives. It turns one StepPlan after another into StepResults.

    RowTables (numpy) ──lay_out──► StepLayout ──compute──► Outcome ──commit──► StepResult

The tables and the rules of protocols/internal.py (who ends a row, and when) are the same for every executor; one that
computes for real and one that costs nothing differ only in `compute`. No torch here.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from radixcast.actors.model_runner.tables import IntArray, RowTables, StepLayout
from radixcast.protocols.buffers import EMPTY, pack_ids
from radixcast.protocols.errors import InternalError
from radixcast.protocols.internal import Capacity, RowLogprobs, StepPlan, StepResult

log = logging.getLogger(__name__)

STEP_FAILED = InternalError("The model runner failed while computing this request; the server's log has the details.").info


class Executor(Protocol):
    """Synchronous and used by one thread only. Plans come in order of their numbers."""

    def capacity(self) -> Capacity:
        """What the tables and the KV pool hold; constant."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A failure is told in `StepResult.error`, and then no row has changed.

        Raises only what makes the process useless (a broken device).
        """

    def reset(self) -> None:
        """Forget all rows."""


@dataclass(frozen=True)
class Outcome:
    """What a step computed: candidates to append to each row of the layout, row after row."""

    counts_R: IntArray
    """int64 [R]: tokens offered to each row; 0 for rows that did not sample."""
    tokens: IntArray
    """int64 [sum(counts_R)]; INVALID_TOKEN where the row's logits were no distribution."""
    logprobs: list[RowLogprobs] = field(default_factory=list)
    """Output positions are those offered: one a row. (Drafts will offer several, and must cut what is behind an end.)"""


class TableExecutor(ABC):
    """An Executor over RowTables: everything but the computation."""

    def __init__(self, tables: RowTables, capacity: Capacity) -> None:
        self.tables = tables
        self._capacity = capacity
        self._idle_since: float | None = None

    @abstractmethod
    def compute(self, step: StepLayout) -> Outcome:
        """Compute the tokens of the layout. Must not change the tables."""

    def check_device(self) -> None:  # noqa: B027 (most executors have no device that can break)
        """Called after a step failed: raise when nothing can be computed any more."""

    def capacity(self) -> Capacity:
        """See Executor."""
        return self._capacity

    def reset(self) -> None:
        """See Executor."""
        self.tables.reset()

    def execute(self, plan: StepPlan) -> StepResult:
        """See Executor."""
        started = time.perf_counter()
        waited = 0.0 if self._idle_since is None else started - self._idle_since
        try:
            step = self.tables.lay_out(plan)
            outcome = self.compute(step) if len(step.rows_R) else _NOTHING
            result = self._commit(plan, step, outcome, started, waited)
        except Exception:
            # The smallest domain that holds an error of the batch is the step; its requests are told, the cause is logged.
            log.exception("step %d failed", plan.number)
            self.tables.undo()
            self.check_device()
            result = StepResult(number=plan.number, appended=EMPTY, tokens=EMPTY, error=STEP_FAILED, wait_seconds=waited)
        self._idle_since = time.perf_counter()
        return result

    def _commit(self, plan: StepPlan, step: StepLayout, outcome: Outcome, started: float, waited: float) -> StepResult:
        appended_R, tokens, ends = self.tables.commit(step, outcome.counts_R, outcome.tokens)
        appended_P = np.zeros(step.plan_rows, np.int64)
        appended_P[step.index_R] = appended_R
        return StepResult(
            number=plan.number,
            appended=pack_ids(appended_P),
            tokens=pack_ids(tokens),
            ends=step.ends + ends,
            logprobs=outcome.logprobs,
            forward_seconds=time.perf_counter() - started,
            wait_seconds=waited,
        )


_NOTHING = Outcome(np.zeros(0, np.int64), np.zeros(0, np.int64))
