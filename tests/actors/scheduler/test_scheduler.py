"""The scheduler's behaviour, one scene at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fakes.plan_executor import EOS, SPOILT, PlanExecutor, expected_output
from fakes.scheduler_world import World, config, submit
from radixcast.actors.scheduler.policy import AGEING
from radixcast.actors.scheduler.scheduler import SOLO_FAILURES, Scheduler
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.internal import (
    END_EOS,
    END_ERROR,
    END_LENGTH,
    AbortOf,
    Open,
    RowEnd,
    RowLogprobs,
    StepResult,
    TokenDeltas,
)
from radixcast.protocols.public import Logprobs

PREFIX = [1 + i % 49 for i in range(512)]
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")


def big(**changes: Any) -> World:
    return World.make(config(**{"total_tokens": 20_000, "max_running": 64, "chunked_prefill_size": 512, **changes}))


# ------------------------------------------------------------------ sharing


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [-1, 100, 512, 8192])
def test_eight_that_arrive_together_compute_their_prefix_once(policy: str, chunk: int) -> None:
    world = big(policy=policy, chunked_prefill_size=chunk)
    suffixes = [[10 + i, 20 + i, 30 + i] for i in range(8)]
    for i, suffix in enumerate(suffixes):
        world.submit(submit(f"r{i}", PREFIX + suffix, 1))
    world.run()
    assert world.executor.computed_tokens <= 512 + 8 * 3
    assert sorted(o.cached for o in world.outputs.values()) == [0] + [512] * 7
    world.at_rest()


def test_the_second_turn_finds_prompt_and_answer() -> None:
    world = big()
    world.submit(submit("a", PREFIX, 20, min_new=20))
    world.run()
    answer = world.outputs["a"].tokens
    world.submit(submit("b", [*PREFIX, *answer, 7, 8], 1))
    world.run()
    assert world.outputs["b"].cached == 512 + 19  # the last token's KV was never computed


def test_the_same_prompt_again_computes_one_token() -> None:
    world = big()
    for rid in "ab":
        world.submit(submit(rid, PREFIX, 1))
        world.run()
    assert world.outputs["b"].cached == 511
    assert world.executor.computed_tokens == 512 + 1


def test_only_whole_pages_are_shared() -> None:
    world = big(page_size=16)
    world.submit(submit("a", PREFIX[:100], 1))
    world.run()
    world.submit(submit("b", [*PREFIX[:100], 3], 1))
    world.run()
    assert world.outputs["b"].cached == 96


def test_text_behind_the_end_is_not_kept() -> None:
    world = big()
    world.text_end = lambda rid: 3
    world.submit(submit("a", PREFIX[:10], 50, min_new=50))
    world.run()
    assert world.scheduler.stats(0.0).cached_tokens == 10 + 3 - 1  # the third token's KV was not there yet


def test_namespaces_do_not_share() -> None:
    world = big()
    world.submit(submit("a", PREFIX, 1, ns=0))
    world.run()
    world.submit(submit("b", PREFIX, 1, ns=1))
    world.run()
    assert world.outputs["b"].cached == 0


def test_without_radix_cache_nothing_is_shared() -> None:
    world = big(radix_cache=False)
    for rid in "ab":
        world.submit(submit(rid, PREFIX, 1))
        world.run()
    assert world.executor.computed_tokens == 1024
    assert world.scheduler.stats(0.0).free_tokens == 20_000


@pytest.mark.parametrize(("start", "cached"), [(-1, 99), (0, 0), (1, 0), (40, 39), (100, 99), (500, 99)])
def test_prompt_logprobs_limit_the_hit(start: int, cached: int) -> None:
    world = big()
    world.submit(submit("a", PREFIX[:100], 1))
    world.run()
    world.submit(submit("b", PREFIX[:100], 1, logprob_start=start))
    world.run()
    assert world.outputs["b"].cached == cached


def test_hit_rates_are_honest() -> None:
    world = big()
    world.submit(submit("a", PREFIX[:100], 1))
    world.run()
    world.submit(submit("b", PREFIX[:100], 1))
    world.run()
    assert world.scheduler.stats(world.now).cache_hit_rate == 99 / 200
    assert world.scheduler.stats(world.now).cache_hit_rate_window == 99 / 200
    assert world.scheduler.stats(world.now + 100).cache_hit_rate_window == 0
    assert world.scheduler.stats(world.now + 100).cache_hit_rate == 99 / 200


# ------------------------------------------------------------------ fairness


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    world = big(chunked_prefill_size=64)
    world.submit(submit("long", [5] * 4000, 1))
    for _ in range(3):
        world.step()
    world.submit(submit("short", [7, 8, 9], 1))
    for _ in range(3):
        world.step()
    assert world.outputs["short"].finished
    assert not world.outputs["long"].finished


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    world = big(chunked_prefill_size=64)
    world.submit(submit("long", [5] * 640, 1))
    for i in range(30):
        for j in range(4):
            world.submit(submit(f"s{i}.{j}", [7 + j, *[1 + (i * 31 + j * 7 + k) % 49 for k in range(50)]], 1))
        world.step()
    assert world.outputs["long"].finished


def test_running_streams_never_stall_during_a_prefill() -> None:
    world = big(chunked_prefill_size=32)
    world.submit(submit("stream", [3, 4], 100, min_new=100))
    for _ in range(4):
        world.step()
    world.submit(submit("long", [5] * 2000, 1))
    for _ in range(20):
        before = len(world.outputs["stream"].tokens)
        world.step()
        assert len(world.outputs["stream"].tokens) == before + 1
    assert not world.outputs["long"].tokens


def test_the_chunk_budget_is_shared_with_decodes() -> None:
    world = big(chunked_prefill_size=32)
    for i in range(8):
        world.submit(submit(f"d{i}", [3 + i], 60, min_new=60))
    for _ in range(3):
        world.step()
    world.submit(submit("long", [5] * 2000, 1))
    before = world.executor.computed_tokens
    world.step()
    world.step()
    world.step()
    assert world.executor.computed_tokens - before <= 3 * 32


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves(policy: str) -> None:
    world = big(policy=policy, priority_scheduling=True, max_running=1)
    world.submit(submit("first", [48], 1))
    world.step()
    world.submit(submit("poor", [49, 49, 49], 2, priority=-5))
    for i in range(4 * AGEING):
        world.submit(submit(f"rich{i}", [1 + i], 4, priority=9))
        world.step()
    for _ in range(20 * AGEING):
        world.step()
        if world.outputs["poor"].finished:
            break
        world.submit(submit(f"more{world.plans}", [1 + world.plans % 40], 4, priority=9))
    assert world.outputs["poor"].finished


def test_priority_goes_first_when_enabled() -> None:
    for enabled, first in ((True, "b"), (False, "a")):
        world = big(priority_scheduling=enabled, max_running=1)
        world.submit(submit("a", [1, 2], 1, priority=0))
        world.submit(submit("b", [3, 4], 1, priority=5))
        world.step()
        assert next(r for r, o in world.outputs.items() if o.tokens) == first


def test_longest_output_first() -> None:
    world = big(policy="lof", max_running=1)
    world.submit(submit("a", [1, 2], 1))
    world.submit(submit("b", [3, 4], 9))
    world.step()
    assert [r for r, o in world.outputs.items() if o.tokens] == ["b"]


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


# ------------------------------------------------------------------ who is who


def test_a_repeated_submit_is_harmless() -> None:
    world = big()
    assert world.submit(submit("a", [1, 2, 3], 5)) is None
    assert world.submit(submit("a", [1, 2, 3], 5)) is None
    assert len(world.by_handle) == 1


def test_the_id_of_a_running_request_is_taken() -> None:
    world = big()
    world.submit(submit("a", [1, 2, 3], 5, attempt=1))
    for other in (submit("a", [1], 5, attempt=1, client="client:b"), submit("a", [1], 5, attempt=0)):
        error = world.submit(other)
        assert error is not None
        assert error.code == "duplicate_request_id"
    world.run()
    assert world.submit(submit("a", [1], 5, client="client:b")) is None


def test_a_higher_attempt_replaces() -> None:
    world = big()
    world.submit(submit("a", [1, 2, 3], 50, min_new=50))
    world.step()
    old = world.outputs["a"]
    request = submit("a", [1, 2, 3], 50, min_new=50, attempt=1)
    assert world.submit(request) is None
    assert old.end is not None
    assert old.end.error is not None
    assert old.end.error.code == "aborted"
    world.run()
    world.check_output(request)
    world.at_rest()


def test_a_full_queue_refuses() -> None:
    world = World.make(config(max_running=2, max_queued=3))
    errors = [world.submit(submit(f"r{i}", [1 + i], 5)) for i in range(6)]
    assert errors[:5] == [None] * 5
    assert errors[5] is not None
    assert errors[5].status == 503
    assert errors[5].retry_after is not None


def test_abort_tells_the_client_and_frees_the_room() -> None:
    world = big(max_running=1)
    world.submit(submit("running", [1, 2, 3], 500, min_new=500))
    world.submit(submit("waiting", [4, 5, 6], 500))
    world.step()
    for rid in ("running", "waiting"):
        world.scheduler.abort(AbortOf(rid=rid, client="client:a"), world.now)
        world.hear(world.scheduler.drain())
        end = world.outputs[rid].end
        assert end is not None
        assert end.reason == 0
        assert end.error is not None
        assert end.error.code == "aborted"
    world.run()
    world.at_rest()


def test_abort_by_group_and_all() -> None:
    world = big()
    for i in range(4):
        world.submit(submit(f"r{i}", [1 + i], 50, group="g" if i < 2 else ""))
    world.step()
    assert world.scheduler.abort(AbortOf(rid="g", client="client:a"), world.now) == 2
    assert world.scheduler.abort(AbortOf(all=True), world.now) == 2
    world.hear(world.scheduler.drain())
    world.run()
    world.at_rest()


def test_a_client_cannot_abort_what_is_not_its_own() -> None:
    world = big()
    world.submit(submit("a", [1], 50))
    assert world.scheduler.abort(AbortOf(rid="a", client="client:b"), 0.0) == 0
    assert world.scheduler.abort(AbortOf(all=True, client="client:b"), 0.0) == 0
    assert world.scheduler.abort(AbortOf(rid="a"), 0.0) == 1


def test_an_abort_that_comes_first_is_remembered_for_a_while() -> None:
    world = big()
    world.scheduler.abort(AbortOf(rid="a", client="client:a"), 0.0)
    error = world.submit(submit("a", [1], 5))
    assert error is not None
    assert error.code == "aborted"
    assert world.submit(submit("a", [1], 5, client="client:b")) is None
    world.scheduler.abort(AbortOf(rid="x", client="client:a"), 0.0)
    world.now = 100.0
    assert world.submit(submit("x", [1], 5)) is None


def test_an_abort_of_an_ended_request_leaves_nothing() -> None:
    world = big()
    world.submit(submit("a", [1], 2))
    world.run()
    world.scheduler.abort(AbortOf(rid="a", client="client:a"), world.now)
    assert world.submit(submit("a", [1], 5)) is None


# ------------------------------------------------------------------ faults


def test_a_failed_step_is_computed_again() -> None:
    world = big(chunked_prefill_size=8)
    requests = [submit(f"r{i}", PREFIX[: 20 + i], 12, min_new=12, seed=i) for i in range(5)]
    for request in requests:
        world.submit(request)
    for n in range(40):
        world.step(fail=n in (1, 2, 7, 12))
    world.run()
    for request in requests:
        world.check_output(request)
    world.at_rest()


def test_only_the_poisonous_request_ends_with_an_error() -> None:
    world = big()
    requests = [submit(f"r{i}", [1 + i] * 10, 30, min_new=30, seed=i, temperature=66.0 if i == 2 else 1.0) for i in range(5)]
    for request in requests:
        world.submit(request)
    world.run(poisoned=lambda row: row.sampling.temperature == 66.0)
    for request in requests:
        end = world.outputs[request.rid].end
        assert end is not None
        assert (end.reason == END_ERROR) == (request.rid == "r2")
        world.check_output(request)
    world.at_rest()


def test_a_broken_runner_ends_every_request() -> None:
    world = big()
    for i in range(3):
        world.submit(submit(f"r{i}", [1 + i] * 10, 30))
    world.run(fail=True)
    for output in world.outputs.values():
        assert output.end is not None
        assert output.end.reason == END_ERROR
    assert world.plans < 10 * SOLO_FAILURES
    world.at_rest()


def test_a_row_that_breaks_takes_its_unread_kv_along() -> None:
    world = big(chunked_prefill_size=4)
    requests = [submit(f"r{i}", PREFIX[:24], 12, min_new=12, seed=i, temperature=77.0 if i == 0 else 1.0) for i in range(3)]
    for request in requests:
        world.submit(request)
    world.run()
    end = world.outputs["r0"].end
    assert end is not None
    assert end.reason == END_ERROR
    for request in requests:
        world.check_output(request)
    world.at_rest()


def test_requests_survive_the_runner() -> None:
    world = big()
    requests = [submit(f"r{i}", PREFIX[: 30 + i], 12, min_new=12, seed=i) for i in range(5)]
    for request in requests:
        world.submit(request)
    for _ in range(4):
        world.step()
    world.plan()
    world.executor = PlanExecutor(20_000)
    world.scheduler.runner_lost()
    world.run()
    for request in requests:
        world.check_output(request)
    world.at_rest()


def test_a_smaller_runner_ends_what_no_longer_fits() -> None:
    world = big()
    world.submit(submit("big", PREFIX, 10))
    world.submit(submit("small", [1, 2], 2))
    world.scheduler.runner_lost(config(total_tokens=100))
    world.hear(world.scheduler.drain())
    end = world.outputs["big"].end
    assert end is not None
    assert end.error is not None
    assert end.error.code == "context_length_exceeded"
    world.run()
    world.at_rest()


def test_a_new_detokenizer_hears_everything() -> None:
    world = big()
    requests = [submit(f"r{i}", [1 + i], 4 if i else 1, min_new=1) for i in range(3)]
    for request in requests:
        world.submit(request)
    world.plan()
    world.result()
    world.by_handle.clear()
    events = world.scheduler.resync()
    assert sum(isinstance(e, Open) for e in events) == 3
    world.hear(events)
    assert world.outputs["r0"].end is not None
    world.run()
    for request in requests:
        world.check_output(request)
    world.at_rest()


def test_a_slip_is_mended_in_production() -> None:
    world = World.make(config(strict=False, total_tokens=100))
    world.submit(submit("a", [1, 2, 3], 30))
    world.step()
    world.scheduler.memory.pool.take(7)  # lost
    world.scheduler.maintain()
    world.audit()
    assert world.scheduler.stats(0.0).repaired_total == 1
    world.run()
    world.at_rest()


def test_a_result_that_answers_nothing_fails_the_step_only() -> None:
    world = World.make(config(strict=False))
    request = submit("a", [1, 2, 3], 10, min_new=10)
    world.submit(request)
    world.plan()
    result = world.executor.step()
    world.hear(world.scheduler.apply(StepResult(number=result.number, appended=b"", tokens=b""), 0.0))
    world.executor = PlanExecutor(256)
    world.run()
    world.check_output(request)


def test_a_page_written_by_two_plans_goes_when_the_first_fails() -> None:
    """Plan 1 writes three slots of a page, plan 2 the fourth and publishes it; the request is gone when plan 1 fails."""
    world = big(page_size=4, chunked_prefill_size=3)
    world.submit(submit("a", PREFIX[:20], 1))
    assert world.plan()
    assert world.plan()
    world.scheduler.abort(AbortOf(rid="a"), 0.0)
    world.hear(world.scheduler.drain())
    assert world.scheduler.stats(0.0).cached_tokens == 4
    world.result(fail=True)
    assert world.scheduler.stats(0.0).cached_tokens == 0
    world.run()
    request = submit("b", PREFIX[:20], 8)
    world.submit(request)
    world.run()
    assert world.outputs["b"].cached == 0
    world.check_output(request)
    world.at_rest()


def test_what_a_broken_row_would_have_written_is_not_shared() -> None:
    """The row ends in plan 1, so its chunk in plan 2 is never computed; a request that built on it starts again."""
    world = big(chunked_prefill_size=16, depth=3)
    world.submit(submit("a", PREFIX[:40], 1))
    assert world.plan()
    assert world.plan()
    follower = submit("b", [*PREFIX[:32], 7], 8)
    world.submit(follower)
    assert world.plan()
    first = world.executor.queue[0]
    world.executor.step()
    world.executor.rows[0].ended = True
    world.executor.memory[world.executor.memory == -1] = SPOILT  # what was never written is garbage, too
    end = RowEnd(row=0, reason=END_ERROR, error=ErrorInfo("NaN", status=500))
    zeros = pack_ids([0] * (len(first.rows) // 4))
    world.hear(world.scheduler.apply(StepResult(number=first.number, appended=zeros, tokens=b"", ends=[end]), 0.0))
    world.run()
    world.check_output(follower)
    assert world.outputs["b"].finished
    world.at_rest()


def test_a_prompt_that_loses_its_row_to_a_decode_is_planned_no_more() -> None:
    """Decodes need the last slots in the same plan in which a half-computed prompt was to go on."""
    world = World.make(config(total_tokens=40, conservativeness=0.01, chunked_prefill_size=6))
    requests = [submit(f"r{i}", [1 + i], 38, min_new=38, seed=i) for i in range(2)]
    requests.append(submit("long", [9] * 30, 2))
    for request in requests:
        world.submit(request)
    for _ in range(400):
        world.step()
        world.audit()
    world.run()
    for request in requests:
        world.check_output(request)
    world.at_rest()
