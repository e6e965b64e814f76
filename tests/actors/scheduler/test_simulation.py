"""Thousands of random requests through the scheduler: everything ends, every token is right, every slot comes back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fakes.plan_executor import PlanExecutor
from fakes.scheduler_world import World, config, random_prompt, submit
from radixcast.actors.scheduler.scheduler import Scheduler
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.internal import AbortOf, Submit

SETTINGS: list[dict[str, Any]] = [
    {},
    {"page_size": 4, "policy": "lpm"},
    {"depth": 1, "policy": "dfs-weight", "eviction": "lfu"},
    {"row_gap": 1, "depth": 3, "page_size": 2},
    {"draft": 4, "policy": "lof", "eviction": "slru", "page_size": 3},
    {"radix_cache": False, "policy": "random"},
    {"chunked_prefill_size": -1, "priority_scheduling": True, "eviction": "priority"},
    {"force_retract_interval": 3, "max_step_tokens": 12},
    {"jump": 4, "draft": 2, "row_gap": 1, "depth": 3, "max_step_tokens": 20, "page_size": 2},
]


def simulate(seed: int, requests: int, settings: dict[str, Any], *, audit_every: int = 50) -> World:
    """Random traffic, failures and aborts over a pool that is too small for it."""
    rng = random.Random(seed)
    cfg = config(total_tokens=180, conservativeness=0.3, **settings)
    executor = PlanExecutor(
        cfg.total_tokens,
        drafts=lambda row, position: 1 + position % 4 if cfg.draft > 1 else 1,
        page_size=cfg.page_size,
        jumps=lambda row, position: position % 9,
    )
    world = World(Scheduler(cfg), executor, text_end=lambda rid: hash_of(rid) % 12 if hash_of(rid) % 3 == 0 else 1 << 30)
    stems = [[rng.randint(1, 49) for _ in range(rng.randint(4, 60))] for _ in range(6)]
    sent: list[Submit] = []
    turns = 0
    while len(sent) < requests or world.scheduler.live():
        turns += 1
        assert turns < 60 * requests + 1000, "no progress"
        room = len(sent) < requests and len(world.by_handle) < 80
        for _ in range(rng.choice((0, 0, 1, 3)) if room else 0):
            prompt = random_prompt(rng, stems, 80)
            rid = f"r{len(sent)}"
            new = rng.choice((0, 1, 4, 20, 60))
            request = submit(
                rid,
                prompt,
                new,
                ns=rng.randint(0, 1),
                seed=rng.randint(0, 99),
                priority=rng.randint(0, 3),
                min_new=rng.choice((0, 0, min(new, 3))),
                group=f"g{len(sent) // 3}",
                logprob_start=rng.choice((-1, -1, -1, 0, 3)),
                grammar=rng.choice(("", "", "", "x", "y", f"z{len(sent)}")),
                jump_forward=rng.random() < 0.8,
            )
            assert world.submit(request) is None
            sent.append(request)
        if rng.random() < 0.02 and sent:
            name = rng.choice((sent[-1].rid, sent[-1].group))
            world.scheduler.abort(AbortOf(rid=name))
            world.hear(world.scheduler.drain())
        grammars(world, rng)
        if rng.random() < 0.7:
            world.plan()
        if world.executor.queue and rng.random() < 0.7:
            world.result(fail=rng.random() < 0.01)
        world.finish(lambda: rng.random() < 0.5)
        if turns % audit_every == 0:
            world.audit()
    for _ in range(len(world.executor.queue)):
        world.result()
    world.at_rest()
    for request in sent:
        assert world.outputs[request.rid].finished
        world.check_output(request)
    return world


def grammars(world: World, rng: random.Random) -> None:
    """The runner's side thread builds what was asked for; now and then it drops what no row uses."""
    world.ask()
    if world.asked and rng.random() < 0.5:
        world.answer(error=ErrorInfo("too hard", status=400) if rng.random() < 0.02 else None)
    if rng.random() < 0.01:
        world.executor.prepared &= {row.open.grammar for row in world.executor.rows.values()}


def hash_of(rid: str) -> int:
    """Deterministic, unlike hash()."""
    return random.Random(rid).randrange(1 << 30)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_small_simulation(settings: dict[str, Any]) -> None:
    simulate(1, 250, settings, audit_every=5)


def test_ten_thousand_requests() -> None:
    world = simulate(2, 10_000, {})
    stats = world.scheduler.stats(world.now)
    assert 10_000 <= stats.requests_total < 10_003  # they come up to three at a time
    assert stats.retractions_total > 0
    assert stats.cached_tokens_total > 0
    assert stats.repaired_total == 0
