"""SchedulerActor: moves messages between its three peers and the pure Scheduler.

    tokenizer ──► Submit, AbortOf, ControlOf   GrammarPrepare, StepPlan ──► model_runner
              ◄── SubmitRefused, ControlDone,                ◄── Capacity, GrammarReady, StepResult
                  Capacity                     Open, TokenDeltas ──► detokenizer
                                                             ◄── Finished

It plans when all mail is handled, so that aborts and results count before new work, and only while the detokenizer can be
told: what it has not taken yet holds the plans back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from radixcast.actors.actor import Actor, Bind
from radixcast.actors.backlog import Backlog
from radixcast.actors.scheduler.config import SchedulerConfig
from radixcast.actors.scheduler.outbox import Event
from radixcast.actors.scheduler.scheduler import Scheduler
from radixcast.actors.setup import DETOKENIZER, MODEL_RUNNER, SCHEDULER, TOKENIZER, NodeSetup
from radixcast.protocols.buffers import unpack_ids
from radixcast.protocols.errors import ErrorInfo, InternalError, Overloaded, RequestAborted
from radixcast.protocols.internal import (
    AbortOf,
    Capacity,
    ControlDone,
    ControlOf,
    Finished,
    GrammarReady,
    RunnerToScheduler,
    StepResult,
    Submit,
    SubmitRefused,
    TokenizerToScheduler,
)

FLUSH_PATIENCE_SECONDS = 1.0
"""How long flush_cache waits for requests that are just ending before it is refused."""

GRAMMAR_CHECK_SECONDS = 1.0
"""Between two looks at the patience of requests that wait for a grammar."""

BACKLOG = 64
"""Messages for the detokenizer that may wait before planning stops."""


class SchedulerActor(Actor):
    """See the module; the behaviour is in `Scheduler`."""

    name = SCHEDULER
    binds = (
        Bind(
            "scheduler",
            inboxes={TOKENIZER: TokenizerToScheduler, MODEL_RUNNER: RunnerToScheduler, DETOKENIZER: Finished},
        ),
    )

    def __init__(self, setup: NodeSetup, epoch: int) -> None:
        super().__init__(setup, epoch)
        self._scheduler: Scheduler | None = None
        """None until the runner has told its capacity for the first time."""
        self._capacity: Capacity | None = None
        self._runner_ready = False
        self._early: deque[Submit] = deque()
        """Requests that came before the capacity was known."""
        self._untold: deque[Event] = deque()
        """What the detokenizer has not been sent yet."""
        self._detokenizer_lost = False
        self._answers = Backlog(self.send)
        """To the tokenizer: clients wait for each of them."""
        self._checked_at = 0

    async def start(self) -> None:
        """Begin to look after requests that wait for a grammar."""
        self.spawn(self._mind_grammars(), "grammars")

    # ---------------------------------------------------------------- from the tokenizer

    def on_Submit(self, message: Submit, peer: str) -> None:
        """A request; refused ones are told to the tokenizer."""
        if self._scheduler is not None:
            self._submit(self._scheduler, message)
        elif len(self._early) > self.args.max_queued_requests:
            self._refuse(message, Overloaded("the model is loading and the queue is full", retry_after=5.0).info)
        else:
            self._early.append(message)

    def on_AbortOf(self, message: AbortOf, peer: str) -> None:
        """Abort requests; also those that wait for the runner to load."""
        self.progress += 1
        if self._scheduler is not None:
            self._scheduler.abort(message)
            return
        for submit in [s for s in self._early if message.names(s.client, s.rid, s.group)]:
            self._early.remove(submit)
            self._refuse(submit, RequestAborted(f"request {submit.rid!r}: {message.reason or 'aborted'}").info)

    def on_ControlOf(self, message: ControlOf, peer: str) -> None:
        """A question or an order of a client."""
        self.progress += 1
        done = ControlDone(client=message.client, id=message.id)
        if self._scheduler is None:
            waits = message.what == "flush_cache"
            self._answers.say(TOKENIZER, msgspec.structs.replace(done, ok=waits, message="the model is loading"))
        elif message.what == "flush_cache":
            self.spawn(self._flush(self._scheduler, done), "flush")
        elif message.what == "stats":
            self._answers.say(TOKENIZER, msgspec.structs.replace(done, stats=self._scheduler.stats(time.monotonic())))
        else:
            self._answers.say(TOKENIZER, msgspec.structs.replace(done, ok=False, message=f"unknown control {message.what!r}"))

    def _submit(self, scheduler: Scheduler, message: Submit) -> None:
        self.progress += 1
        refusal = scheduler.submit(message, time.monotonic())
        if refusal is not None:
            self._refuse(message, refusal)

    def _refuse(self, message: Submit, error: ErrorInfo) -> None:
        refused = SubmitRefused(client=message.client, rid=message.rid, attempt=message.attempt, error=error)
        self._answers.say(TOKENIZER, refused)

    async def _flush(self, scheduler: Scheduler, done: ControlDone) -> None:
        """A client that has seen its last token may flush at once, though the end is still on its way to us."""
        deadline = time.monotonic() + FLUSH_PATIENCE_SECONDS
        ok, text = scheduler.flush_cache(time.monotonic())
        while not ok and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            ok, text = scheduler.flush_cache(time.monotonic())
        self._answers.say(TOKENIZER, msgspec.structs.replace(done, ok=ok, message=text))

    # ---------------------------------------------------------------- from runner and detokenizer

    def on_Capacity(self, message: Capacity, peer: str) -> None:
        """A runner is ready: the first one, or a new one with empty tables."""
        self.progress += 1
        config = SchedulerConfig.resolve(self.args, message)
        is_news, self._capacity = message != self._capacity, message
        self._runner_ready = True
        if self._scheduler is None:
            self._scheduler = Scheduler(config)
            while self._early:
                self._submit(self._scheduler, self._early.popleft())
        else:
            self._scheduler.runner_lost(config)
        if is_news:  # clients take a repetition for a new scheduler, which has lost what the old one had not begun
            self._answers.say(TOKENIZER, message)
        self.log.info(
            "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, max_running_requests=%d, context_len=%d",
            config.total_tokens,
            config.chunked_prefill_size,
            config.max_prefill_tokens,
            config.max_running,
            config.context_length,
        )

    def on_StepResult(self, message: StepResult, peer: str) -> None:
        """The oldest plan in flight has been executed."""
        self.progress += 1
        if self._scheduler is not None:
            self._untold.extend(self._scheduler.apply(message, time.monotonic()))

    def on_GrammarReady(self, message: GrammarReady, peer: str) -> None:
        """A grammar was built, or can't be: who waits for it may run, or ends."""
        self.progress += 1
        if self._scheduler is not None:
            self._scheduler.grammar_ready(message)

    def on_Finished(self, message: Finished, peer: str) -> None:
        """Texts have ended: their requests are released."""
        self.progress += 1
        if self._scheduler is not None:
            now = time.monotonic()
            for handle, position in zip(
                unpack_ids(message.handles).tolist(), unpack_ids(message.positions).tolist(), strict=True
            ):
                self._scheduler.finish(handle, position, now)

    # ---------------------------------------------------------------- the loop

    async def after_batch(self) -> None:
        """Plan as far ahead as allowed (the device comes first), then tell the detokenizer."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        self._ask_for_grammars(scheduler)
        self._untold.extend(scheduler.drain())
        held_back = len(self._untold) >= BACKLOG
        self._plan(scheduler)
        self._tell_detokenizer()
        if held_back:  # no more, or else there will be room and on_writable: nothing else might come to wake us
            self._plan(scheduler)
            self._tell_detokenizer()
        if not scheduler.busy and scheduler.meter.steps != self._checked_at:
            self._checked_at = scheduler.meter.steps
            scheduler.maintain()

    def _plan(self, scheduler: Scheduler) -> None:
        while self._may_plan() and (plan := scheduler.schedule(time.monotonic())) is not None:
            if not self.send(MODEL_RUNNER, plan):
                self._lose_runner("a plan could not be sent")
        self._untold.extend(scheduler.drain())

    def _ask_for_grammars(self, scheduler: Scheduler) -> None:
        if not self._runner_ready or not self.writable(MODEL_RUNNER):
            return
        for prepare in scheduler.asks(time.monotonic()):
            if not self.send(MODEL_RUNNER, prepare):
                self._lose_runner("a grammar could not be asked for")

    async def _mind_grammars(self) -> None:
        """Without plans there are no results to wake us: who waits too long for a grammar must be told all the same."""
        while True:
            await asyncio.sleep(GRAMMAR_CHECK_SECONDS)
            if self._scheduler is not None and self._scheduler.busy:
                self.call_soon_threadsafe(_nothing)  # after_batch follows

    def _may_plan(self) -> bool:
        return self._runner_ready and len(self._untold) < BACKLOG and self.writable(MODEL_RUNNER) and self.writable(DETOKENIZER)

    def _tell_detokenizer(self) -> None:
        while self._untold and not self._detokenizer_lost and self.send(DETOKENIZER, self._untold[0]):
            self._untold.popleft()

    # ---------------------------------------------------------------- links

    def on_link_up(self, peer: str) -> None:
        """A peer is there, perhaps a new one that knows nothing."""
        if peer == TOKENIZER:
            self._answers.forget(TOKENIZER)
            if self._capacity is not None:
                self._answers.say(TOKENIZER, self._capacity)
        elif peer == DETOKENIZER and self._detokenizer_lost:
            self._detokenizer_lost = False
            self._untold = deque(self._scheduler.resync() if self._scheduler is not None else ())

    def on_link_down(self, peer: str, reason: str) -> None:
        """A peer is gone, and what was on its way to it."""
        if peer == MODEL_RUNNER:
            self._lose_runner(reason)
        elif peer == DETOKENIZER:
            self._detokenizer_lost = True
        elif peer == TOKENIZER:
            self._answers.forget(TOKENIZER)

    def on_writable(self, peer: str) -> None:
        """A full window has room again (plans go on after each batch anyway)."""
        self._answers.flush(peer)

    def _lose_runner(self, reason: str) -> None:
        self._runner_ready = False
        if self._scheduler is not None:
            self.log.warning("model_runner lost (%s): %d plans in flight", reason, self._scheduler.plans_in_flight)
            self._scheduler.runner_lost()

    # ---------------------------------------------------------------- for the supervisor

    async def on_error(self, error: Exception, message: msgspec.Struct, peer: str) -> None:
        """A Submit that we stumble over is refused; what the runner says and we can't take in ends the actor."""
        await super().on_error(error, message, peer)
        if isinstance(message, Submit):
            self._refuse(message, InternalError("the scheduler could not take the request").info)
        elif isinstance(message, StepResult | Capacity | GrammarReady):
            raise error

    async def drain(self, seconds: float) -> None:
        """Let all requests end."""
        while self._early or self._untold or (self._scheduler is not None and self._scheduler.live()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    @property
    def busy(self) -> bool:
        """Whether it is our turn: requests are there, and nobody else is being waited for."""
        scheduler = self._scheduler
        return scheduler is not None and scheduler.plannable and not scheduler.plans_in_flight and self._may_plan()

    def stats(self) -> dict[str, float]:
        """SchedulerStats, for heartbeats and metrics."""
        if self._scheduler is None:
            return {"queued": float(len(self._early))}
        return {k: float(v) for k, v in msgspec.structs.asdict(self._scheduler.stats(time.monotonic())).items()}


def _nothing() -> None:
    """An empty piece of mail."""
