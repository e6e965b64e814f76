"""Ids, aborts, failed steps, and peers that die."""

from __future__ import annotations

from fakes.plan_executor import SPOILT, PlanExecutor
from fakes.scheduler_world import World, big, config, submit
from radixcast.actors.scheduler.scheduler import SOLO_FAILURES
from radixcast.protocols.buffers import pack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.internal import (
    END_ERROR,
    AbortOf,
    Open,
    RowEnd,
    StepResult,
)

PREFIX = [1 + i % 49 for i in range(512)]


# ------------------------------------------------------------------ who is who


def test_a_repeated_submit_is_harmless() -> None:
    world = big()
    assert world.submit(submit("a", [1, 2, 3], 5)) is None
    assert world.submit(submit("a", [1, 2, 3], 5)) is None
    assert len(world.by_handle) == 1


def test_the_id_of_a_running_request_is_taken() -> None:
    world = big()
    world.submit(submit("a", [1, 2, 3], 5, attempt=1))
    error = world.submit(submit("a", [1], 5, attempt=0))
    assert error is not None
    assert error.code == "duplicate_request_id"
    world.run()
    assert world.submit(submit("a", [1], 5, attempt=0)) is None


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
        world.scheduler.abort(AbortOf(rid=rid, client="client:a"))
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
    assert world.scheduler.abort(AbortOf(rid="g", client="client:a")) == 2
    assert world.scheduler.abort(AbortOf(all=True)) == 2
    world.hear(world.scheduler.drain())
    world.run()
    world.at_rest()


def test_a_client_cannot_abort_what_is_not_its_own() -> None:
    world = big()
    world.submit(submit("a", [1], 50))
    assert world.scheduler.abort(AbortOf(rid="a", client="client:b")) == 0
    assert world.scheduler.abort(AbortOf(all=True, client="client:b")) == 0
    assert world.scheduler.abort(AbortOf(rid="a")) == 1


def test_exact_abort_leaves_the_group() -> None:
    world = big()
    for i, rid in enumerate(("g", "g_1", "g_2")):
        world.submit(submit(rid, [1 + i], 5, group="g", min_new=5))
    world.step()
    assert world.scheduler.abort(AbortOf(rid="g", client="client:a", exact=True)) == 1
    world.hear(world.scheduler.drain())
    world.run()
    assert [world.outputs[rid].end.error is None for rid in ("g", "g_1", "g_2")] == [False, True, True]  # type: ignore[union-attr]
    assert world.scheduler.abort(AbortOf(client="client:a")) == 0


def test_an_id_may_be_used_again_at_once() -> None:
    world = big()
    for rid in ("g", "g_1"):
        world.submit(submit(rid, [1, 2], 500, group="g", min_new=500))
    world.step()
    assert world.scheduler.abort(AbortOf(rid="g", client="client:a")) == 2
    world.hear(world.scheduler.drain())
    again = [submit(rid, [1, 2], 5, group="g", min_new=5) for rid in ("g", "g_1", "g_2")]
    for request in again:
        assert world.submit(request) is None
    world.run()
    for request in again:
        world.check_output(request)
    for _ in range(2):  # an id that has ended, and one that never was
        assert world.scheduler.abort(AbortOf(rid="g", client="client:a")) == 0
        assert world.submit(submit("g", [1], 5, group="g")) is None
        world.run()
        assert world.outputs["g"].end is not None
        assert world.outputs["g"].end.error is None
    world.at_rest()


def test_a_default_length_is_clipped_to_the_pool() -> None:
    world = World.make(config(total_tokens=64))
    refused = world.submit(submit("asked", [1] * 50, 128))
    assert refused is not None
    assert refused.code == "context_length_exceeded"
    clipped = submit("default", [1] * 50, 128, clip=True, min_new=128)
    assert world.submit(clipped) is None
    world.run()
    assert len(world.outputs["default"].tokens) == 14
    too_long = world.submit(submit("long", [1] * 65, 128, clip=True))
    assert too_long is not None
    assert too_long.param == "prompt"
    world.at_rest()


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
    world.scheduler.abort(AbortOf(rid="a"))
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
