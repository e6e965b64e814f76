"""Radix tree + slot pool under any sequence of events: no slot lost, shared wrongly or freed twice."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes.plan_executor import PlanExecutor
from fakes.scheduler_world import World, config, int32, submit
from radixcast.actors.scheduler.kv_slots import Slips, SlotPool
from radixcast.actors.scheduler.radix_cache import Match, RadixCache
from radixcast.actors.scheduler.scheduler import Scheduler
from radixcast.protocols.internal import AbortOf, Submit

logging.getLogger("radixcast.scheduler").setLevel(logging.ERROR)

PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=14)
"""Two tokens only: prefixes meet all the time."""


class SchedulerMachine(RuleBasedStateMachine):
    """The whole scheduler, with plans in flight; the executor checks whose KV every row reads."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Submit] = []

    @initialize(
        page=st.integers(1, 4),
        gap=st.integers(0, 1),
        draft=st.sampled_from((1, 1, 3)),
        jump=st.sampled_from((1, 4, 8)),
        chunk=st.sampled_from((3, 16, -1)),
        policy=st.sampled_from(("fcfs", "lpm", "dfs-weight")),
        eviction=st.sampled_from(("lru", "lfu", "slru", "priority")),
        tokens=st.integers(36, 60),
    )
    def start(self, page: int, gap: int, draft: int, jump: int, chunk: int, policy: Any, eviction: Any, tokens: int) -> None:
        cfg = config(
            total_tokens=tokens,
            max_running=4,
            page_size=page,
            row_gap=gap,
            depth=2 + gap,
            draft=draft,
            jump=jump,
            chunked_prefill_size=chunk,
            policy=policy,
            eviction=eviction,
            conservativeness=0.1,
        )
        executor = PlanExecutor(
            cfg.total_tokens,
            drafts=lambda row, position: 1 + position % 3 if draft > 1 else 1,
            page_size=page,
            jumps=lambda row, position: position * 5 % 9,
        )
        self.world = World(Scheduler(cfg), executor)

    @rule(
        prompt=PROMPTS,
        new=st.sampled_from((*range(9), 20)),
        namespace=st.integers(0, 1),
        start=st.sampled_from((-1, -1, 0, 4)),
        grammar=st.sampled_from(("", "", "x", "y")),
    )
    def submit(self, prompt: list[int], new: int, namespace: int, start: int, grammar: str) -> None:
        broken = 77.0 if len(self.sent) % 11 == 10 else 1.0
        request = submit(
            f"r{len(self.sent)}", prompt, new, ns=namespace, logprob_start=start, temperature=broken, grammar=grammar
        )
        assert self.world.submit(request) is None
        self.sent.append(request)

    @rule(drop=st.sampled_from((False, False, False, True)))
    def grammar(self, drop: bool) -> None:
        self.world.ask()
        if self.world.asked:
            self.world.answer()
        elif drop:
            self.world.executor.prepared &= {row.open.grammar for row in self.world.executor.rows.values()}

    @rule()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.executor.queue)
    @rule(fail=st.sampled_from((False, False, False, True)))
    def result(self, fail: bool) -> None:
        self.world.result(fail=fail)

    @rule(which=st.integers(0, 3))
    def text_ends(self, which: int) -> None:
        outputs = list(self.world.by_handle.values())
        if outputs:
            output = outputs[which % len(outputs)]
            output.text_end = min(output.text_end, len(output.tokens))

    @rule()
    def finished(self) -> None:
        self.world.finish()

    @precondition(lambda self: self.sent)
    @rule(back=st.integers(0, 3))
    def abort(self, back: int) -> None:
        self.world.scheduler.abort(AbortOf(rid=self.sent[-1 - back % len(self.sent)].rid))
        self.world.hear(self.world.scheduler.drain())

    @rule(which=st.integers(0, 3))
    def retract(self, which: int) -> None:
        running = list(self.world.scheduler._batch)
        if running:
            self.world.scheduler._planner.retract(running[which % len(running)])

    @rule()
    def flush(self) -> None:
        done, _ = self.world.scheduler.flush_cache(self.world.now)
        assert done == (not self.world.scheduler.busy)

    @rule()
    def runner_dies(self) -> None:
        if len(self.sent) % 5 == 4:  # seldom
            self.world.executor.queue.clear()
            self.world.executor.rows.clear()
            self.world.executor.prepared.clear()
            self.world.asked.clear()
            self.world.scheduler.runner_lost()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if hasattr(self, "world"):
            self.world.audit()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run(2000)
        self.world.at_rest()
        for request in self.sent:
            self.world.check_output(request)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class TreeMachine(RuleBasedStateMachine):
    """RadixCache alone against a dictionary of every prefix that it should know."""

    def __init__(self) -> None:
        super().__init__()
        self.slips = Slips(strict=True)
        self.locks: list[Match] = []
        self.plan = 1

    @initialize(page=st.integers(1, 4), eviction=st.sampled_from(("lru", "lfu", "slru", "priority")))
    def start(self, page: int, eviction: Any) -> None:
        self.page = page
        self.pool = SlotPool(40 * page, page, self.slips)
        self.tree = RadixCache(page, eviction)
        self.owner: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Slot -> the prefix (namespace, tokens) whose last token's KV it holds."""

    @rule(tokens=PROMPTS, namespace=st.sampled_from(("a", "b")), in_flight=st.booleans())
    def insert(self, tokens: list[int], namespace: str, in_flight: bool) -> None:
        whole = len(tokens) - len(tokens) % self.page
        ids = int32(tokens[:whole])
        match = self.tree.acquire(namespace, ids, whole, 1 << 30)
        pages = (whole - match.length) // self.page
        if pages > self.pool.free_pages:
            self.pool.give(self.tree.evict((pages - self.pool.free_pages) * self.page))
        if pages == 0 or pages > self.pool.free_pages:
            self.tree.release(match.node)
            return
        slots = self.pool.take(pages)
        for i, slot in enumerate(slots.tolist()):
            self.owner[slot] = (namespace, tuple(tokens[: match.length + i + 1]))
        plan = self.plan if in_flight else 0
        node, refused = self.tree.extend(match.node, ids[match.length :], slots, plan, handle=plan)
        assert not len(refused), "a fresh match leaves nothing to refuse"
        self.locks.append(Match(node, whole, np.concatenate([match.slots, slots])))

    @rule(tokens=PROMPTS, namespace=st.sampled_from(("a", "b")))
    def match(self, tokens: list[int], namespace: str) -> None:
        node, length = self.tree.peek(namespace, int32(tokens), len(tokens), self.plan)
        match = self.tree.acquire(namespace, int32(tokens), len(tokens), self.plan)
        assert match.length == length
        assert length % self.page == 0
        assert node is None or match.node.plan < self.plan
        for i, slot in enumerate(match.slots.tolist()):
            assert self.owner[slot] == (namespace, tuple(tokens[: i + 1])), "matched another prefix's KV"
        self.locks.append(match)

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 5))
    def unlock(self, which: int) -> None:
        self.tree.release(self.locks.pop(which % len(self.locks)).node)

    @rule(pages=st.integers(1, 5))
    def evict(self, pages: int) -> None:
        before = self.tree.evictable
        freed = self.tree.evict(pages * self.page)
        assert len(freed) == min(pages * self.page, before)
        locked = {s for m in self.locks if m.node.alive for s in m.slots.tolist()}
        assert locked.isdisjoint(freed.tolist()), "evicted under a user"
        self.pool.give(freed)

    @rule(good=st.booleans())
    def plan_ends(self, good: bool) -> None:
        if good:
            self.tree.settle(self.plan)
        else:
            self.pool.give(self.tree.fail(self.plan))
        self.plan += 1

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert self.pool.free_tokens + self.tree.evictable + self.tree.locked == self.pool.total_tokens
        nodes = list(self.tree.nodes())
        slots = [s for n in nodes for s in n.slots.tolist()]
        assert len(set(slots)) == len(slots) == self.tree.evictable + self.tree.locked
        for node in nodes:
            assert len(node.key) == len(node.slots) > 0
            assert len(node.key) % self.page == 0

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            for lock in self.locks:
                self.tree.release(lock.node)
            self.pool.give(self.tree.evict(self.pool.total_tokens))
            assert self.pool.free_pages == self.pool.total_pages
            assert not self.tree._roots


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
