"""The sockets of one actor: what it binds and dials, opened together, found by peer name, closed in order."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any, Unpack

import zmq

from radixcast.actors.port import Callbacks, Peer, Port
from radixcast.actors.setup import CLIENT_PREFIX, SUPERVISOR, NodeSetup
from radixcast.actors.transport import Dealer, Router

_LAST_WORDS_SECONDS = 1.0  # a stopping actor waits so long for the supervisor to acknowledge what it said
_OTHERS_SECONDS = 0.25  # and so long for everybody else


@dataclass(frozen=True)
class Bind:
    """A ROUTER of this actor: `endpoint` is a field of Endpoints; `inboxes` maps a peer's name, or 'client:', to the
    union of messages that it may send."""

    endpoint: str
    inboxes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint.startswith("public_") and set(self.inboxes) != {CLIENT_PREFIX}:
            raise TypeError(f"only clients may speak to {self.endpoint}, not {sorted(self.inboxes)}")


@dataclass(frozen=True)
class Dial:
    """A DEALER of this actor to `peer`, at `endpoint` (a field of Endpoints); `inbox` is what the peer may send."""

    peer: str
    endpoint: str
    inbox: Any


class Sockets:
    """Routers and dealers of the actor `name`."""

    def __init__(self, setup: NodeSetup, name: str, epoch: int) -> None:
        self._setup = setup
        self._name = name
        self._epoch = epoch << 20  # leaves room for the links' own epochs
        self._routers: list[Router] = []
        self._dealers: dict[str, Dealer] = {}
        self.ports: list[Port] = []

    def bind(self, context: zmq.Context[Any], bind: Bind, **callbacks: Unpack[Callbacks]) -> None:
        """Open a Router. Raises zmq.ZMQError when the address is taken."""
        address = getattr(self._setup.endpoints, bind.endpoint)
        secret = self._setup.curve_server_secret if address.startswith("tcp://") else ""
        router = Router(context, address, epoch=self._epoch, inboxes=bind.inboxes, curve_secret=secret, **callbacks)
        router.open()
        self._routers.append(router)
        self.ports.append(router)

    def dial(self, context: zmq.Context[Any], dial: Dial, **callbacks: Unpack[Callbacks]) -> None:
        """Open a Dealer and begin to connect."""
        address = getattr(self._setup.endpoints, dial.endpoint)
        key = self._setup.curve_server_public if address.startswith("tcp://") else ""
        dealer = Dealer(
            context,
            address,
            identity=self._name,
            peer=dial.peer,
            epoch=self._epoch,
            inbox=dial.inbox,
            server_key=key,
            **callbacks,
        )
        dealer.open()
        self._dealers[dial.peer] = dealer
        self.ports.append(dealer)

    def missing(self) -> list[str]:
        """Dialled peers whose link is not up."""
        return [name for name, dealer in self._dealers.items() if not dealer.up]

    async def reach(self, name: str, seconds: float) -> bool:
        """Serve the socket to a dialled peer until its link is up. False after so many seconds, or if it is not dialled."""
        dealer = self._dealers.get(name)
        if dealer is None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not dealer.up:
                    dealer.drain()
                    dealer.flush()
                    await asyncio.sleep(0.005)
        return dealer.up

    def get(self, name: str) -> Peer | None:
        """The peer of this link name, if there is a link to it."""
        dealer = self._dealers.get(name)
        if dealer is not None:
            return dealer.peer
        for router in self._routers:
            peer = router.get(name)
            if peer is not None:
                return peer
        return None

    def flush(self) -> None:
        """Transmit all that is waiting."""
        for port in self.ports:
            port.flush()

    async def close(self) -> None:
        """Wait a little until the last messages are acknowledged, the supervisor's longest and last, then close all."""
        last = self._dealers.get(SUPERVISOR)
        for port in sorted(self.ports, key=lambda p: p is last):
            try:
                await port.flushed(_LAST_WORDS_SECONDS if port is last else _OTHERS_SECONDS)
            finally:
                port.close()
        self._clear()

    def abort(self) -> None:
        """Close all without a word."""
        for port in self.ports:
            port.abort()
        self._clear()

    def _clear(self) -> None:
        self.ports.clear()
        self._routers.clear()
        self._dealers.clear()
