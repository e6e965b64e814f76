"""RadixCache: a compressed radix tree from token prefixes to the KV slots that hold them.

::

    roots: namespace ─► root ── [t0 … t7 | slots] ─┬─ [t8 … t12 | slots]
                                                   └─ [t8' … | slots]

* A node spans whole pages of tokens and owns one KV slot for each. Tokens are compared exactly; nothing is hashed.
* `refs` of a node is the number of users whose locked node lies in its subtree, itself included; > 0 protects it.
* A node carries the number of the plan that writes its KV. Plans execute in order, so a node can be used by any plan
  with a higher number, also before it has been computed. When a plan fails, what it wrote is removed with all below it.
* A split keeps the node object as the *lower* half, so a user's locked node stays the end of its prefix.

Knows nothing about requests, the slot pool or time (`last_used` counts operations). Method: RadixAttention (Zheng et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixcast.actors.scheduler.eviction import LeafHeap
from radixcast.actors.scheduler.kv_slots import NO_SLOTS
from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.server_args import Eviction

PageKey = int | bytes


class Node:
    """A span of tokens, the KV slots that hold them, and who needs it."""

    __slots__ = (
        "alive",
        "children",
        "heaped",
        "hits",
        "key",
        "last_used",
        "namespace",
        "parent",
        "plan",
        "priority",
        "refs",
        "slots",
        "writers",
    )

    def __init__(self, parent: Node | None, namespace: str, key: Int32Array, slots: Int32Array, plan: int) -> None:
        self.parent = parent
        self.namespace = namespace
        self.key = key
        self.slots = slots
        self.plan = plan
        self.children: dict[PageKey, Node] = {}
        self.refs = 0
        self.last_used = 0
        self.hits = 0
        self.priority = 0
        self.heaped = False
        self.alive = True
        self.writers: tuple[tuple[int, int], ...] = ()
        """(plan, handle) pairs that the node's KV depends on, as long as those plans are in flight."""

    @property
    def evictable(self) -> bool:
        """A leaf that nobody uses (roots are never evicted, only dropped)."""
        return self.alive and self.refs == 0 and not self.children and self.parent is not None


@dataclass(frozen=True)
class Match:
    """A locked prefix."""

    node: Node
    length: int
    slots: Int32Array
    """int32 [length]."""


class RadixCache:
    """The tree. `evictable` and `locked` count its tokens without and with users."""

    def __init__(self, page_size: int, eviction: Eviction = "lru") -> None:
        self.page_size = page_size
        self.evictable = 0
        self.locked = 0
        self._roots: dict[str, Node] = {}
        self._leaves: LeafHeap[Node] = LeafHeap(eviction)
        self._clock = 0
        self._written: dict[int, list[tuple[int, Node]]] = {}
        """In-flight plan -> (handle, node) of what it writes."""

    # ---------------------------------------------------------------- looking

    def peek(self, namespace: str, tokens: Int32Array, limit: int, below_plan: int) -> tuple[Node | None, int]:
        """The longest usable prefix of tokens[:limit] (int32), without locking, splitting or touching: (deepest node, length).

        Usable is what plans with numbers < below_plan have written. The match may end inside the node.
        """
        node = self._roots.get(namespace)
        depth = 0
        limit -= limit % self.page_size
        while node is not None and depth < limit:
            child = node.children.get(self._page_key(tokens, depth))
            if child is None or child.plan >= below_plan:
                break
            same = self._common(child.key, tokens[depth:limit])
            depth += same
            node = child
            if same < len(child.key):
                break
        return node, depth

    def has_next(self, node: Node, tokens: Int32Array) -> bool:
        """Whether the tree has the first page of `tokens` (int32) below `node` already."""
        return self._page_key(tokens, 0) in node.children

    def unlocked_on_path(self, node: Node | None) -> int:
        """Tokens from the root to `node` that nobody uses yet (they stop being evictable when the path is locked)."""
        total = 0
        while node is not None and node.refs == 0:
            total += len(node.key)
            node = node.parent
        return total

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, in no particular order."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    # ---------------------------------------------------------------- using

    def acquire(self, namespace: str, tokens: Int32Array, limit: int, below_plan: int, priority: int = 0) -> Match:
        """Lock the longest usable prefix of tokens[:limit] (int32), see `peek`. Undo with `release`."""
        self._clock += 1
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(None, namespace, NO_SLOTS, NO_SLOTS, 0)
        depth = 0
        limit -= limit % self.page_size
        parts: list[Int32Array] = []
        while depth < limit:
            child = node.children.get(self._page_key(tokens, depth))
            if child is None or child.plan >= below_plan:
                break
            same = self._common(child.key, tokens[depth:limit])
            if same < len(child.key):
                child = self._split(child, same)
            self._touch(child, priority)
            child.hits += 1
            parts.append(child.slots)
            depth += same
            node = child
        self._lock(node, None)
        return Match(node, depth, np.concatenate(parts) if parts else NO_SLOTS)

    def extend(
        self,
        node: Node,
        tokens: Int32Array,
        slots: Int32Array,
        plan: int = 0,
        handle: int = 0,
        depends: tuple[int, ...] = (),
        priority: int = 0,
    ) -> tuple[Node, Int32Array]:
        """Put the whole pages (tokens, slots: int32 [n * page_size]) below the locked `node`; the lock moves to their end.

        `plan` is the plan that writes the last of them (0: all are computed), `depends` other plans in flight that must
        succeed too. Returns the new end and those of `slots` that the tree did *not* take, because it has these tokens already.
        """
        self._clock += 1
        start, depth, end = node, 0, len(tokens)
        refused: list[Int32Array] = []
        while depth < end:
            child = node.children.get(self._page_key(tokens, depth))
            if child is None:
                node = self._add(node, tokens[depth:].copy(), slots[depth:].copy(), plan, handle, depends)
                self._touch(node, priority)
                break
            same = self._common(child.key, tokens[depth:])
            if same < len(child.key):
                child = self._split(child, same)
            self._touch(child, priority)
            refused.append(slots[depth : depth + same])
            depth += same
            node = child
        self._lock(node, start)
        return node, np.concatenate(refused) if refused else NO_SLOTS

    def release(self, node: Node) -> None:
        """Give up the lock on `node` and its path (also when the node itself has been removed since)."""
        current: Node | None = node
        while current is not None:
            current.refs -= 1
            if current.refs == 0 and current.alive:
                self.locked -= len(current.key)
                self.evictable += len(current.key)
                self._leaves.offer(current)
            parent = current.parent
            if parent is None:
                self._drop_root(current)
            current = parent

    # ---------------------------------------------------------------- shrinking

    def evict(self, tokens: int) -> Int32Array:
        """Give up at least `tokens` tokens, or all that is evictable: their slots (int32). A leaf is cut from its end."""
        freed: list[Int32Array] = []
        missing = tokens
        while missing > 0 and (node := self._leaves.pop()) is not None:
            length = len(node.key)
            cut = min(length, missing + -missing % self.page_size)
            freed.append(node.slots[length - cut :])
            self.evictable -= cut
            missing -= cut
            if cut < length:
                node.key, node.slots = node.key[: length - cut], node.slots[: length - cut]
                self._leaves.offer(node)
            else:
                self._detach(node)
        return np.concatenate(freed) if freed else NO_SLOTS

    def settle(self, plan: int) -> None:
        """`plan` succeeded: what it wrote is as good as anything."""
        for _, node in self._written.pop(plan, ()):
            node.writers = tuple(w for w in node.writers if w[0] != plan)

    def fail(self, plan: int) -> Int32Array:
        """`plan` failed: remove what depends on it, and all below. Their slots (int32); locks on them can still be released."""
        return self._remove([node for _, node in self._written.pop(plan, ())])

    def fail_row(self, handle: int, plan: int) -> Int32Array:
        """One request's row broke in `plan`: remove what that request writes from there on. Their slots (int32)."""
        return self._remove([n for p, pairs in self._written.items() if p >= plan for h, n in pairs if h == handle])

    def clear(self) -> Int32Array:
        """Remove every node; all slots (int32). Locks stay valid to release."""
        tops = [child for root in self._roots.values() for child in root.children.values()]
        self._written.clear()
        return self._remove(tops)

    # ---------------------------------------------------------------- inside

    def _page_key(self, tokens: Int32Array, at: int) -> PageKey:
        return int(tokens[at]) if self.page_size == 1 else tokens[at : at + self.page_size].tobytes()

    def _common(self, a: Int32Array, b: Int32Array) -> int:
        """Length of the common prefix in tokens, cut to whole pages."""
        n = min(len(a), len(b))
        differ = a[:n] != b[:n]
        at = int(differ.argmax())
        same = at if differ[at] else n
        return same - same % self.page_size

    def _touch(self, node: Node, priority: int) -> None:
        node.last_used = self._clock
        node.priority = max(node.priority, priority)

    def _lock(self, node: Node, until: Node | None) -> None:
        """Add a user on the path from `node` up to, but without, `until`."""
        current: Node | None = node
        while current is not until and current is not None:
            if current.refs == 0:
                self.evictable -= len(current.key)
                self.locked += len(current.key)
            current.refs += 1
            current = current.parent

    def _add(self, parent: Node, key: Int32Array, slots: Int32Array, plan: int, handle: int, depends: tuple[int, ...]) -> Node:
        node = Node(parent, parent.namespace, key, slots, plan)
        parent.children[self._page_key(key, 0)] = node
        self.evictable += len(key)
        if plan:
            node.writers = tuple((p, handle) for p in (*depends, plan))
            self._register(node)
        return node

    def _register(self, node: Node) -> None:
        for plan, handle in node.writers:
            self._written.setdefault(plan, []).append((handle, node))

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens; `node` becomes the lower half, the new upper half is returned."""
        assert node.parent is not None
        upper = Node(node.parent, node.namespace, node.key[:at], node.slots[:at], node.plan)
        upper.refs, upper.last_used, upper.hits, upper.priority = node.refs, node.last_used, node.hits, node.priority
        upper.writers = node.writers
        self._register(upper)
        node.parent.children[self._page_key(upper.key, 0)] = upper
        node.key, node.slots, node.parent = node.key[at:], node.slots[at:], upper
        upper.children[self._page_key(node.key, 0)] = node
        return upper

    def _detach(self, node: Node) -> None:
        """Take an empty or dead node out of its parent; the parent may become an evictable leaf."""
        parent = node.parent
        assert parent is not None
        node.alive = False
        del parent.children[self._page_key(node.key, 0)]
        self._leaves.offer(parent)
        if parent.parent is None:
            self._drop_root(parent)

    def _drop_root(self, root: Node) -> None:
        if root.refs == 0 and not root.children and self._roots.get(root.namespace) is root:
            del self._roots[root.namespace]

    def _remove(self, tops: list[Node]) -> Int32Array:
        """Remove the subtrees of `tops` (which may overlap)."""
        freed: list[Int32Array] = []
        for top in tops:
            if not top.alive:
                continue
            self._detach(top)
            stack = [top]
            while stack:
                node = stack.pop()
                node.alive = False
                stack.extend(node.children.values())
                freed.append(node.slots)
                if node.refs:
                    self.locked -= len(node.key)
                else:
                    self.evictable -= len(node.key)
        return np.concatenate(freed) if freed else NO_SLOTS
