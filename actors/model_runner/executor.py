"""Executor: what the runner's actor drives. It turns one StepPlan after another into StepResults.

    RowTables (numpy) ──lay_out──► StepLayout ──compute──► Outcome ──commit──► StepResult
                                       └─ Constraints: masks beside the computation

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
from msgspec.structs import replace

from radixcast.actors.model_runner.constraints import Allowed, Constraints, GrammarOptions
from radixcast.actors.model_runner.tables import IntArray, RowTables, StepLayout
from radixcast.protocols.buffers import EMPTY, pack_ids
from radixcast.protocols.errors import InternalError
from radixcast.protocols.internal import Capacity, RowEnd, RowLogprobs, StepPlan, StepResult

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
    forced_R: IntArray | None = None
    """int64 [R]: how many of the offered tokens, the last ones, a grammar forced; None: none."""
    ends: dict[int, RowEnd] = field(default_factory=dict)
    """How rows end behind all that is offered to them."""


class TableExecutor(ABC):
    """An Executor over RowTables: everything but the computation."""

    def __init__(self, tables: RowTables, capacity: Capacity, grammars: GrammarOptions | None = None) -> None:
        self.tables = tables
        self.constraints = Constraints(tables, grammars)
        tables.on_open = self.constraints.open
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
        self.constraints.sweep()

    def execute(self, plan: StepPlan) -> StepResult:
        """See Executor."""
        started = time.perf_counter()
        waited = 0.0 if self._idle_since is None else started - self._idle_since
        try:
            step = self.tables.lay_out(plan)
            self.constraints.sweep()
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
        appended_R, tokens, ends = self.tables.commit(step, outcome.counts_R, outcome.tokens, outcome.ends)
        appended_P = np.zeros(step.plan_rows, np.int64)
        appended_P[step.index_R] = appended_R
        forced = EMPTY
        if outcome.forced_R is not None and outcome.forced_R.any():
            forced_P = np.zeros(step.plan_rows, np.int64)
            forced_P[step.index_R] = np.maximum(appended_R - (outcome.counts_R - outcome.forced_R), 0)
            forced = pack_ids(forced_P)
        return StepResult(
            number=plan.number,
            appended=pack_ids(appended_P),
            tokens=pack_ids(tokens),
            ends=step.ends + ends,
            logprobs=outcome.logprobs,
            forward_seconds=time.perf_counter() - started,
            wait_seconds=waited,
            forced=forced,
        )

    def offer(self, step: StepLayout, allowed: Allowed | None, drawn: IntArray, logprobs: list[RowLogprobs]) -> Outcome:
        """The outcome of a step that drew these tokens: for every row that samples or, with grammars, for those that must."""
        counts_R = step.samples_R.astype(np.int64)
        if allowed is None:
            return Outcome(counts_R, drawn, logprobs)
        offer = self.constraints.offer(allowed, step.rows_R[step.samples_R], drawn)
        forced_R = np.zeros(len(counts_R), np.int64)
        counts_R[step.samples_R], forced_R[step.samples_R] = offer.counts_S, offer.forced_S
        if offer.ends:
            empty = set(step.rows_R[counts_R == 0].tolist())
            logprobs = [replace(report, output=None) if report.row in empty else report for report in logprobs]
        return Outcome(counts_R, offer.tokens, logprobs, forced_R, offer.ends)


_NOTHING = Outcome(np.zeros(0, np.int64), np.zeros(0, np.int64))
