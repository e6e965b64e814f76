"""Scheduler: requests in, step plans out, results in, token deltas out. No I/O, no tensors; the clock is passed in.

::

    submit ─► WAITING ──admit──► RUNNING ──end by runner──► ENDED ──finish──► GONE
                 ▲                  │ retract / failed step    ▲
                 └── DRAINING ◄─────┘                          └── abort, error (from any state)

`schedule` may be called while plans are in flight (`config.depth`); results are applied strictly in order. What the
detokenizer must hear collects in an outbox that `drain` empties.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable

import msgspec

from radixcast.actors.scheduler.admission import ended_before, fit, lacks_grammar, misfit
from radixcast.actors.scheduler.batch import Draft, RunningBatch
from radixcast.actors.scheduler.config import SchedulerConfig
from radixcast.actors.scheduler.kv_slots import Slips
from radixcast.actors.scheduler.memory import KvMemory
from radixcast.actors.scheduler.outbox import Event, Outbox, StepOutput
from radixcast.actors.scheduler.planner import Planner
from radixcast.actors.scheduler.policy import WaitingQueue
from radixcast.actors.scheduler.registry import Claim, Registry
from radixcast.actors.scheduler.request import Request, State
from radixcast.actors.scheduler.stats import Meter
from radixcast.protocols.errors import DuplicateRequest, ErrorInfo, InternalError, Overloaded, RequestAborted
from radixcast.protocols.internal import (
    END_ERROR,
    AbortOf,
    DeltaEnd,
    GrammarPrepare,
    GrammarReady,
    StepPlan,
    StepResult,
    Submit,
)
from radixcast.protocols.public import SchedulerStats

logger = logging.getLogger("radixcast.scheduler")

SOLO_FAILURES = 3
"""A request whose steps failed so often with nobody else in them ends with an error."""

CHECK_STEPS = 1024
"""The conservation law is checked every so many steps, and when idle."""


class Scheduler:
    """See the module. All times are seconds of one monotonic clock."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.slips = Slips(strict=config.strict)
        self.meter = Meter()
        self._registry = Registry()
        self._ended: dict[int, Request] = {}
        """ENDED requests: the detokenizer has not told their position yet."""
        self._flights: deque[Draft] = deque()
        self._outbox = Outbox()
        self._handles = itertools.count(1)
        self._next_plan = 1
        self._retractions_before = 0
        self._suspects: dict[int, Request] = {}
        self._waiting = WaitingQueue(config.policy, priorities=config.priority_scheduling, seed=config.seed)
        self._set_up(config)

    def _set_up(self, config: SchedulerConfig) -> None:
        self.config = config
        self.memory = KvMemory(
            config.total_tokens,
            config.page_size,
            sharing=config.radix_cache,
            eviction=config.eviction,
            slips=self.slips,
        )
        self._batch = RunningBatch(config.max_running)
        self._waiting.gate.patience = config.grammar_patience
        self._planner = Planner(config, self.memory, self._batch, self._waiting, self._suspects, self._reclaim_ended)

    # ---------------------------------------------------------------- requests

    @property
    def plans_in_flight(self) -> int:
        """Plans sent whose result has not been applied."""
        return len(self._flights)

    @property
    def busy(self) -> bool:
        """Whether requests wait or run (not: wait for the detokenizer)."""
        return len(self._registry) > len(self._ended)

    @property
    def plannable(self) -> bool:
        """Whether some of them wait for nobody but the next plan (not: for a grammar)."""
        return len(self._registry) > len(self._ended) + len(self._waiting.gate)

    def submit(self, submit: Submit, now: float) -> ErrorInfo | None:
        """Queue a request. Returns why not, or None: it is queued, or was already (a repetition)."""
        claim, live = self._registry.claim(submit)
        if claim is Claim.REPEATED:
            return None
        if claim is Claim.DUPLICATE:
            return DuplicateRequest(f"a request with id {submit.rid!r} is running", param="rid").info
        request = Request(next(self._handles), submit, self.config.context_length, now)
        fit(request, self.memory.pool.total_tokens)
        error = misfit(request, self.config.context_length, self.memory.pool.total_tokens)
        if error is not None:
            return error
        request.draft = self.config.draft_of(submit)
        queued = len(self._waiting) + len(self._waiting.gate)
        if live is None and queued + len(self._batch) >= self.config.max_running + self.config.max_queued:
            return Overloaded(
                f"the queue is full: {queued} requests wait", retry_after=self.meter.retry_after(queued, now)
            ).info
        if live is not None:
            self._abort(live, f"replaced by attempt {submit.attempt}")
        self._registry.add(request)
        self.meter.requests += 1
        self._outbox.opened(request)
        if (end := ended_before(request)) is not None:
            request.cached = 0
            self._end(request, *end)
            self._outbox.ended([self._delta_end(request)])
        else:
            self._waiting.push(request)
        return None

    def abort(self, abort: AbortOf) -> int:
        """Abort what `abort` names; their ids are free at once. Returns how many requests it hit."""
        hit = 0
        for request in self._registry.named_by(abort):
            if request.state is not State.ENDED:
                self._abort(request, abort.reason or "aborted")
                hit += 1
        return hit

    def finish(self, handle: int, position: int, now: float) -> None:
        """The detokenizer knows where the text ends: `position` output tokens count. Releases the request."""
        request = self._registry.get(handle)
        if request is None:
            return
        position = min(position, request.outputs)
        self._leave(request)
        self.memory.release(request, request.prompt_len + position)
        request.state = State.GONE
        self._ended.pop(handle, None)
        self._registry.remove(request)
        self.meter.ended(max(0, position - len(request.submit.output_ids) // 4), now)

    # ---------------------------------------------------------------- steps

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when enough plans are in flight or nothing can run."""
        if len(self._flights) >= self.config.depth:
            return None
        draft = self._planner.build(self._next_plan, in_flight=bool(self._flights))
        for request in self._planner.admitted:
            self.meter.admitted(request, now)
        self._planner.admitted.clear()
        if draft is None:
            return None
        self._next_plan += 1
        self._flights.append(draft)
        self.meter.log(draft, self.memory, self._batch, self._waiting, self.config.decode_log_interval, now)
        return draft.plan(self._batch.take_closed())

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Take in the result of the oldest plan in flight. Returns (and empties) the outbox."""
        if not self._flights or result.number < self._flights[0].number:
            return self.drain()  # of a plan that was given up with its runner
        draft = self._flights.popleft()
        error = result.error
        rows = 4 * len(draft.rows)
        if result.number != draft.number or (
            error is None and (len(result.appended) != rows or len(result.forced) not in (0, rows))
        ):
            self.slips.report(f"result {result.number} ({len(result.appended) // 4} rows) does not answer plan {draft.number}")
            error = InternalError("the runner's result does not answer its plan").info
        self.meter.steps += 1
        self.meter.forward_seconds += result.forward_seconds
        self.meter.wait_seconds += result.wait_seconds
        if error is None:
            self._step_done(draft, result, now)
        else:
            self._step_failed(draft, error)
        if self.meter.steps % CHECK_STEPS == 0:
            self.maintain()
        return self.drain()

    def drain(self) -> list[Event]:
        """What the detokenizer must be told, in order; empties the outbox."""
        return self._outbox.drain()

    def _step_done(self, draft: Draft, result: StepResult, now: float) -> None:
        output = StepOutput(result)
        ends = {end.row: end for end in result.ends}
        broken = False
        columns = (draft.requests, draft.lives, draft.rows, draft.counts, draft.samples, output.appended, output.forced)
        for request, life, row, count, samples, appended, forced in zip(*columns, strict=True):
            end = ends.get(row) if ends else None
            if end is not None and end.reason == END_ERROR:  # (of an earlier life, too: what it published may be in the tree)
                self.memory.fail_row(request, draft.number)
                broken = True
            if request.life != life:
                output.skip(appended)
                continue
            request.flights.remove(draft.number)
            tokens = output.take(request, row, appended)
            if request.state is State.RUNNING:
                request.planned -= count
                request.sampling_flights -= samples
                if appended:  # all that was known is computed; so are drafts, but not what the grammar forced
                    request.computed = request.known + max(0, appended - forced - 1)
                elif end is None or end.reason != END_ERROR:
                    request.computed += min(count, request.known - request.computed)
            if appended:
                request.append(tokens)
                request.forced += forced
                self.meter.forced += forced
            if request.suspect_at >= 0 and request.known > request.suspect_at:
                request.suspect_at = -1
            if end is not None and lacks_grammar(request, end) and request.failures < SOLO_FAILURES:
                request.failures += 1
                self._restart([request])
            elif end is not None:
                self._end(request, end.reason, end.token)
                output.end(request, self._delta_end(request, end.error))
            elif request.state is State.DRAINING and not request.flights:
                self._planner.requeue(request)
        self.memory.tree.settle(draft.number)
        self.meter.sampled(output.kept, now)
        self._outbox.step(output)
        if broken:
            self._restart(self._orphans())

    def _step_failed(self, draft: Draft, error: ErrorInfo) -> None:
        """Nothing of the step counts: its KV leaves the tree; who was in it or builds on it starts again from what is known.

        Those who were in it are suspects: each runs alone until it gets past the point where the step failed.
        """
        logger.warning("step %d failed: %s", draft.number, error.message)
        self.memory.fail_plan(draft.number)
        members = [r for r, life in zip(draft.requests, draft.lives, strict=True) if r.life == life]
        alone = len(draft.requests) == 1
        for request in members:
            request.failures += alone
            request.suspect_at = request.known
            self._suspects[request.handle] = request
        self._restart(members)
        self._restart(self._orphans())
        for request in members:
            if request.failures >= SOLO_FAILURES:
                self._fail(request, error)

    def _orphans(self) -> list[Request]:
        """Who may have built on KV that has just left the tree: who holds a lock there, and all that are draining.

        A draining request has no lock any more, but its plans in flight read what it had.
        """
        lost = [r for r in self._batch if r.node is not None and not r.node.alive]
        return lost + [r for r in self._registry.live() if r.state is State.DRAINING]

    def _restart(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.state is State.RUNNING:
                self.memory.release(request, request.computed)
                self._batch.close(request)
            self._planner.requeue(request)

    # ---------------------------------------------------------------- grammars

    def asks(self, now: float) -> list[GrammarPrepare]:
        """Grammars to ask the runner for, now that it can be told."""
        late, error = self._waiting.gate.overdue(now)
        for request in late:
            self._fail(request, error)
        return self._waiting.gate.asks(now)

    def grammar_ready(self, message: GrammarReady) -> None:
        """The runner has a grammar, or says why it never will."""
        for request, retracted in self._waiting.gate.answer(message):
            if message.error is not None:
                self._fail(request, message.error)
            else:
                request.grammar_ready = True
                self._waiting.push(request, retracted=retracted)

    # ---------------------------------------------------------------- ends

    def _leave(self, request: Request) -> None:
        """Out of batch and queue; plans in flight no longer matter to it."""
        if request.state is State.RUNNING:
            self._batch.close(request)
        elif request.state is State.WAITING:
            self._waiting.remove(request)
        request.life += 1
        request.flights = []

    def _end(self, request: Request, reason: int, token: int = -1) -> None:
        """The request is over; its KV stays until the detokenizer tells how much of it counts, or room is needed."""
        self._leave(request)
        request.state = State.ENDED
        request.end = (reason, token)
        self._ended[request.handle] = request

    def _abort(self, request: Request, why: str) -> None:
        if request.state is not State.ENDED:
            self._end(request, 0)
            self.memory.release(request, request.known)
            self.meter.aborted += 1
            self._outbox.ended([self._delta_end(request, RequestAborted(f"request {request.rid!r}: {why}").info)])
        self._registry.forget_id(request)

    def _fail(self, request: Request, error: ErrorInfo) -> None:
        self._end(request, END_ERROR)
        self.memory.release(request, request.known)
        self._outbox.ended([self._delta_end(request, error)])

    def _delta_end(self, request: Request, error: ErrorInfo | None = None) -> DeltaEnd:
        assert request.end is not None
        reason, token = request.end
        request.error = error
        return DeltaEnd(handle=request.handle, reason=reason, token=token, error=error)

    def _reclaim_ended(self) -> bool:
        """Room is short: what ended requests still hold goes to the tree, where it can be evicted. True if there was any."""
        holding = [r for r in self._ended.values() if r.node is not None]
        for request in holding:
            self.memory.release(request, request.known)
        return bool(holding)

    # ---------------------------------------------------------------- around

    def flush_cache(self, now: float) -> tuple[bool, str]:
        """Empty the tree: (done, message). Refused while requests run or wait."""
        if self.busy:
            return False, f"{len(self._registry) - len(self._ended)} requests are running or waiting"
        self._reclaim_ended()
        self.memory.flush()
        logger.info("Cache flushed successfully!")
        return True, "cache flushed"

    def runner_lost(self, config: SchedulerConfig | None = None) -> None:
        """The runner died, its KV with it: everything that ran waits again, the tree is empty. `config`: of the new runner."""
        self._flights.clear()
        self._retractions_before += self._planner.retractions
        requests = self._registry.live()
        for request in requests:
            request.forget_kv()
            request.life += 1
        self._set_up(config or self.config)
        refused, why = self._waiting.runner_lost()
        for request in refused:
            self._fail(request, why)
        for request in requests:
            request.draft = self.config.draft_of(request.submit)
            if request.state in (State.RUNNING, State.DRAINING):
                request.row = -1
                self._planner.requeue(request)
            fit(request, self.memory.pool.total_tokens)
            error = misfit(request, self.config.context_length, self.memory.pool.total_tokens)
            if request.state is State.WAITING and error is not None:
                self._fail(request, error)

    def resync(self) -> list[Event]:
        """Everything a new detokenizer must know: each request with its tokens so far, and its end if it has one."""
        self._outbox.drain()
        for request in self._registry.live():
            self._outbox.opened(request)
            if request.end is not None:
                self._outbox.ended([self._delta_end(request, request.error)])
        return self.drain()

    def maintain(self) -> None:
        """Check the conservation law; mend what is broken (strict mode raises instead)."""
        requests = self._registry.live()
        if not self.memory.check(requests):
            self.memory.repair(requests)

    def live(self) -> list[Request]:
        """All requests not yet released, in order of arrival (for checks and tests)."""
        return self._registry.live()

    def stats(self, now: float) -> SchedulerStats:
        """Numbers of this moment."""
        stats = self.meter.stats(self.memory, self._batch, self._waiting, now)
        return msgspec.structs.replace(
            stats,
            plans_in_flight=len(self._flights),
            retractions_total=self._retractions_before + self._planner.retractions,
            new_token_ratio=self._planner.ratio.value,
            repaired_total=self.slips.count,
        )
