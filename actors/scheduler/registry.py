"""Registry: who is who. Request ids, groups, repetitions and duplicates.

An id names one live request of its client. The same (rid, attempt) is a repetition and harmless; a higher attempt replaces
the older one; a lower one is a duplicate. An abort means requests that are here: links are ordered and the tokenizer stops
what it still works at, so none of those that it means can come after it, and an id may be used again at once.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum

from radixcast.actors.scheduler.request import Request
from radixcast.protocols.internal import AbortOf, Submit

Key = tuple[str, str]
"""(client, rid) or (client, group)."""


class Claim(Enum):
    """What a Submit's (client, rid, attempt) means."""

    NEW = "new"
    REPEATED = "repeated"
    REPLACES = "replaces"
    DUPLICATE = "duplicate"


class Registry:
    """Live requests by handle, by (client, rid) and by (client, group)."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Request] = {}
        self._by_rid: dict[Key, Request] = {}
        self._groups: dict[Key, dict[int, Request]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._by_handle)

    def live(self) -> list[Request]:
        """All requests that are not GONE, in order of arrival."""
        return list(self._by_handle.values())

    def get(self, handle: int) -> Request | None:
        """The request, or None when it is gone."""
        return self._by_handle.get(handle)

    def claim(self, submit: Submit) -> tuple[Claim, Request | None]:
        """What a Submit means, and the live request of that id if there is one."""
        live = self._by_rid.get((submit.client, submit.rid))
        if live is None:
            return Claim.NEW, None
        if live.submit.attempt > submit.attempt:
            return Claim.DUPLICATE, live
        return (Claim.REPEATED if live.submit.attempt == submit.attempt else Claim.REPLACES), live

    def add(self, request: Request) -> None:
        """A request was accepted."""
        submit = request.submit
        self._by_handle[request.handle] = request
        self._by_rid[submit.client, submit.rid] = request
        if submit.group:
            self._groups[submit.client, submit.group][request.handle] = request

    def forget_id(self, request: Request) -> None:
        """The id may be used again, though the request itself is still known by its handle."""
        submit = request.submit
        if self._by_rid.get((submit.client, submit.rid)) is request:
            del self._by_rid[submit.client, submit.rid]
        key = submit.client, submit.group
        group = self._groups.get(key)
        if group and group.pop(request.handle, None) is not None and not group:
            del self._groups[key]

    def remove(self, request: Request) -> None:
        """The request is gone."""
        self.forget_id(request)
        self._by_handle.pop(request.handle, None)

    def named_by(self, abort: AbortOf) -> list[Request]:
        """The live requests that an abort means. A client aborts its own requests only, an operator (client "") anybody's."""
        if abort.all or not abort.client:
            found = self._by_rid.values()
            return [r for r in found if abort.names(r.submit.client, r.rid, r.submit.group)]
        key = abort.client, abort.rid
        group = {} if abort.exact else self._groups.get(key, {})
        named = self._by_rid.get(key)
        return [*group.values(), *([named] if named is not None and named.handle not in group else [])]
