"""Requests with a grammar: they wait beside the queue until the runner has it, and their rows append what it forces."""

from __future__ import annotations

import pytest

from fakes.plan_executor import PlanExecutor, expected_output
from fakes.scheduler_world import World, big, config, submit
from radixcast.actors.scheduler.config import JUMP_TOKENS, SchedulerConfig
from radixcast.actors.scheduler.grammar_gate import ASKS
from radixcast.actors.scheduler.scheduler import SOLO_FAILURES, Scheduler
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.internal import END_ERROR, END_GRAMMAR, AbortOf, Capacity, GrammarReady, RowEnd, StepPlan, StepResult
from radixcast.protocols.server_args import ServerArgs

KEY = GrammarSpec(kind="regex", text="g").key
BAD = ErrorInfo("no", code="invalid_regex")


def end_of(world: World, rid: str) -> tuple[int, str | None]:
    """(reason, error code) of an output's end."""
    end = world.outputs[rid].end
    assert end is not None
    return end.reason, end.error.code if end.error else None


# ------------------------------------------------------------------ the gate


def test_waiting_for_a_grammar_takes_no_row_and_blocks_nobody() -> None:
    world = big(max_running=1)
    world.submit(submit("g", [1, 2, 3], 5, grammar="g"))
    world.submit(submit("a", [4, 5, 6], 5))
    world.ask()
    assert [spec.key for spec in world.asked] == [KEY]
    assert (world.scheduler.stats(0.0).grammar_queued, world.scheduler.stats(0.0).queued) == (1, 1)
    assert world.plan()
    world.result()
    assert world.outputs["a"].tokens
    assert world.scheduler.memory.pool.free_tokens > 20_000 - 30
    world.run()
    for rid in "ag":
        assert world.outputs[rid].finished
    assert world.scheduler.stats(0.0).grammar_queued == 0
    world.at_rest()


def test_one_ask_a_key_while_it_is_in_flight_and_one_a_request_afterwards() -> None:
    world = big()
    for rid in "abc":
        world.submit(submit(rid, [1, 2, 3], 5, grammar="g"))
    world.ask()
    world.ask()
    assert len(world.asked) == 1
    world.answer(seconds=0.5)
    world.run()
    world.submit(submit("d", [1, 2, 3], 5, grammar="g"))
    world.ask()
    assert len(world.asked) == 1
    world.run()
    stats = world.scheduler.stats(0.0)
    assert (stats.grammars_total, stats.grammar_hits_total) == (2, 1)
    world.at_rest()


def test_few_grammars_are_asked_for_at_a_time() -> None:
    world = big()
    for i in range(ASKS + 3):
        world.submit(submit(f"r{i}", [1, 2, 3], 5, grammar=f"g{i}"))
    world.ask()
    assert [spec.text for spec in world.asked] == [f"g{i}" for i in range(ASKS)]
    world.answer()
    world.ask()
    assert [spec.text for spec in world.asked] == [f"g{i + 1}" for i in range(ASKS)]
    world.run()
    world.at_rest()


def test_a_grammar_that_can_not_be_built_ends_its_requests_only() -> None:
    world = big()
    for rid, grammar in (("a", "g"), ("b", "g"), ("c", "h")):
        world.submit(submit(rid, [1, 2, 3], 5, grammar=grammar))
    world.ask()
    world.answer(error=BAD)
    assert end_of(world, "a") == end_of(world, "b") == (END_ERROR, "invalid_regex")
    world.run()
    assert end_of(world, "c")[0] != END_ERROR
    world.at_rest()


def test_waiting_requests_can_be_aborted_and_count_in_the_queue() -> None:
    world = big(max_running=1, max_queued=1)
    for rid in "ab":
        assert world.submit(submit(rid, [1, 2, 3], 5, grammar="g")) is None
    refusal = world.submit(submit("c", [1, 2, 3], 5))
    assert refusal is not None
    assert refusal.status == 503
    world.ask()
    for rid in "ab":
        assert world.scheduler.abort(AbortOf(rid=rid)) == 1
    world.hear(world.scheduler.drain())
    assert end_of(world, "a")[0] == 0
    assert not world.scheduler.plannable
    world.answer()
    world.run()
    world.at_rest()


def test_a_runner_that_does_not_answer_costs_the_request_not_the_queue() -> None:
    world = big(grammar_patience=5.0)
    for rid, grammar in (("a", "g"), ("b", "g"), ("c", "h")):
        world.submit(submit(rid, [1, 2, 3], 5, grammar=grammar))
        world.ask()
        world.now += 3
    world.ask()
    assert end_of(world, "a") == end_of(world, "b") == (END_ERROR, "grammar_timeout")
    assert world.outputs["c"].end is None
    world.scheduler.grammar_ready(GrammarReady(key=KEY))  # too late
    del world.asked[0]
    world.run()
    assert world.outputs["c"].finished
    world.at_rest()


def test_retracted_requests_ask_again() -> None:
    world = big(force_retract_interval=4)
    request = submit("a", [1, 2, 3], 30, min_new=30, grammar="g")
    world.submit(request)
    world.run()
    world.check_output(request)
    stats = world.scheduler.stats(0.0)
    assert stats.retractions_total > 1
    assert stats.grammars_total == stats.retractions_total + 1
    world.at_rest()


def test_a_grammar_dropped_before_its_row_opens_is_asked_for_again() -> None:
    world = big(max_running=1)
    requests = [submit(rid, [1, 2, 3, ord(rid)], 12, min_new=12, grammar=rid) for rid in "ab"]
    for request in requests:
        world.submit(request)
    world.step()
    world.executor.prepared = {row.open.grammar for row in world.executor.rows.values()}
    world.run()
    for request in requests:
        world.check_output(request)
    assert world.scheduler.stats(0.0).grammars_total == 3
    world.at_rest()


def test_a_grammar_that_never_stays_is_given_up() -> None:
    world = big()
    world.submit(submit("a", [1, 2, 3], 5, grammar="g"))
    asks = 0
    while world.outputs["a"].end is None:
        world.ask()
        while world.asked:
            world.answer()
            asks += 1
        world.executor.prepared.clear()
        while world.plan():
            pass
        world.result()
    assert end_of(world, "a") == (END_ERROR, "grammar_missing")
    assert asks == SOLO_FAILURES + 1
    world.run()
    world.at_rest()


# ------------------------------------------------------------------ the runner is lost


def lose_runner(world: World) -> None:
    world.asked.clear()
    world.executor.queue.clear()
    world.executor.rows.clear()
    world.executor.prepared.clear()
    world.scheduler.runner_lost()
    world.hear(world.scheduler.drain())


def test_a_new_runner_is_asked_for_everything() -> None:
    world = big(max_running=1)
    requests = [submit(rid, [1, 2, ord(rid)], 12, min_new=12, grammar=rid) for rid in "abc"]
    for request in requests[:2]:
        world.submit(request)
    world.step()
    world.step()
    world.submit(requests[2])
    assert world.outputs["a"].tokens
    lose_runner(world)
    assert world.scheduler.stats(0.0).grammar_queued == 3
    world.run()
    for request in requests:
        world.check_output(request)
    world.at_rest()


def test_only_a_grammar_that_takes_the_runner_down_alone_is_refused() -> None:
    world = big()
    for rid in "abc":
        world.submit(submit(rid, [1, 2, 3], 5, grammar=rid))
    world.ask()
    assert len(world.asked) == 3
    lose_runner(world)
    world.submit(submit("d", [1, 2, 3], 5, grammar="d"))
    world.ask()
    assert [spec.text for spec in world.asked] == ["a"], "suspects are asked for alone"
    lose_runner(world)
    assert end_of(world, "a") == (END_ERROR, "grammar_crash")
    world.ask()
    assert [spec.text for spec in world.asked] == ["b"]
    world.answer()
    world.ask()
    assert [spec.text for spec in world.asked] == ["c"]
    world.run()
    for rid in "bcd":
        assert end_of(world, rid)[0] != END_ERROR
    world.at_rest()


def test_innocent_losses_between_asks_refuse_nobody() -> None:
    world = big()
    world.submit(submit("a", [1, 2, 3], 5, grammar="a"))
    for _ in range(4):
        lose_runner(world)
    world.run()
    assert world.outputs["a"].finished
    assert end_of(world, "a")[0] != END_ERROR


# ------------------------------------------------------------------ forced tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_forced_tokens_cost_no_step_each(depth: int, page_size: int) -> None:
    cfg = config(total_tokens=1000, depth=depth, page_size=page_size)
    world = World(Scheduler(cfg), PlanExecutor(1000, page_size=page_size, jumps=lambda row, position: 20))
    request = submit("a", [1, 2, 3], 70, min_new=70, grammar="g")
    world.submit(request)
    world.run()
    world.check_output(request)
    output = world.outputs["a"]
    assert world.plans < 70 / JUMP_TOKENS + 6
    assert 50 < output.forced < 70
    assert world.scheduler.stats(0.0).forced_tokens_total == output.forced
    world.submit(submit("b", [1, 2, 3, *output.tokens[:60], 7], 4))
    world.run()
    assert world.outputs["b"].cached >= 60 - page_size, "what was forced is cached like any other token"
    world.at_rest()


def test_rows_without_jump_forward_get_one_slot_a_step() -> None:
    plans: list[StepPlan] = []
    world = big()
    for rid, fields in (("plain", {}), ("off", {"grammar": "g", "jump_forward": False}), ("on", {"grammar": "g"})):
        world.submit(submit(rid, [1], 40, min_new=40, **fields))
    world.ask()
    world.answer()
    send = world.executor.send
    world.executor.send = lambda plan: (plans.append(plan), send(plan))[1]  # type: ignore[method-assign,func-returns-value]
    while world.plan():
        pass
    assert [sorted(unpack_ids(plan.counts).tolist()) for plan in plans] == [[1, 1, 1], [1, 1, JUMP_TOKENS]]
    world.run()
    world.at_rest()


def test_the_flag_turns_jump_forward_off() -> None:
    capacity = Capacity(total_tokens=100, max_running=2, context_length=50)
    request = submit("a", [1], 5, grammar="g")
    on = SchedulerConfig.resolve(ServerArgs(), capacity)
    off = SchedulerConfig.resolve(ServerArgs(disable_jump_forward=True), capacity)
    assert (on.draft_of(request), off.draft_of(request)) == (JUMP_TOKENS, 1)
    assert on.draft_of(submit("a", [1], 5)) == 1


@pytest.mark.parametrize("new", [1, 2, 3, 7, 8, 9, 17])
def test_never_beyond_the_end(new: int) -> None:
    world = World.make(config(total_tokens=3 + max(1, new - 1), context_length=3 + new))
    world.executor.jumps = lambda row, position: 20
    request = submit("a", [1, 2, 3], new, min_new=new, grammar="g")
    assert world.submit(request) is None
    world.run()
    assert world.outputs["a"].tokens == expected_output([1, 2, 3], 0, 1, new, new)
    world.at_rest()


def test_a_runner_that_forces_more_than_it_was_given_is_followed() -> None:
    """Its last prompt chunk has room for many tokens; the next plan was made before."""
    cfg = config(total_tokens=1000, chunked_prefill_size=64)
    world = World(Scheduler(cfg), PlanExecutor(1000, jumps=lambda row, position: 30))
    request = submit("a", [1 + i % 40 for i in range(50)], 90, min_new=90, grammar="g")
    world.submit(request)
    world.run()
    world.check_output(request)
    world.at_rest()


def test_the_end_of_the_grammar_is_told_as_such() -> None:
    world = big()
    world.submit(submit("a", [1, 2, 3], 5, grammar="g"))
    world.ask()
    world.answer()
    world.plan()
    world.executor.queue.clear()
    result = StepResult(
        number=1,
        appended=pack_ids([3]),
        tokens=pack_ids([7, 8, 9]),
        ends=[RowEnd(row=0, reason=END_GRAMMAR)],
        forced=pack_ids([2]),
    )
    world.hear(world.scheduler.apply(result, world.now))
    assert world.outputs["a"].tokens == [7, 8, 9]
    assert world.outputs["a"].forced == 2
    assert end_of(world, "a") == (END_GRAMMAR, None)


def test_forced_counts_of_another_length_make_the_step_fail() -> None:
    world = big(strict=False)
    world.submit(submit("a", [1, 2, 3], 5))
    world.plan()
    world.executor.queue.clear()
    result = StepResult(number=1, appended=pack_ids([1]), tokens=pack_ids([7]), forced=pack_ids([1, 1]))
    world.hear(world.scheduler.apply(result, world.now))
    assert world.outputs["a"].tokens == []
    assert world.scheduler.stats(0.0).repaired_total == 1
