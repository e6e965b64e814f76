"""SchedulerActor: what it passes on, when it plans, and what it does when a peer comes or goes. The runner is a FreeRunner."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from fakes.dialling import Client, eventually
from fakes.recorded_actor import Recorded, model_spec, node_setup
from fakes.scheduler_world import submit
from radixcast.actors.local import LocalNode, local_setup
from radixcast.actors.model_runner.actor import ModelRunnerActor
from radixcast.actors.model_runner.free import FreeRunner
from radixcast.actors.scheduler.actor import BACKLOG, SchedulerActor
from radixcast.actors.setup import DETOKENIZER, MODEL_RUNNER, SCHEDULER, TOKENIZER, NodeSetup
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.internal import (
    AbortOf,
    Capacity,
    ControlDone,
    ControlOf,
    Finished,
    GrammarPrepare,
    GrammarReady,
    Open,
    SchedulerToDetokenizer,
    SchedulerToTokenizer,
    StepPlan,
    SubmitRefused,
    TokenDeltas,
)

M = TypeVar("M")

CAPACITY = Capacity(total_tokens=1000, max_running=4, context_length=128)


class Quiet(Recorded, SchedulerActor):
    """Sends are recorded."""

    def heard(self, kind: type[M]) -> list[M]:
        """What it has sent, of one kind."""
        return [m for _, m in self.sent if isinstance(m, kind)]


def setup_in(folder: Path, **args: Any) -> NodeSetup:
    return node_setup(model_spec(None, vocab_size=97, weight_format="free"), folder, **args)


@pytest.fixture
def actor(tmp_path: Path) -> Quiet:
    quiet = Quiet(setup_in(tmp_path, max_queued_requests=2), epoch=1)
    quiet.record()
    return quiet


class Peers:
    """Runs the runner's and the detokenizer's side until nothing is left to do."""

    def __init__(self, actor: Quiet) -> None:
        self.actor = actor
        self.runner = FreeRunner(CAPACITY, vocab_size=97)
        self.tokens: dict[int, list[int]] = {}
        self._read = 0

    async def work(self) -> None:
        while self._read < len(self.actor.sent):
            _, message = self.actor.sent[self._read]
            self._read += 1
            if isinstance(message, StepPlan):
                await self.actor.say(self.runner.execute(message), MODEL_RUNNER)
            elif isinstance(message, TokenDeltas):
                at = 0
                tokens = unpack_ids(message.tokens).tolist()
                for handle, count in zip(unpack_ids(message.handles), unpack_ids(message.counts), strict=True):
                    self.tokens.setdefault(int(handle), []).extend(tokens[at : at + count])
                    at += int(count)
                for end in message.ends:
                    position = len(self.tokens.get(end.handle, ()))
                    done = Finished(handles=pack_ids([end.handle]), positions=pack_ids([position]))
                    await self.actor.say(done, DETOKENIZER)


async def test_a_request_from_submit_to_finish(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    assert actor.sent == [(TOKENIZER, CAPACITY)]
    await actor.say(submit("a", [1, 2, 3], 5, min_new=5), TOKENIZER)
    assert [type(m) for _, m in actor.sent[1:]] == [StepPlan, StepPlan, Open]  # the device comes first
    peers = Peers(actor)
    await peers.work()
    assert len(peers.tokens[1]) == 5
    assert not actor.busy
    await actor.drain(1.0)
    assert actor.stats()["requests_total"] == 1


async def test_what_comes_before_the_runner_waits(actor: Quiet) -> None:
    for i in range(4):
        await actor.say(submit(f"r{i}", [1 + i], 2), TOKENIZER)
    assert [m.rid for m in actor.heard(SubmitRefused)] == ["r3"]
    assert actor.heard(SubmitRefused)[0].error.status == 503
    await actor.say(AbortOf(rid="r1", client="client:a"), TOKENIZER)
    assert actor.heard(SubmitRefused)[1].error.code == "aborted"
    assert actor.heard(Open) == []
    await actor.say(CAPACITY, MODEL_RUNNER)
    assert [m.rid for m in actor.heard(Open)] == ["r0", "r2"]


async def test_a_refusal_goes_to_the_tokenizer(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    await actor.say(submit("a", [1] * 200, 1), TOKENIZER)
    (refused,) = actor.heard(SubmitRefused)
    assert refused.error.code == "context_length_exceeded"


async def test_nothing_is_planned_while_the_detokenizer_is_deaf(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    actor.deaf.add(DETOKENIZER)
    await actor.say(submit("a", [1, 2, 3], 5), TOKENIZER)
    assert actor.heard(StepPlan) == []
    actor.deaf.clear()
    actor.on_writable(DETOKENIZER)
    await actor.after_batch()
    assert len(actor.heard(Open)) == 1
    assert len(actor.heard(StepPlan)) == 2


async def test_a_burst_of_requests_is_planned_without_further_mail(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    actor.deaf.add(DETOKENIZER)
    assert actor._scheduler is not None
    actor._scheduler.config = dataclasses.replace(actor._scheduler.config, max_queued=1000)
    for i in range(2 * BACKLOG):
        actor.on_Submit(submit(f"r{i}", [1 + i % 90], 5), TOKENIZER)
    actor.deaf.clear()
    await actor.after_batch()
    assert len(actor.heard(Open)) == 2 * BACKLOG
    assert len(actor.heard(StepPlan)) == 2


async def test_a_new_runner_computes_everything_again(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    await actor.say(submit("a", [1, 2, 3], 20, min_new=20), TOKENIZER)
    peers = Peers(actor)
    first = actor.heard(StepPlan)[0]
    await actor.say(peers.runner.execute(first), MODEL_RUNNER)
    actor.on_link_down(MODEL_RUNNER, "killed")
    await actor.after_batch()
    plans = len(actor.heard(StepPlan))
    actor.sent.clear()
    await actor.say(CAPACITY, MODEL_RUNNER)
    assert plans == 3
    opened = actor.heard(StepPlan)[0].opens[0]
    assert len(opened.output_ids) == 4  # what had come back is kept
    peers = Peers(actor)
    await peers.work()
    assert len(peers.tokens[1]) == 20 - 1


async def test_the_runner_is_asked_for_a_grammar_before_the_row_is_planned(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    await actor.say(submit("a", [1, 2, 3], 5, grammar="g"), TOKENIZER)
    (prepare,) = actor.heard(GrammarPrepare)
    assert actor.heard(StepPlan) == []
    assert not actor.busy, "it is the runner's turn"
    await actor.say(GrammarReady(key=prepare.spec.key), MODEL_RUNNER)
    assert actor.heard(StepPlan)[0].opens[0].grammar == prepare.spec.key
    assert actor.stats()["grammars_total"] == 1


async def test_a_grammar_that_can_not_be_built_is_told(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    await actor.say(submit("a", [1, 2, 3], 5, grammar="g"), TOKENIZER)
    (prepare,) = actor.heard(GrammarPrepare)
    await actor.say(GrammarReady(key=prepare.spec.key, error=ErrorInfo("no", code="invalid_regex")), MODEL_RUNNER)
    assert [end.error.code for m in actor.heard(TokenDeltas) for end in m.ends if end.error] == ["invalid_regex"]
    with pytest.raises(RuntimeError):
        await actor.on_error(RuntimeError("slip"), GrammarReady(key="k"), MODEL_RUNNER)


async def test_a_new_runner_is_asked_for_grammars_again(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    actor.on_link_down(MODEL_RUNNER, "killed")
    await actor.say(submit("a", [1, 2, 3], 5, grammar="g"), TOKENIZER)
    assert actor.heard(GrammarPrepare) == []
    for _ in range(2):
        await actor.say(CAPACITY, MODEL_RUNNER)
        assert len(actor.heard(GrammarPrepare)) == 1
        actor.sent.clear()


async def test_a_new_detokenizer_hears_of_live_requests(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    await actor.say(submit("a", [1, 2, 3], 20), TOKENIZER)
    actor.on_link_down(DETOKENIZER, "killed")
    actor.sent.clear()
    actor.on_link_up(DETOKENIZER)
    await actor.after_batch()
    assert len(actor.heard(Open)) == 1


async def test_a_new_runner_is_no_news_for_clients(actor: Quiet) -> None:
    for capacity in (CAPACITY, CAPACITY, msgspec.structs.replace(CAPACITY, total_tokens=999)):
        await actor.say(capacity, MODEL_RUNNER)
    assert [c.total_tokens for c in actor.heard(Capacity)] == [1000, 999]


async def test_a_refusal_waits_for_a_busy_tokenizer(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    actor.deaf.add(TOKENIZER)
    for i in range(3):
        await actor.say(submit(f"r{i}", [1] * 200, 1), TOKENIZER)
    assert actor.heard(SubmitRefused) == []
    actor.deaf.clear()
    actor.on_writable(TOKENIZER)
    assert [m.rid for m in actor.heard(SubmitRefused)] == ["r0", "r1", "r2"]


async def test_stats_and_hit_rate_after_a_flush(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    peers = Peers(actor)
    for i, flush in enumerate((False, True, False)):
        await actor.say(submit(f"r{i}", [1, 2, 3, 4, 5], 2, min_new=2), TOKENIZER)
        await peers.work()
        if flush:
            await actor.say(ControlOf(client="c", id="f", what="flush_cache"), TOKENIZER)
            await asyncio.gather(*actor.work)
        await actor.say(ControlOf(client="c", id=f"s{i}", what="stats"), TOKENIZER)
    stats = [m.stats for m in actor.heard(ControlDone) if m.stats is not None]
    assert [s.cached_tokens_total for s in stats] == [0, 4, 4]
    assert [s.prompt_tokens_total for s in stats] == [5, 10, 15]
    assert [round(s.cache_hit_rate, 3) for s in stats] == [0.0, 0.4, 0.267]
    assert [s.cached_tokens > 0 for s in stats] == [True, False, True]
    assert {s.locked_tokens for s in stats} == {0}
    assert all(s.free_tokens + s.cached_tokens == s.total_tokens for s in stats)


async def test_a_new_tokenizer_hears_the_capacity(actor: Quiet) -> None:
    actor.on_link_up(TOKENIZER)
    assert actor.sent == []
    await actor.say(CAPACITY, MODEL_RUNNER)
    actor.sent.clear()
    actor.on_link_up(TOKENIZER)
    assert actor.sent == [(TOKENIZER, CAPACITY)]


async def test_a_submit_that_we_stumble_over_is_refused(actor: Quiet) -> None:
    await actor.say(CAPACITY, MODEL_RUNNER)
    message = submit("a", [1], 1)
    await actor.on_error(RuntimeError("slip"), message, TOKENIZER)
    assert actor.heard(SubmitRefused)[0].error.status == 500
    with pytest.raises(RuntimeError):
        await actor.on_error(RuntimeError("slip"), CAPACITY, MODEL_RUNNER)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[LocalNode]:
    settings = setup_in(tmp_path, max_total_tokens=1000)
    async with LocalNode(local_setup(settings.args, settings.model), [SchedulerActor, ModelRunnerActor]) as running:
        yield running


async def test_over_real_links(node: LocalNode) -> None:
    endpoint = node.setup.endpoints.scheduler
    tokenizer = Client(node.context, endpoint, SchedulerToTokenizer, name=TOKENIZER, peer=SCHEDULER)
    detokenizer = Client(node.context, endpoint, SchedulerToDetokenizer, name=DETOKENIZER, peer=SCHEDULER)
    try:
        await tokenizer.up()
        await detokenizer.up()
        await eventually(lambda: tokenizer.received)
        assert tokenizer.received[0].total_tokens == 1000
        for i in range(20):
            assert tokenizer.dealer.send(submit(f"r{i}", [1 + i, 2, 3], 10, min_new=10))
        await eventually(lambda: len(ends(detokenizer)) == 20)
        assert await tokenizer.ask(ControlOf(client="c", id="1", what="flush_cache")) == ControlDone(
            client="c", id="1", message="cache flushed"
        )
        handles = sorted(ends(detokenizer))
        assert detokenizer.dealer.send(Finished(handles=pack_ids(handles), positions=pack_ids([10] * 20)))
        await asyncio.sleep(0.05)
        stats = (await tokenizer.ask(ControlOf(client="c", id="2", what="stats"))).stats
        assert stats.generation_tokens_total == 200
        assert stats.running == stats.queued == stats.repaired_total == 0
    finally:
        tokenizer.close()
        detokenizer.close()


def ends(detokenizer: Client) -> list[int]:
    return [e.handle for m in detokenizer.received if isinstance(m, TokenDeltas) for e in m.ends]
