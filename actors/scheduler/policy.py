"""WaitingQueue: requests without a row, and in which order they are looked at.

Retracted requests come first, in order of arrival: they have been promised a stream. Then, by policy:

=============  ==========================================================================================
``fcfs``       order of arrival
``lpm``        longest prefix match first
``dfs-weight`` depth-first through the tree, heaviest subtree (most waiting requests) first
``lof``        longest output (max_new_tokens) first
``random``     shuffled
=============  ==========================================================================================

With priority scheduling the priority comes before all that. Nobody starves: every `AGEING`-th request admitted is the
one that has waited longest, whatever the policy and the priorities say.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator

from radixcast.actors.scheduler.grammar_gate import GrammarGate
from radixcast.actors.scheduler.memory import KvMemory
from radixcast.actors.scheduler.radix_cache import Node
from radixcast.actors.scheduler.request import Request
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.server_args import Policy

AGEING = 8
RANKED = 256
"""Cache-aware policies rank so many requests, in order of arrival: each rank costs a walk through the tree."""


class WaitingQueue:
    """Keeps arrival order; `candidates` applies policy, priority and ageing."""

    def __init__(self, policy: Policy, *, priorities: bool = False, seed: int = 0) -> None:
        self.gate = GrammarGate()
        """Requests that can't be looked at yet, because the runner does not have their grammar."""
        self._policy = policy
        self._priorities = priorities
        self._random = random.Random(seed)
        self._new: dict[int, Request] = {}
        self._retracted: dict[int, Request] = {}
        self._since_oldest = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._retracted)

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(self._retracted.values(), self._new.values())

    @property
    def retracted(self) -> int:
        """Requests that have had a row before."""
        return len(self._retracted)

    def push(self, request: Request, *, retracted: bool = False) -> None:
        """Add at the end, or among the retracted ones in order of arrival; or hold until its grammar is there."""
        if request.grammar_key and not request.grammar_ready:
            self.gate.hold(request, retracted=retracted)
        elif retracted:
            self._retracted[request.handle] = request
            self._retracted = dict(sorted(self._retracted.items()))
        else:
            self._new[request.handle] = request

    def remove(self, request: Request) -> None:
        """Take out, whether it is in or not."""
        self._new.pop(request.handle, None)
        self._retracted.pop(request.handle, None)
        if request.grammar_key:
            self.gate.remove(request)

    def runner_lost(self) -> tuple[list[Request], ErrorInfo]:
        """No grammar is there any more: who counted on one is held again. Returns who is refused, and why."""
        refused = self.gate.runner_lost()
        for waiting, retracted in ((self._retracted, True), (self._new, False)):
            for request in [r for r in waiting.values() if r.grammar_key]:
                del waiting[request.handle]
                self.gate.hold(request, retracted=retracted)
        return refused

    def admitted(self, request: Request) -> None:
        """Take out because it got a row; drives ageing."""
        if self._new and next(iter(self._new)) == request.handle:
            self._since_oldest = 0
        elif request.handle in self._new:
            self._since_oldest += 1
        self.remove(request)

    def candidates(self, memory: KvMemory, plan: int, most: int) -> list[Request]:
        """Up to `most` requests, best first."""
        first = list(itertools.islice(self._retracted.values(), most))
        most -= len(first)
        if most <= 0 or not self._new:
            return first
        ranked = self._by_policy(memory, plan, most)
        if self._since_oldest >= AGEING - 1:
            oldest = next(iter(self._new.values()))
            ranked = [oldest, *(r for r in ranked if r is not oldest)]
        return first + ranked[:most]

    def _by_policy(self, memory: KvMemory, plan: int, most: int) -> list[Request]:
        waiting: Iterable[Request] = self._new.values()
        if self._policy == "fcfs" and not self._priorities:
            return list(itertools.islice(waiting, most))
        if self._policy == "lof":
            waiting = sorted(waiting, key=lambda r: r.prompt_len - r.max_position)
        elif self._policy == "random":
            waiting = self._random.sample(list(waiting), len(self._new))
        elif self._policy in ("lpm", "dfs-weight"):
            head = list(itertools.islice(waiting, RANKED))
            rank = by_longest_match if self._policy == "lpm" else by_subtree_weight
            waiting = itertools.chain(rank(head, memory, plan), itertools.islice(waiting, RANKED, None))
        if self._priorities:
            return heapq.nsmallest(most, waiting, key=lambda r: -r.submit.priority)
        return list(itertools.islice(waiting, most))


def by_longest_match(requests: list[Request], memory: KvMemory, plan: int) -> list[Request]:
    """Longest usable prefix first; equal ones in the given order."""
    return sorted(requests, key=lambda r: -memory.peek(r, plan)[0])


def by_subtree_weight(requests: list[Request], memory: KvMemory, plan: int) -> list[Request]:
    """Depth-first order, heaviest child first: requests of one subtree stay together (Zheng et al. 2024, §3).

    A node weighs as much as the requests that match in its subtree; those that match at the node itself come after its
    children's, and those that match nothing last.
    """
    at: dict[Node, list[Request]] = defaultdict(list)
    weight: dict[Node, int] = defaultdict(int)
    children: dict[Node, dict[Node, None]] = defaultdict(dict)
    roots: dict[Node, None] = {}
    unmatched: list[Request] = []
    for request in requests:
        node, length = memory.tree.peek(request.submit.namespace, request.tokens, request.match_limit, plan)
        if node is None or length == 0 or not memory.sharing:
            unmatched.append(request)
            continue
        at[node].append(request)
        current: Node | None = node
        while current is not None:
            weight[current] += 1
            if current.parent is None:
                roots[current] = None
            else:
                children[current.parent][current] = None
            current = current.parent
    ordered: list[Request] = []
    stack: list[tuple[Node, bool]] = [(n, False) for n in sorted(roots, key=lambda n: weight[n])]
    while stack:
        node, visited = stack.pop()
        if visited:
            ordered.extend(at.get(node, ()))
            continue
        stack.append((node, True))
        stack.extend((n, False) for n in sorted(children.get(node, ()), key=lambda n: weight[n]))
    return ordered + unmatched
