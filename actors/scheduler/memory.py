"""KvMemory: who owns each KV slot. Joins slot pool, radix tree and the requests' page tables.

::

    request's page table   | shared: owned by the tree, locked | own: slots[shared : nslots]      |
    law                    free + tree + Σ own == total                        (at any time)

A page enters the tree when the plan that fills it is sent (`publish`) or when it is known to be computed (`release`);
never while another plan can still write it. What is left over is freed: a later plan may overwrite it at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixcast.actors.scheduler.kv_slots import Slips, SlotPool
from radixcast.actors.scheduler.radix_cache import RadixCache
from radixcast.actors.scheduler.request import Request
from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.server_args import Eviction


class KvMemory:
    """Slots of all requests. Nothing here looks at queues, budgets or time."""

    def __init__(
        self, total_tokens: int, page_size: int, *, sharing: bool = True, eviction: Eviction = "lru", slips: Slips | None = None
    ) -> None:
        self.slips = slips or Slips()
        self.page_size = page_size
        self.sharing = sharing
        self.evicted_total = 0
        self.pool = SlotPool(total_tokens, page_size, self.slips)
        self.tree = RadixCache(page_size, eviction)

    @property
    def available(self) -> int:
        """Slots that `grow` could get: free or evictable."""
        return self.pool.free_tokens + self.tree.evictable

    def peek(self, request: Request, plan: int) -> tuple[int, int]:
        """(prefix hit that `attach` would give in `plan`, tokens of it that would stop being evictable)."""
        if not self.sharing:
            return 0, 0
        node, length = self.tree.peek(request.submit.namespace, request.tokens, request.match_limit, plan)
        return length, self.tree.unlocked_on_path(node)

    def attach(self, request: Request, plan: int) -> None:
        """Lock the longest prefix that `plan` may use and make it the start of the request's page table."""
        limit = request.match_limit if self.sharing else 0
        match = self.tree.acquire(request.submit.namespace, request.tokens, limit, plan, request.submit.priority)
        request.node = match.node
        request.slots = match.slots.copy()
        request.nslots = request.sent = request.shared = request.computed = match.length
        request.life_start = request.known

    def pages_missing(self, request: Request, upto: int) -> int:
        """Pages the request must get to have slots for its first `upto` tokens."""
        missing = upto - request.nslots
        return -(-missing // self.page_size) if missing > 0 else 0

    def grow(self, request: Request, upto: int) -> None:
        """Give slots for the first `upto` tokens, evicting what is needed. Raises OutOfSlots (check `available` before)."""
        pages = self.pages_missing(request, upto)
        if pages:
            self.give(request, self.take(pages))

    def take(self, pages: int) -> Int32Array:
        """Pages for any use: int32 [pages * page_size] slot ids. Raises OutOfSlots."""
        lacking = pages - self.pool.free_pages
        if lacking > 0:
            freed = self.tree.evict(lacking * self.page_size)
            self.evicted_total += len(freed)
            self.pool.give(freed)
        return self.pool.take(pages)

    @staticmethod
    def give(request: Request, slots: Int32Array) -> None:
        """Append taken `slots` (int32) to the request's page table."""
        end = request.nslots + len(slots)
        if end > len(request.slots):
            grown = np.empty(max(end, min(2 * len(request.slots), request.kv_cap) + 64), dtype=np.int32)
            grown[: request.nslots] = request.slots[: request.nslots]
            request.slots = grown
        request.slots[request.nslots : end] = slots
        request.nslots = end

    def publish(self, request: Request, upto: int, plan: int, depends: tuple[int, ...]) -> None:
        """Let the tree own the whole pages among the first `upto` tokens, which `plan` computes; they stay locked.

        When another request was faster the tree's copy is left alone, and this request keeps its own from there on: with a
        lock on a copy that it does not read, a lone request could need more slots than there are.
        """
        upto -= upto % self.page_size
        start = request.shared
        if not self.sharing or request.private or upto <= start or request.node is None or not request.node.alive:
            return
        tokens = request.tokens[start:upto]
        if self.tree.has_next(request.node, tokens):
            request.private = True
            return
        slots = request.slots[start:upto]
        priority = request.submit.priority
        request.node, _ = self.tree.extend(request.node, tokens, slots, plan, request.handle, depends, priority)
        request.shared = upto

    def release(self, request: Request, valid: int) -> None:
        """End the request's use of KV; what is known to be computed among its first `valid` tokens stays in the tree."""
        node = request.node
        if node is None:
            return
        start = request.shared
        upto = min(valid, request.computed)
        upto -= upto % self.page_size
        if self.sharing and node.alive and upto > start:
            tokens, slots = request.tokens[start:upto], request.slots[start:upto]
            node, refused = self.tree.extend(node, tokens, slots, priority=request.submit.priority)
            self.pool.give(refused)
            start = upto
        self.pool.give(request.slots[start : request.nslots])
        self.tree.release(node)
        request.forget_kv()

    def fail_plan(self, plan: int) -> None:
        """`plan` failed: what depends on its KV leaves the tree. Requests whose node is dead now must be released."""
        self._drop(self.tree.fail(plan))

    def fail_row(self, request: Request, plan: int) -> None:
        """The request's row broke in `plan`: what it writes from there on leaves the tree."""
        self._drop(self.tree.fail_row(request.handle, plan))

    def flush(self) -> None:
        """Empty the tree; nobody may hold a lock on more than a root."""
        self._drop(self.tree.clear())

    def check(self, requests: Iterable[Request]) -> bool:
        """The conservation law, by counting; `requests` are all that may own slots. False after a slip was reported."""
        tree = self.tree.evictable + self.tree.locked
        own = sum(r.nslots - r.shared for r in requests if r.node is not None)
        total = self.pool.free_tokens + tree + own
        if total == self.pool.total_tokens:
            return True
        self.slips.report(
            f"{self.pool.free_tokens} free + {tree} in the tree + {own} owned by requests != {self.pool.total_tokens} slots"
        )
        return False

    def owners(self, requests: Iterable[Request]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """int32 [pages]: how many owners (tree nodes, requests) each page has; the law wants 1, or 0 when it is free."""
        counts = np.zeros(self.pool.total_pages, dtype=np.int32)
        for slots in self._owned(requests):
            np.add.at(counts, slots[:: self.page_size] // self.page_size, 1)
        return counts

    def repair(self, requests: Iterable[Request]) -> None:
        """Make the free list what nobody owns."""
        self.pool.rebuild(self.owners(requests) > 0)
        nodes = list(self.tree.nodes())
        self.tree.evictable = sum(len(n.key) for n in nodes if n.refs == 0)
        self.tree.locked = sum(len(n.key) for n in nodes if n.refs)

    def _owned(self, requests: Iterable[Request]) -> Iterable[Int32Array]:
        for node in self.tree.nodes():
            yield node.slots
        for request in requests:
            if request.node is not None:
                yield request.slots[request.shared : request.nslots]

    def _drop(self, slots: Int32Array) -> None:
        if len(slots):
            self.pool.give(slots)
