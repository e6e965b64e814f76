"""ModelRunnerActor: plans in, results out. All behaviour is in the executor; this only moves messages.

    scheduler ──StepPlan────────► on_StepPlan ──► StepThread ──────► done ──StepResult────► scheduler
              ──GrammarPrepare──► on_GrammarPrepare ──► GrammarStore ──────GrammarReady──►

A link to the scheduler that goes down means another scheduler (or the same one, having lost count): rows are forgotten, answers
still to come are dropped, and Capacity is told anew when the link is up. Compiled grammars stay: they belong to nobody.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from radixcast.actors.actor import Actor, Dial
from radixcast.actors.model_runner.constraints import GrammarOptions
from radixcast.actors.model_runner.executor import Executor
from radixcast.actors.model_runner.free import FreeRunner, free_capacity
from radixcast.actors.model_runner.grammar_store import Builder, GrammarStore
from radixcast.actors.model_runner.worker import StepThread
from radixcast.actors.setup import MODEL_RUNNER, SCHEDULER, NodeSetup
from radixcast.protocols.internal import Capacity, GrammarPrepare, GrammarReady, SchedulerToRunner, StepPlan, StepResult

STOP_SECONDS = 10.0
"""How long the step in progress may take when the actor is to end."""


class ModelRunnerActor(Actor):
    """Owns the tensors of one rank."""

    name = MODEL_RUNNER
    dials = (Dial(SCHEDULER, "scheduler", SchedulerToRunner),)

    def __init__(self, setup: NodeSetup, epoch: int) -> None:
        super().__init__(setup, epoch)
        self._grammars = GrammarStore(self.make_builder)
        self._worker = StepThread(self.build, self)
        self._loaded: asyncio.Future[Capacity] | None = None
        self._ended: asyncio.Future[None] | None = None
        """Done when the compute thread fails."""
        self._capacity: Capacity | None = None
        self._life = 0
        self._in_flight = 0
        self._outbox: deque[msgspec.Struct] = deque()
        """What the link had no room for; bounded by the plans in flight and the grammars asked for."""
        self._counters = {"steps": 0.0, "failed_steps": 0.0, "forward_seconds": 0.0, "wait_seconds": 0.0, "grammar_bytes": 0.0}

    async def start(self) -> None:
        """Load the model and warm it up on the compute thread; raises what made that fail."""
        loop = asyncio.get_running_loop()
        self._loaded, self._ended = loop.create_future(), loop.create_future()
        self._worker.start()
        self._capacity = await self._loaded
        gc.freeze()  # what was loaded stays: a full collection over it would hold up a step for a fifth of a second
        self.spawn(_wait_for(self._ended), "compute thread")
        if self.setup.model.weight_format != "free":
            # Behind loading, which it would slow down by its own time, and before there is a stream that it could hold up.
            self._grammars.warm_up()
        self.log.info(
            "ready: %d KV slots, %d rows, context of %d tokens",
            self._capacity.total_tokens,
            self._capacity.max_running,
            self._capacity.context_length,
        )

    async def stop(self) -> None:
        """End the compute thread after its step; loading can't be interrupted and ends with the process."""
        await asyncio.to_thread(self._worker.stop, STOP_SECONDS if self._capacity else 0.0)

    # -- messages

    def on_StepPlan(self, plan: StepPlan, peer: str) -> None:
        """Queue it behind the plan that runs."""
        self._in_flight += 1
        self._worker.submit(plan)

    def on_GrammarPrepare(self, message: GrammarPrepare, peer: str) -> None:
        """Build it beside the steps."""
        self._grammars.prepare(message.spec, partial(self.call_soon_threadsafe, self._on_grammar, self._life))

    def on_link_up(self, peer: str) -> None:
        """Tell a scheduler what it can plan with."""
        if peer == SCHEDULER and self._capacity is not None:
            self._outbox.clear()
            self._tell(self._capacity)

    def on_link_down(self, peer: str, reason: str) -> None:
        """Forget every row of the scheduler that is gone."""
        if peer == SCHEDULER:
            self._outbox.clear()
            self._in_flight = 0
            self._life = self._worker.reset()

    def on_writable(self, peer: str) -> None:
        """Send what had to wait."""
        if peer == SCHEDULER:
            self._flush_outbox()

    @property
    def busy(self) -> bool:
        """Plans wait or run, or the model is still loading."""
        return self._in_flight > 0 or self._capacity is None

    def stats(self) -> dict[str, float]:
        """Totals since start."""
        return self._counters

    # -- called on the compute thread: Listener, and the building of the executor

    def ready(self, capacity: Capacity) -> None:
        """See worker.Listener."""
        # Not call_soon_threadsafe: calls wait, like mail, until `start` is done, and `start` waits for this.
        if self._loaded is not None:
            self._loaded.get_loop().call_soon_threadsafe(_resolve, self._loaded, capacity)

    def done(self, life: int, result: StepResult) -> None:
        """See worker.Listener."""
        self.call_soon_threadsafe(self._on_result, life, result)

    def failed(self, error: Exception) -> None:
        """See worker.Listener."""
        if self._loaded is not None and self._ended is not None:
            future: asyncio.Future[Any] = self._ended if self._loaded.done() else self._loaded
            future.get_loop().call_soon_threadsafe(_reject, future, error)

    def build(self) -> Executor:
        """The executor of this actor. Called on the compute thread."""
        args = self.setup.args
        grammars = GrammarOptions(self._grammars, not args.disable_jump_forward, self.setup.model.eos_token_ids)
        return build_executor(self.setup, self._advance, grammars)

    def make_builder(self) -> Builder:
        """What builds grammars. Called on the grammars' thread."""
        return make_builder(self.setup)

    def _advance(self) -> None:
        """Loading went on; only the compute thread counts then."""
        self.progress += 1

    # -- back on the loop

    def _on_result(self, life: int, result: StepResult) -> None:
        self.progress += 1
        self._counters["steps"] += 1
        self._counters["failed_steps"] += result.error is not None
        self._counters["forward_seconds"] += result.forward_seconds
        self._counters["wait_seconds"] += result.wait_seconds
        if life == self._life:
            self._in_flight -= 1
            self._tell(result)

    def _on_grammar(self, life: int, answer: GrammarReady) -> None:
        self.progress += 1
        self._counters["grammar_bytes"] = float(self._grammars.nbytes)
        if life == self._life:
            self._tell(answer)

    def _tell(self, message: msgspec.Struct) -> None:
        self._outbox.append(message)
        self._flush_outbox()

    def _flush_outbox(self) -> None:
        while self._outbox and self.send(SCHEDULER, self._outbox[0]):
            self._outbox.popleft()


def build_executor(setup: NodeSetup, advance: Callable[[], None], grammars: GrammarOptions | None = None) -> Executor:
    """The executor that the model asks for. Raises StartupError for what the operator must change.

    `advance` is called now and then while it loads.
    """
    if setup.model.weight_format == "free":
        capacity = free_capacity(setup.args, setup.model)
        return FreeRunner(capacity, vocab_size=setup.model.config.vocab_size, grammars=grammars)
    # Imported here: a node with a free runner needs no torch, and starts in a tenth of the time without it.
    from radixcast.actors.model_runner.load import load_executor

    return load_executor(setup.args, setup.model, advance, grammars)


def make_builder(setup: NodeSetup) -> Builder:
    """The builder of the node's grammars, its vocabulary loaded. Raises GrammarError, StartupError."""
    # Imported here, and so by the thread that builds grammars: a runner that is never asked for one needs no backend.
    from radixcast.actors.grammar.builder import make_runner_builder

    return make_runner_builder(setup)


async def _wait_for(future: asyncio.Future[None]) -> None:
    await future


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
