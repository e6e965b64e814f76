"""What plans and results hold, and what happens when room is short."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fakes.plan_executor import EOS, PlanExecutor, expected_output
from fakes.scheduler_world import World, big, config, submit
from radixcast.actors.scheduler.scheduler import Scheduler
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.internal import (
    END_EOS,
    END_LENGTH,
    RowLogprobs,
    StepResult,
    TokenDeltas,
)
from radixcast.protocols.public import Logprobs

PREFIX = [1 + i % 49 for i in range(512)]


# ------------------------------------------------------------------ steps


def test_two_plans_are_in_flight_and_one_without_overlap() -> None:
    for depth in (1, 2):
        world = big(depth=depth)
        world.submit(submit("a", [1, 2, 3], 10, min_new=10))
        while world.plan():
            pass
        assert world.scheduler.plans_in_flight == depth


def test_a_row_is_in_one_of_two_consecutive_plans_with_row_gap() -> None:
    world = big(row_gap=1, depth=3)
    for rid in "ab":
        world.submit(submit(rid, [1, 2, 3] if rid == "a" else [4, 5], 10, min_new=10))
    seen: list[list[int]] = []
    send = world.executor.send

    def spy(plan: Any) -> None:
        seen.append(unpack_ids(plan.rows).tolist())
        send(plan)

    world.executor.send = spy  # type: ignore[method-assign]
    while world.plan():
        pass
    assert len(seen) >= 1
    for one, two in itertools.pairwise(seen):
        assert not set(one) & set(two)
    world.run()
    assert world.outputs["a"].tokens == expected_output([1, 2, 3], 0, 1, 10, 10)


def test_drafts_give_several_tokens_a_step() -> None:
    cfg = config(total_tokens=1000, draft=4)
    world = World(Scheduler(cfg), PlanExecutor(1000, drafts=lambda row, position: 4))
    request = submit("a", [1, 2, 3], 40, min_new=40)
    world.submit(request)
    world.run()
    world.check_output(request)
    assert world.plans < 16
    world.at_rest()


def test_no_new_tokens_computes_the_prompt_only() -> None:
    world = big()
    world.submit(submit("a", PREFIX, 0))
    world.run()
    output = world.outputs["a"]
    assert output.tokens == []
    assert output.end is not None
    assert output.end.reason == END_LENGTH
    assert world.scheduler.stats(0.0).cached_tokens == 512
    world.at_rest()


def test_a_resumed_request_goes_on_where_it_was() -> None:
    whole = expected_output([1, 2, 3], 0, 1, 12, 12)
    world = big()
    request = submit("a", [1, 2, 3], 12, min_new=12, output_ids=pack_ids(whole[:5]), attempt=1)
    world.submit(request)
    world.run()
    world.check_output(request)


def test_a_resumed_request_that_has_ended_ends_at_once() -> None:
    world = big()
    world.submit(submit("length", [1, 2, 3], 2, output_ids=pack_ids([5, 6])))
    world.submit(submit("eos", [1, 2, 3], 9, output_ids=pack_ids([5, EOS])))
    ends = [world.outputs[r].end for r in ("length", "eos")]
    assert [e.reason for e in ends if e] == [END_LENGTH, END_EOS]
    world.finish()
    world.at_rest()
    assert world.plans == 0


def test_max_step_tokens_bounds_a_plan() -> None:
    world = big(max_step_tokens=10, chunked_prefill_size=-1)
    world.submit(submit("a", PREFIX[:95], 1))
    world.run()
    assert world.plans >= 10
    assert world.outputs["a"].finished


def test_max_prefill_tokens_bounds_what_is_admitted() -> None:
    world = big(chunked_prefill_size=-1, max_prefill_tokens=100)
    for i in range(4):
        world.submit(submit(f"r{i}", [1 + i] * 60, 1))
    world.plan()
    assert world.plan_rows == [1]


def test_prompt_logprobs_of_a_chunk_reach_the_detokenizer() -> None:
    world = big(chunked_prefill_size=4)
    world.submit(submit("a", PREFIX[:10], 1, logprob_start=0))
    world.plan()
    result = world.executor.step()
    values = Logprobs(values=b"\0" * 20, ids=pack_ids(PREFIX[:5]))
    told = StepResult(
        number=result.number,
        appended=result.appended,
        tokens=result.tokens,
        logprobs=[RowLogprobs(row=0, prompt=values)],
    )
    (event,) = world.scheduler.apply(told, 0.0)
    assert isinstance(event, TokenDeltas)
    assert unpack_ids(event.handles).tolist() == [1]
    assert unpack_ids(event.counts).tolist() == [0]
    assert event.logprobs[0].prompt == values
    assert world.scheduler.live()[0].logprob_start == 5  # what is told is not asked again after a retraction


# ------------------------------------------------------------------ room


def test_a_request_that_never_fits_is_refused() -> None:
    world = World.make(config(total_tokens=64))
    error = world.submit(submit("a", [1] * 40, 30))
    assert error is not None
    assert error.code == "context_length_exceeded"
    assert "64" in error.message
    assert world.submit(submit("b", [1] * 40, 25)) is None
    world.run()
    world.at_rest()


def test_a_prompt_beyond_the_context_is_refused() -> None:
    world = World.make(config(context_length=30))
    error = world.submit(submit("a", [1] * 31, 1))
    assert error is not None
    assert error.code == "context_length_exceeded"


def test_an_empty_prompt_is_refused() -> None:
    error = World.make(config()).submit(submit("a", [], 1))
    assert error is not None
    assert error.status == 400


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("sharing", [True, False])
def test_retraction_changes_no_token(page: int, sharing: bool) -> None:
    world = World.make(config(total_tokens=80, page_size=page, conservativeness=0.01, radix_cache=sharing))
    requests = [submit(f"r{i}", [1 + i, 2, 3], 40, min_new=40, seed=i) for i in range(6)]
    for request in requests:
        world.submit(request)
    world.run()
    for request in requests:
        world.check_output(request)
    assert world.scheduler.stats(0.0).retractions_total > 0
    assert world.scheduler.stats(0.0).repaired_total == 0
    world.at_rest()


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("sharing", [True, False])
def test_forced_retraction_changes_no_token(every: int, sharing: bool) -> None:
    world = World.make(config(force_retract_interval=every, radix_cache=sharing, total_tokens=400))
    requests = [submit(f"r{i}", [1 + i] * 30, 12, min_new=12, seed=i) for i in range(4)]
    for request in requests:
        world.submit(request)
    world.run()
    for request in requests:
        world.check_output(request)
    world.at_rest()


def test_conservative_scheduling_reserves_more() -> None:
    retractions = []
    for conservativeness in (0.01, 10.0):
        world = World.make(config(total_tokens=200, conservativeness=conservativeness))
        for i in range(8):
            world.submit(submit(f"r{i}", [1 + i, 2, 3], 60, min_new=60, seed=i))
        world.run()
        retractions.append(world.scheduler.stats(0.0).retractions_total)
    assert retractions[0] > retractions[1] == 0


def test_flush_is_refused_while_requests_run() -> None:
    world = big()
    world.submit(submit("a", [1, 2, 3], 5))
    assert world.scheduler.flush_cache(0.0)[0] is False
    world.run()
    assert world.scheduler.flush_cache(0.0)[0] is True
    assert world.scheduler.stats(0.0).free_tokens == 20_000


def test_flush_does_not_wait_for_the_detokenizer() -> None:
    world = big()
    world.submit(submit("a", [1, 2, 3], 1))
    world.plan()
    world.result()
    assert world.outputs["a"].end is not None
    assert world.scheduler.flush_cache(0.0)[0] is True
    world.finish()
    world.at_rest()
