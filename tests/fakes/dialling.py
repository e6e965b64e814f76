"""A client of one endpoint for tests: keeps what it hears and waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from radixcast.actors.transport import Dealer, new_epoch

PATIENCE = 20.0
"""Seconds that a test waits before it fails; never a measure."""


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Wait until `condition()` is true. Raises TimeoutError when it never is."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - conditions are plain looks from outside
            await asyncio.sleep(0.005)


class Client:
    """A Dealer with a memory. `events` are "+peer" and "-peer" in order."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        inbox: Any,
        *,
        name: str = "client:test",
        peer: str = "server",
        key: str = "",
    ) -> None:
        self.received: list[Any] = []
        self.events: list[str] = []
        self.dealer = Dealer(
            context,
            endpoint,
            identity=name,
            peer=peer,
            epoch=new_epoch(),
            inbox=inbox,
            server_key=key,
            on_message=lambda message, peer, buffers: self.received.append(message),
            on_up=lambda peer: self.events.append(f"+{peer}"),
            on_down=lambda peer, reason: self.events.append(f"-{peer}"),
        )
        self.dealer.open()

    async def up(self) -> None:
        """Wait until the link is up."""
        await eventually(lambda: self.dealer.up)

    async def ask(self, message: msgspec.Struct) -> Any:
        """Send and wait for the next message."""
        await self.up()
        count = len(self.received)
        assert self.dealer.send(message)
        await eventually(lambda: len(self.received) > count)
        return self.received[count]

    def close(self) -> None:
        """Close the socket."""
        self.dealer.close()
