"""Scheduler and the real row tables of the runner: the same tokens alone, together, cached, chunked, retracted and resumed."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.scheduler_world import config, submit
from radixcast.actors.model_runner.free import FreeRunner
from radixcast.actors.scheduler.scheduler import Scheduler
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.internal import Capacity, Submit, TokenDeltas

CAPACITY = Capacity(total_tokens=300, max_running=8, context_length=256)


def serve(requests: list[Submit], **changes: Any) -> tuple[dict[str, list[int]], Scheduler]:
    """Tokens of each request (those of an earlier life included)."""
    scheduler = Scheduler(config(total_tokens=300, context_length=256, **changes))
    runner = FreeRunner(CAPACITY, vocab_size=97)
    tokens: dict[int, list[int]] = {}
    rids = {i + 1: r for i, r in enumerate(requests)}
    for request in requests:
        assert scheduler.submit(request, 0.0) is None
    scheduler.drain()
    plans = []
    while scheduler.live():
        while (plan := scheduler.schedule(0.0)) is not None:
            plans.append(plan)
        result = runner.execute(plans.pop(0))
        assert result.error is None
        for event in scheduler.apply(result, 0.0):
            assert isinstance(event, TokenDeltas)
            ids = unpack_ids(event.tokens).tolist()
            at = 0
            for handle, count in zip(unpack_ids(event.handles).tolist(), unpack_ids(event.counts).tolist(), strict=True):
                tokens.setdefault(handle, []).extend(ids[at : at + count])
                at += count
            for end in event.ends:
                assert end.error is None
                scheduler.finish(end.handle, len(tokens.get(end.handle, ())) + len(rids[end.handle].output_ids) // 4, 0.0)
    for plan in plans:
        scheduler.apply(runner.execute(plan), 0.0)
    return {r.rid: unpack_ids(r.output_ids).tolist() + tokens.get(h, []) for h, r in rids.items()}, scheduler


def requests(**fields: Any) -> list[Submit]:
    stem = [1 + i % 90 for i in range(40)]
    return [submit(f"r{i}", [*stem[: 10 * (i % 4)], 50 + i], 30, seed=i, eos_ids=(13,), **fields) for i in range(10)]


ALONE = {r.rid: serve([r])[0][r.rid] for r in requests()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"chunked_prefill_size": 4},
        {"chunked_prefill_size": -1},
        {"depth": 1},
        {"page_size": 4, "policy": "lpm"},
        {"force_retract_interval": 2},
        {"conservativeness": 0.01, "max_running": 8},
        {"radix_cache": False},
        {"row_gap": 1, "depth": 3},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_schedule(changes: dict[str, Any]) -> None:
    together, scheduler = serve(requests(), **changes)
    assert together == ALONE
    assert scheduler.stats(0.0).repaired_total == 0
    assert scheduler.flush_cache(0.0)[0]
    assert scheduler.memory.pool.free_pages == scheduler.memory.pool.total_pages


def test_resumed_requests_give_the_same_tokens() -> None:
    halves = [
        submit(r.rid, unpack_ids(r.prompt_ids).tolist(), 30, seed=i, eos_ids=(13,), output_ids=pack_ids(ALONE[r.rid][:7]))
        for i, r in enumerate(requests())
    ]
    assert serve(halves)[0] == ALONE


def test_the_prompt_only() -> None:
    tokens, scheduler = serve([submit("a", [1, 2, 3, 4], 0)])
    assert tokens == {"a": []}
    assert scheduler.stats(0.0).cached_tokens == 4
