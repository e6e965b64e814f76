"""The small parts: slot pool, eviction orders, budgets, queue order, windows, registry."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.scheduler_world import int32, submit
from radixcast.actors.scheduler.budget import Claim, NewTokenRatio, reserve, split_chunk
from radixcast.actors.scheduler.config import CHUNK_CPU, CHUNK_CUDA, SchedulerConfig
from radixcast.actors.scheduler.kv_slots import BookkeepingError, OutOfSlots, Slips, SlotPool
from radixcast.actors.scheduler.memory import KvMemory
from radixcast.actors.scheduler.policy import AGEING, WaitingQueue
from radixcast.actors.scheduler.radix_cache import RadixCache
from radixcast.actors.scheduler.registry import Claim as Meaning
from radixcast.actors.scheduler.registry import Registry
from radixcast.actors.scheduler.request import Request
from radixcast.actors.scheduler.stats import Meter, Window
from radixcast.protocols.internal import AbortOf, Capacity
from radixcast.protocols.server_args import Eviction, Policy, ServerArgs

# ------------------------------------------------------------------ pool and tree


def test_pool_hands_out_whole_aligned_pages() -> None:
    pool = SlotPool(11, 4, Slips(strict=True))
    assert pool.total_tokens == 8
    slots = pool.take(2)
    assert sorted(slots.tolist()) == list(range(8))
    assert (slots[::4] % 4 == 0).all()
    with pytest.raises(OutOfSlots):
        pool.take(1)


def test_freeing_twice_is_a_slip() -> None:
    strict, lenient = SlotPool(4, 1, Slips(strict=True)), SlotPool(4, 1, Slips())
    for pool in (strict, lenient):
        slots = pool.take(2)
        pool.give(slots)
    with pytest.raises(BookkeepingError):
        strict.give(slots)
    lenient.give(slots)
    assert lenient.free_pages == 4
    assert sorted(lenient.take(4).tolist()) == [0, 1, 2, 3]


def grown(eviction: Eviction) -> RadixCache:
    """Four leaves of one token; `hits` and `priority` grow to the right, use goes to the left."""
    tree = RadixCache(1, eviction)
    for i in range(4):
        match = tree.acquire("", int32([]), 0, 1)
        node, _ = tree.extend(match.node, int32([i]), int32([i]), priority=i)
        tree.release(node)
    for i in (3, 2, 1, 0):
        for _ in range(i):
            tree.release(tree.acquire("", int32([i]), 1, 1).node)
    return tree


@pytest.mark.parametrize(
    ("eviction", "order"),
    [("lru", [0, 3, 2, 1]), ("lfu", [0, 1, 2, 3]), ("slru", [0, 1, 3, 2]), ("priority", [0, 1, 2, 3])],
)
def test_eviction_orders(eviction: Eviction, order: list[int]) -> None:
    tree = grown(eviction)
    assert [int(tree.evict(1)[0]) for _ in range(4)] == order
    assert tree.evictable == 0


def test_a_long_leaf_is_cut_from_its_end() -> None:
    tree = RadixCache(2)
    match = tree.acquire("", int32([]), 0, 1)
    node, _ = tree.extend(match.node, int32([1, 2, 3, 4, 5, 6]), int32([10, 11, 12, 13, 14, 15]))
    tree.release(node)
    assert tree.evict(1).tolist() == [14, 15]
    assert tree.peek("", int32([1, 2, 3, 4, 5, 6]), 6, 1)[1] == 4


def test_a_node_is_used_only_by_later_plans() -> None:
    tree = RadixCache(1)
    match = tree.acquire("", int32([]), 0, 7)
    tree.extend(match.node, int32([1, 2]), int32([0, 1]), 7, handle=1)
    assert tree.peek("", int32([1, 2, 3]), 3, 7)[1] == 0
    assert tree.peek("", int32([1, 2, 3]), 3, 8)[1] == 2


def test_a_failed_plan_takes_everything_below_along() -> None:
    tree = RadixCache(1)
    first = tree.acquire("", int32([]), 0, 1).node
    first, _ = tree.extend(first, int32([1, 2]), int32([0, 1]), 1, handle=1)
    second = tree.acquire("", int32([1, 2, 3]), 3, 2).node
    second, _ = tree.extend(second, int32([3]), int32([2]), 2, handle=2)
    assert sorted(tree.fail(1).tolist()) == [0, 1, 2]
    assert not second.alive
    tree.release(first)
    tree.release(second)
    assert tree.locked == tree.evictable == 0


def test_empty_namespaces_are_forgotten() -> None:
    tree = RadixCache(1)
    for i in range(100):
        tree.release(tree.acquire(f"salt{i}", int32([1]), 1, 1).node)
    assert not tree._roots


# ------------------------------------------------------------------ budgets


@given(
    st.lists(st.tuples(st.integers(-3, 0), st.integers(1, 2000)), max_size=12),
    st.integers(1, 1000),
)
def test_the_chunk_budget_is_spent_and_never_overdrawn(items: list[tuple[int, int]], budget: int) -> None:
    claims = [Claim(rank, remaining, order) for order, (rank, remaining) in enumerate(items)]
    grants = split_chunk(claims, budget)
    assert sum(grants) == min(budget, sum(c.remaining for c in claims))
    assert all(0 <= g <= c.remaining for g, c in zip(grants, claims, strict=True))
    if claims:
        assert grants[0] >= min(claims[0].remaining, budget // 2), "the oldest has half"


def test_reserve_counts_what_is_known_and_a_share_of_what_may_come() -> None:
    request = Request(1, submit("a", [1] * 10, 100), 4096, 0.0)
    assert reserve(request, 0.5) == 10 + 50
    assert reserve(request, 0.0) == 10
    huge = Request(2, submit("b", [1], 1_000_000), 2_000_000, 0.0)
    assert reserve(huge, 1.0) == 1 + 4096


def test_new_token_ratio_decays_rises_and_resets() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == pytest.approx(0.7)
    for _ in range(1000):
        ratio.step()
    assert ratio.value == pytest.approx(0.7 * 0.14)
    ratio.retracted([Request(1, submit("a", [1], 10), 100, 0.0)])
    assert ratio.value == 1.0
    ratio.idle()
    assert ratio.value == pytest.approx(0.7)


def test_config_from_arguments() -> None:
    capacity = Capacity(total_tokens=100, max_running=3, context_length=50)
    assert SchedulerConfig.resolve(ServerArgs(device="cpu"), capacity).chunked_prefill_size == CHUNK_CPU
    on_gpu = msgspec.structs.replace(capacity, device="cuda")
    assert SchedulerConfig.resolve(ServerArgs(device="auto"), on_gpu).chunked_prefill_size == CHUNK_CUDA
    config = SchedulerConfig.resolve(ServerArgs(disable_overlap_schedule=True, chunked_prefill_size=-1), capacity)
    assert (config.depth, config.chunked_prefill_size, config.max_running) == (1, -1, 3)


# ------------------------------------------------------------------ queue


def request(handle: int, prompt: list[int], **fields: int) -> Request:
    new = fields.pop("new", 8)
    return Request(handle, submit(f"r{handle}", prompt, new, **fields), 4096, 0.0)


def order(policy: Policy, requests: list[Request], memory: KvMemory | None = None, *, priorities: bool = False) -> list[int]:
    queue = WaitingQueue(policy, priorities=priorities, seed=3)
    for r in requests:
        queue.push(r)
    return [r.handle for r in queue.candidates(memory or KvMemory(64, 1), 1, 10)]


def cached(*prompts: list[int]) -> KvMemory:
    memory = KvMemory(64, 1)
    for i, prompt in enumerate(prompts):
        r = request(100 + i, [*prompt, 9])
        memory.attach(r, 1)
        memory.grow(r, len(prompt))
        r.computed = len(prompt)
        memory.release(r, len(prompt))
    return memory


def test_queue_orders() -> None:
    waiting = [request(1, [1, 2], new=1), request(2, [3, 4], new=9), request(3, [5], new=5)]
    assert order("fcfs", waiting) == [1, 2, 3]
    assert order("lof", waiting) == [2, 3, 1]
    assert sorted(order("random", waiting)) == [1, 2, 3]


def test_longest_prefix_match_first() -> None:
    memory = cached([1, 2, 3, 4])
    waiting = [request(1, [7, 8]), request(2, [1, 2, 7]), request(3, [1, 2, 3, 4, 5])]
    assert order("lpm", waiting, memory) == [3, 2, 1]


def test_dfs_weight_keeps_subtrees_together() -> None:
    memory = cached([1, 1], [1, 2], [5, 5])
    waiting = [
        request(1, [5, 5, 3]),
        request(2, [1, 1, 3]),
        request(3, [1, 2, 3]),
        request(4, [8]),
        request(5, [1, 2, 4]),
        request(6, [1, 9]),
    ]
    assert order("dfs-weight", waiting, memory) == [3, 5, 2, 6, 1, 4]


def test_priority_comes_before_policy_and_retracted_before_all() -> None:
    queue = WaitingQueue("fcfs", priorities=True)
    for r in (request(1, [1]), request(2, [1], priority=5), request(3, [1], priority=5)):
        queue.push(r)
    queue.push(request(9, [1], priority=-1), retracted=True)
    queue.push(request(8, [1], priority=-1), retracted=True)
    assert [r.handle for r in queue.candidates(KvMemory(64, 1), 1, 10)] == [8, 9, 2, 3, 1]
    assert queue.retracted == 2


def test_the_longest_waiting_gets_every_eighth_turn() -> None:
    queue = WaitingQueue("fcfs", priorities=True)
    queue.push(request(1, [1], priority=-9))
    for handle in range(2, 2 + AGEING):
        queue.push(request(handle, [1], priority=9))
    turns = []
    for _ in range(AGEING):
        first = queue.candidates(KvMemory(64, 1), 1, 1)[0]
        turns.append(first.handle)
        queue.admitted(first)
    assert turns[-1] == 1


# ------------------------------------------------------------------ numbers and names


def test_windows_forget() -> None:
    window = Window(10.0)
    window.add(0.0, 4, 1)
    window.add(5.0, 6, 1)
    assert window.sums(5.0) == (10, 2)
    assert window.rate(5.0) == 2.0
    assert window.sums(12.0) == (6, 1)
    assert window.sums(100.0) == (0, 0)
    assert window.rate(100.0) == 0.0


def test_retry_after_is_between_a_second_and_a_minute() -> None:
    meter = Meter()
    assert meter.retry_after(100, 0.0) == 1.0
    for i in range(5):
        meter.ended(1, float(i))
    assert 1.0 <= meter.retry_after(10, 4.0) <= 60.0
    assert meter.retry_after(100_000, 4.0) == 60.0


def test_ids_and_groups_are_those_of_a_client() -> None:
    registry = Registry()
    ours = [Request(i, submit(rid, [1], group="g"), 100, 0.0) for i, rid in enumerate(("g", "g_1"))]
    theirs = Request(2, submit("g", [1], group="g", client="client:b"), 100, 0.0)
    assert registry.claim(theirs.submit) == (Meaning.NEW, None)
    for request in (*ours, theirs):
        registry.add(request)
    assert registry.claim(theirs.submit) == (Meaning.REPEATED, theirs)
    assert registry.named_by(AbortOf(rid="g", client="client:a")) == ours
    assert registry.named_by(AbortOf(rid="g", client="client:a", exact=True)) == ours[:1]
    assert registry.named_by(AbortOf(rid="g_1", client="client:b")) == []
    assert registry.named_by(AbortOf(all=True, client="client:b")) == [theirs]
    assert registry.named_by(AbortOf(rid="g")) == [*ours, theirs]
    registry.remove(ours[0])
    assert registry.claim(ours[0].submit) == (Meaning.NEW, None)
    assert registry.named_by(AbortOf(all=True)) == [ours[1], theirs]


def test_tokens_grow_with_the_output() -> None:
    r = request(1, [1, 2, 3], new=1000)
    for i in range(500):
        r.append(np.array([i], dtype=np.int32))
    assert r.output_ids.tolist() == list(range(500))
    assert r.tokens[:3].tolist() == [1, 2, 3]
