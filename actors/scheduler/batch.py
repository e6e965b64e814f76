"""RunningBatch: which request has which row of the runner's tables. Draft: one StepPlan while it is put together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixcast.actors.scheduler.kv_slots import NO_SLOTS
from radixcast.actors.scheduler.request import Request, State
from radixcast.protocols.buffers import Int32Array, pack_ids
from radixcast.protocols.internal import RowOpen, StepPlan


class RunningBatch:
    """Rows. A closed row is free at once: the next plan closes it before it opens anything."""

    def __init__(self, max_running: int) -> None:
        self._requests: dict[int, Request] = {}
        self._free = list(range(max_running - 1, -1, -1))
        self._closed: list[int] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def free_rows(self) -> int:
        """Rows that `open` can give."""
        return len(self._free)

    def open(self, request: Request) -> None:
        """Give the request a row."""
        request.row = self._free.pop()
        request.state = State.RUNNING
        self._requests[request.handle] = request

    def close(self, request: Request) -> None:
        """Take the request's row away; the caller sets its state."""
        del self._requests[request.handle]
        if request.opened:
            self._closed.append(request.row)
        self._free.append(request.row)
        request.row = -1
        request.opened = False

    def take_closed(self) -> Int32Array:
        """Rows closed since the last call (int32): for the next plan."""
        closed, self._closed = self._closed, []
        return np.array(closed, dtype=np.int32)


class Draft:
    """The rows of one plan. The scheduler keeps it until the plan's result is in."""

    __slots__ = (
        "_slot_counts",
        "_slots",
        "cached_tokens",
        "counts",
        "lives",
        "new_tokens",
        "number",
        "opens",
        "requests",
        "rows",
        "samples",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests: list[Request] = []
        self.lives: list[int] = []
        """`life` of each request: a result counts only as long as it is the same."""
        self.rows: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        """Whether the row reaches its last known token, so that a new one is sampled."""
        self.opens: list[RowOpen] = []
        self.new_tokens = 0
        """Prompt tokens computed (rows that bring more than one)."""
        self.cached_tokens = 0
        """Prefix hits of requests admitted with this plan."""
        self._slot_counts: list[int] = []
        self._slots: list[Int32Array] = []

    def add(self, request: Request, count: int) -> int:
        """Let the plan compute up to `count` tokens of a row whose slots suffice. Returns how many of them are known."""
        chunk = max(0, min(count, request.remaining))
        if not request.opened:
            request.opened = True
            self.opens.append(request.row_open())
        upto = min(request.nslots, request.kv_cap)
        self.requests.append(request)
        self.lives.append(request.life)
        self.rows.append(request.row)
        self.counts.append(count)
        self._slot_counts.append(max(0, upto - request.sent))
        if upto > request.sent:
            self._slots.append(request.slots[request.sent : upto])
            request.sent = upto
        samples = count >= request.remaining
        self.samples.append(samples)
        request.sampling_flights += samples
        request.planned += count
        request.flights.append(self.number)
        request.last_plan = self.number
        return chunk

    def plan(self, closes: Int32Array) -> StepPlan:
        """The message."""
        return StepPlan(
            number=self.number,
            opens=self.opens,
            rows=pack_ids(self.rows),
            counts=pack_ids(self.counts),
            slot_counts=pack_ids(self._slot_counts),
            slots=pack_ids(np.concatenate(self._slots) if self._slots else NO_SLOTS),
            closes=pack_ids(closes),
        )
