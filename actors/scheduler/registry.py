"""Registry: who is who. Request ids, groups, duplicates, and aborts that come before their request.

An id names one live request of the node. The same (rid, attempt) from the same client is a repetition and harmless; a
higher attempt replaces the older one; anything else is a duplicate.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from enum import Enum

from radixcast.actors.scheduler.request import Request
from radixcast.protocols.internal import AbortOf, Submit

TOMBSTONE_SECONDS = 2.0
"""How long an abort waits for its request. Links keep order and the tokenizer stops what it still holds, so a request comes
after its abort only when a tokenizer died between; an id used again later is another request."""
ENDED_SECONDS = 60.0
"""How long an id counts as ended: its late abort means nothing."""
MOST_REMEMBERED = 4096
"""Most ids remembered in each way; the oldest goes first."""


class Claim(Enum):
    """What a Submit's (client, rid, attempt) means."""

    NEW = "new"
    REPEATED = "repeated"
    REPLACES = "replaces"
    DUPLICATE = "duplicate"
    ABORTED = "aborted"


class _Memory:
    """Keys remembered for so many seconds, MOST_REMEMBERED of them at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()

    def add(self, key: tuple[str, str], now: float) -> None:
        self._until.pop(key, None)
        self._until[key] = now + self._seconds
        while len(self._until) > MOST_REMEMBERED:
            self._until.popitem(last=False)

    def has(self, key: tuple[str, str], now: float) -> bool:
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                break
            del self._until[oldest]
        return key in self._until


class Registry:
    """Live requests by handle, rid and group."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Request] = {}
        self._by_rid: dict[str, Request] = {}
        self._groups: dict[str, dict[int, Request]] = defaultdict(dict)
        self._tombstones = _Memory(TOMBSTONE_SECONDS)
        self._ended = _Memory(ENDED_SECONDS)

    def __len__(self) -> int:
        return len(self._by_handle)

    def live(self) -> list[Request]:
        """All requests that are not GONE, in order of arrival."""
        return list(self._by_handle.values())

    def get(self, handle: int) -> Request | None:
        """The request, or None when it is gone."""
        return self._by_handle.get(handle)

    def claim(self, submit: Submit, now: float) -> tuple[Claim, Request | None]:
        """What a Submit means, and the live request of that id if there is one."""
        live = self._by_rid.get(submit.rid)
        if live is not None:
            if live.submit.client != submit.client or live.submit.attempt > submit.attempt:
                return Claim.DUPLICATE, live
            return (Claim.REPEATED if live.submit.attempt == submit.attempt else Claim.REPLACES), live
        for client in (submit.client, ""):
            for name in (submit.rid, submit.group):
                if name and self._tombstones.has((client, name), now):
                    return Claim.ABORTED, None
        return Claim.NEW, None

    def add(self, request: Request) -> None:
        """A request was accepted."""
        self._by_handle[request.handle] = request
        self._by_rid[request.rid] = request
        if request.submit.group:
            self._groups[request.submit.group][request.handle] = request

    def forget_id(self, request: Request, now: float) -> None:
        """The id may be used again, though the request itself is still known by its handle."""
        if self._by_rid.get(request.rid) is request:
            del self._by_rid[request.rid]
            self._ended.add((request.submit.client, request.rid), now)
        group = self._groups.get(request.submit.group)
        if group and group.pop(request.handle, None) is not None and not group:
            del self._groups[request.submit.group]

    def remove(self, request: Request, now: float) -> None:
        """The request is gone."""
        self.forget_id(request, now)
        self._by_handle.pop(request.handle, None)

    def aborted_by(self, abort: AbortOf, now: float) -> list[Request]:
        """The live requests that an abort names; leaves a tombstone for those that may still come.

        A client aborts its own requests only; an operator (client "") anybody's. An id that has ended lately leaves no
        tombstone.
        """
        if abort.all:
            found = list(self._by_rid.values())
        else:
            named = self._by_rid.get(abort.rid)
            found = [] if abort.exact else list(self._groups.get(abort.rid, {}).values())
            if named is not None and named not in found:
                found.append(named)
            if not found and not self._ended.has((abort.client, abort.rid), now):
                self._tombstones.add((abort.client, abort.rid), now)
        return [r for r in found if abort.client in ("", r.submit.client)]
