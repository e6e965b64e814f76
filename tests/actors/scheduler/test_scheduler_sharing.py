"""Who shares what with whom, and who waits for whom."""

from __future__ import annotations

import pytest

from fakes.scheduler_world import big, submit
from radixcast.actors.scheduler.policy import AGEING

PREFIX = [1 + i % 49 for i in range(512)]
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")


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
