"""Backlog: messages that a peer can't take yet because its window is full, kept in order. No I/O of its own.

For what must not be lost while the link stays up: answers, refusals, aborts. The owner calls `flush` when the peer can be
written to again and `forget` when its link went down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

LIMIT = 1 << 16
"""Most messages kept for one peer. Beyond, what is new is dropped: that peer sends and never reads."""


class Backlog:
    """`send(peer, message)` hands a message to the link; False: it can't be taken now."""

    def __init__(self, send: Callable[[str, msgspec.Struct], bool]) -> None:
        self._send = send
        self._waiting: dict[str, deque[msgspec.Struct]] = {}

    def say(self, peer: str, message: msgspec.Struct) -> None:
        """Send `message`, now or behind what waits already."""
        queue = self._waiting.get(peer)
        if queue is None:
            if not self._send(peer, message):
                self._waiting[peer] = deque([message])
        elif len(queue) < LIMIT:
            queue.append(message)

    def waiting(self, peer: str) -> int:
        """Messages kept for the peer."""
        return len(self._waiting.get(peer, ()))

    def flush(self, peer: str) -> None:
        """Send what the peer takes."""
        queue = self._waiting.get(peer)
        while queue and self._send(peer, queue[0]):
            queue.popleft()
        if not queue:
            self._waiting.pop(peer, None)

    def forget(self, peer: str) -> None:
        """The peer is gone, and with it who waited for this."""
        self._waiting.pop(peer, None)
