"""The gateway: HTTP in front of the engine. A client of it like any other, over the same protocol and the same class.

It serves the listening socket that it is handed, so connections queue in the kernel while a gateway is replaced. HTTP is up
before the engine is: until then generation answers 503 and /health tells why.
"""

from __future__ import annotations

import os
import socket
from typing import Any, ClassVar

import zmq
from aiohttp import web

from radixcast.actors.actor import Actor
from radixcast.actors.client import EngineClient
from radixcast.actors.gateway.http import Dispatcher, HttpServer
from radixcast.actors.gateway.routes import ROUTES
from radixcast.actors.gateway.service import Gateway
from radixcast.actors.setup import GATEWAY, NodeSetup
from radixcast.protocols.errors import LinkClosed, StartupError
from radixcast.protocols.internal import NodeState

BACKLOG = 1024
"""Connections that wait in the kernel."""

CLOSE_SECONDS = 2.0
"""Seconds that answers get to reach their clients after the last request was ended."""

_CONNECT_SECONDS = 5.0


class GatewayActor(Actor):
    """Serves `sock` when one is given, else the inherited descriptor `listen_fd` (a bound TCP or Unix socket)."""

    name: ClassVar[str] = GATEWAY

    def __init__(self, setup: NodeSetup, epoch: int, *, sock: socket.socket | None = None) -> None:
        super().__init__(setup, epoch)
        self.sock = sock
        self.engine: EngineClient | None = None
        self.gateway: Gateway | None = None
        self._runner: web.ServerRunner | None = None

    async def run(self, context: zmq.Context[Any]) -> None:
        """As every actor; the engine is dialled in the same context, so inproc:// endpoints work."""
        self.engine = EngineClient(
            self.setup.endpoints.public_in,
            name=GATEWAY,
            curve_server_public=self.setup.curve_server_public,
            context=context,
        )
        self.gateway = Gateway(self.args, self.model, self.engine)
        await super().run(context)

    async def start(self) -> None:
        """Serve HTTP, and reach for the engine in the background."""
        assert self.gateway is not None
        server = HttpServer(Dispatcher(self.gateway, ROUTES))
        self.gateway.open_connections = lambda: len(server.connections)
        self._runner = web.ServerRunner(server, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket(), backlog=BACKLOG).start()
        self.spawn(self._connect(), "connect")

    async def drain(self, seconds: float) -> None:
        """Refuse new requests (503) and wait for the running ones."""
        assert self.gateway is not None
        self.gateway.start_draining()
        await self.gateway.drained()

    async def stop(self) -> None:
        """End what still runs (its clients are told), then the connections."""
        if self.gateway is not None:
            self.gateway.start_draining()
        if self.engine is not None:
            await self.engine.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def on_NodeState(self, message: NodeState, peer: str) -> None:
        """The supervisor's view of the node: what /health and /ready answer from."""
        if self.gateway is not None:
            self.gateway.note_state(message)
        self.progress += 1

    def stats(self) -> dict[str, float]:
        """Open connections and running bodies."""
        if self.gateway is None:
            return {}
        return {"connections": float(self.gateway.open_connections()), "running": float(self.gateway.running)}

    async def _connect(self) -> None:
        assert self.engine is not None
        while True:
            try:
                welcome = await self.engine.connect(_CONNECT_SECONDS)
            except LinkClosed as error:
                if self.gateway is None or self.gateway.state in ("draining", "stopping"):
                    return
                self.log.debug("waiting for the engine: %s", error)
            else:
                self.log.debug("serving %s, context %d", welcome.model, welcome.context_length)
                return

    def _socket(self) -> socket.socket:
        if self.sock is None:
            if self.listen_fd is None:
                raise StartupError("the gateway was given no socket to listen on")
            self.sock = socket.socket(fileno=os.dup(self.listen_fd))  # closing ours must not close the owner's
        self.sock.setblocking(False)
        return self.sock
