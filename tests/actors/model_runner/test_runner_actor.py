"""ModelRunnerActor: the life around the executor. The compute thread is real; sockets are not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.plans import Planner, appended, opening
from fakes.recorded_actor import Recorded, model_spec, node_setup
from fakes.word_grammar import WordGrammar, grammar
from radixcast.actors.model_runner.actor import ModelRunnerActor, build_executor
from radixcast.actors.model_runner.executor import Executor
from radixcast.actors.model_runner.free import FreeRunner
from radixcast.actors.model_runner.grammar_store import Builder
from radixcast.actors.setup import SCHEDULER, NodeSetup
from radixcast.protocols.errors import StartupError
from radixcast.protocols.grammar import GRAMMAR_MISSING, GrammarSpec
from radixcast.protocols.internal import END_GRAMMAR, Capacity, GrammarPrepare, GrammarReady, StepPlan, StepResult


class Quiet(Recorded, ModelRunnerActor):
    """Sends are recorded; calls from the compute thread go straight to the loop."""

    loop: asyncio.AbstractEventLoop
    executor: Executor | StartupError | None = None
    """Built, or raised, instead of the free runner."""
    builder: Builder | None = None
    """Builds grammars."""

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def build(self) -> Executor:
        if isinstance(self.executor, StartupError):
            raise self.executor
        return self.executor or super().build()

    def make_builder(self) -> Builder:
        return self.builder or super().make_builder()


def setup_in(folder: Path, **args: Any) -> NodeSetup:
    return node_setup(model_spec(None, vocab_size=97, weight_format="free"), folder, max_total_tokens=4096, **args)


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Quiet]:
    actor = Quiet(setup_in(tmp_path), epoch=1)
    actor.loop = asyncio.get_running_loop()
    actor.record()
    yield actor
    await actor.stop()


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds; the time limit is only there to end a test that fails."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what happens is on another thread)
            await asyncio.sleep(0.001)


def results(actor: Quiet) -> list[StepResult]:
    return [m for _, m in actor.sent if isinstance(m, StepResult)]


async def test_capacity_is_told_when_the_link_is_up(runner: Quiet) -> None:
    assert runner.busy
    runner.on_link_up(SCHEDULER)  # not loaded: nothing to tell
    assert runner.sent == []
    await runner.start()
    assert not runner.busy
    runner.on_link_up(SCHEDULER)
    assert runner.sent == [(SCHEDULER, Capacity(total_tokens=4096, max_running=64, context_length=128))]


async def test_plans_come_back_in_order(runner: Quiet) -> None:
    await runner.start()
    planner = Planner()
    plans = [planner.plan({0: 3}, [opening(0, [1, 2, 3], new=50)])] + [planner.plan({0: 1}) for _ in range(20)]
    for plan in plans:
        await runner.say(plan, SCHEDULER)
    assert runner.busy
    await until(lambda: len(results(runner)) == 21)
    assert [r.number for r in results(runner)] == [p.number for p in plans]
    assert all(len(appended(p, r)[0]) == 1 for p, r in zip(plans, results(runner), strict=True))
    assert not runner.busy
    assert runner.progress == 21
    assert runner.stats()["steps"] == 21


async def test_results_wait_for_room(runner: Quiet) -> None:
    await runner.start()
    runner.deaf.add(SCHEDULER)
    planner = Planner()
    for plan in (planner.plan({0: 1}, [opening(0, [1])]), planner.plan({0: 1})):
        await runner.say(plan, SCHEDULER)
    await until(lambda: runner.progress == 2)
    assert runner.sent == []
    runner.deaf.clear()
    runner.on_writable(SCHEDULER)
    assert [r.number for r in results(runner)] == [1, 2]


async def test_a_new_scheduler_finds_no_rows(runner: Quiet) -> None:
    await runner.start()
    planner = Planner()
    await runner.say(planner.plan({0: 1}, [opening(0, [1], new=50)]), SCHEDULER)
    await until(lambda: results(runner))
    runner.on_link_down(SCHEDULER, "reset")
    runner.on_link_up(SCHEDULER)
    assert not runner.busy
    runner.sent.clear()
    plan = planner.plan({0: 1})
    await runner.say(plan, SCHEDULER)
    await until(lambda: results(runner))
    assert appended(plan, results(runner)[0]) == {0: []}


class Gated(FreeRunner):
    """Waits for the test before each step."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity, vocab_size=97)
        self.gate = threading.Semaphore(0)
        self.executed: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.gate.acquire()
        self.executed.append(plan.number)
        if plan.number == 666:
            raise OSError("the device is gone")
        return super().execute(plan)


async def test_plans_of_a_dead_scheduler_are_dropped(runner: Quiet) -> None:
    runner.executor = executor = Gated(Capacity(total_tokens=100, max_running=4, context_length=64))
    await runner.start()
    planner = Planner()
    for plan in (planner.plan({0: 1}, [opening(0, [1])]), planner.plan({0: 1}), planner.plan({0: 1})):
        await runner.say(plan, SCHEDULER)
    runner.on_link_down(SCHEDULER, "died")
    runner.on_link_up(SCHEDULER)
    await runner.say(planner.plan({1: 1}, [opening(1, [1])]), SCHEDULER)
    executor.gate.release(4)
    await until(lambda: results(runner))
    assert [r.number for r in results(runner)] == [4]
    assert executor.executed in ([1, 4], [4])  # the one that ran already runs to its end
    assert not runner.busy


class OneWord:
    """Grammars whose language is their text."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)

    def build(self, spec: GrammarSpec) -> WordGrammar:
        assert self.gate.acquire(timeout=20)
        return grammar([spec.text.encode()])


async def test_a_grammar_is_built_beside_the_steps(runner: Quiet) -> None:
    runner.builder = builder = OneWord()
    await runner.start()
    spec, planner = GrammarSpec(kind="regex", text="123"), Planner()
    await runner.say(GrammarPrepare(spec=spec), SCHEDULER)
    plan = planner.plan({0: 1, 1: 1}, [opening(0, [1]), opening(1, [1], grammar=spec.key)])
    await runner.say(plan, SCHEDULER)  # too early: nothing waits for it
    await until(lambda: results(runner))
    assert [(e.row, e.error and e.error.code) for e in results(runner)[0].ends] == [(1, GRAMMAR_MISSING)]
    builder.gate.release()
    await until(lambda: runner.take(GrammarReady))
    plan = planner.plan({2: 8}, [opening(2, [1], grammar=spec.key)])
    await runner.say(plan, SCHEDULER)
    await until(lambda: results(runner))
    assert appended(plan, results(runner)[0]) == {2: list(b"123")[:3]}
    assert [e.reason for e in results(runner)[0].ends] == [END_GRAMMAR]
    assert runner.stats()["grammar_bytes"] == 100


async def test_a_new_scheduler_finds_the_grammars_but_no_answers_of_the_old_one(runner: Quiet) -> None:
    runner.builder = builder = OneWord()
    await runner.start()
    spec = GrammarSpec(kind="regex", text="123")
    await runner.say(GrammarPrepare(spec=spec), SCHEDULER)
    before = runner.progress
    runner.on_link_down(SCHEDULER, "died")
    builder.gate.release()
    await until(lambda: runner.progress > before)
    assert runner.take(GrammarReady) == []
    runner.on_link_up(SCHEDULER)
    await runner.say(GrammarPrepare(spec=spec), SCHEDULER)
    await until(lambda: runner.sent)
    await until(lambda: GrammarReady(key=spec.key) in [m for _, m in runner.sent])


async def test_a_broken_device_ends_the_actor(runner: Quiet) -> None:
    runner.executor = executor = Gated(Capacity(total_tokens=100, max_running=4, context_length=64))
    await runner.start()
    executor.gate.release(1)
    await runner.say(StepPlan(number=666, opens=[], rows=b"", counts=b"", slot_counts=b"", slots=b""), SCHEDULER)
    (work,) = runner.work
    with pytest.raises(OSError, match="the device is gone"):
        await asyncio.wait_for(work, 20)


async def test_what_stops_the_start(runner: Quiet) -> None:
    runner.executor = StartupError("no such architecture")
    with pytest.raises(StartupError, match="no such architecture"):
        await runner.start()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, (4096, 64, 128)),
        ({"max_running_requests": 7}, (4096, 7, 128)),
        ({"context_length": 50}, (4096, 64, 50)),
        ({"context_length": 5000}, (4096, 64, 128)),
    ],
)
def test_capacity(tmp_path: Path, args: dict[str, int], expected: tuple[int, int, int]) -> None:
    found = build_executor(setup_in(tmp_path, **args), lambda: None).capacity()
    assert (found.total_tokens, found.max_running, found.context_length) == expected
