"""Which leaf of the radix tree goes first: four orders, and a lazy heap that keeps any of them in O(log n).

A leaf's key only ever grows (it is used again, hit again, its priority is raised), so an entry of the heap may be too
small but never too large: a popped entry whose key is stale goes back with the right one, and the least is the least.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from radixcast.protocols.server_args import Eviction

Key = tuple[int, ...]

PROTECTED_HITS = 2
"""SLRU: a node hit so often moves from the probation to the protected segment."""


class Leaf(Protocol):
    """What an order looks at."""

    last_used: int
    hits: int
    priority: int
    heaped: bool
    """Whether the heap has an entry for it; kept by the heap."""

    @property
    def evictable(self) -> bool:
        """Whether it may be evicted now."""


L = TypeVar("L", bound=Leaf)


def _lru(node: Leaf) -> Key:
    return (node.last_used,)


def _lfu(node: Leaf) -> Key:
    return (node.hits, node.last_used)


def _slru(node: Leaf) -> Key:
    return (int(node.hits >= PROTECTED_HITS), node.last_used)


def _priority(node: Leaf) -> Key:
    return (node.priority, node.last_used)


ORDERS: dict[Eviction, Callable[[Leaf], Key]] = {"lru": _lru, "lfu": _lfu, "slru": _slru, "priority": _priority}
"""Sort keys; the least is evicted first."""


class LeafHeap(Generic[L]):
    """Evictable leaves, least first. Holds at most one entry a node; entries of nodes no longer evictable are dropped."""

    def __init__(self, eviction: Eviction) -> None:
        self._key = ORDERS[eviction]
        self._heap: list[tuple[Key, int, L]] = []
        self._serial = itertools.count()

    def offer(self, node: L) -> None:
        """`node` may have become evictable."""
        if node.evictable and not node.heaped:
            node.heaped = True
            heapq.heappush(self._heap, (self._key(node), next(self._serial), node))

    def pop(self) -> L | None:
        """The leaf to evict next, taken off the heap (offer it again if it stays); None when nothing is evictable."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.heaped = False
            if not node.evictable:
                continue
            if key == self._key(node):
                return node
            self.offer(node)
        return None

    def clear(self) -> None:
        """Forget all entries."""
        for _, _, node in self._heap:
            node.heaped = False
        self._heap.clear()
