"""A gateway over HTTP in this process, in front of a fake engine: `async with serving(engine) as http: await http.post(…)`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web

from fakes.fake_client import FakeEngine
from radixcast.actors.gateway.http import Dispatcher, HttpServer
from radixcast.actors.gateway.routes import ROUTES
from radixcast.actors.gateway.service import Gateway
from radixcast.actors.local import LocalNode
from radixcast.protocols.internal import ActorState, NodeState
from radixcast.protocols.model import ModelConfig, ModelSpec
from radixcast.protocols.server_args import ServerArgs

SPEC = ModelSpec(
    name="tiny",
    path="/models/tiny",
    config=ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=256,
    ),
    weight_files=(),
    weight_format="random",
    tokenizer_file=None,
    context_length=256,
)


def node_state(state: str = "ready", age: float = 0.0, actor: str = "ready") -> NodeState:
    """A node of one actor."""
    return NodeState(state=state, actors=[ActorState(name="scheduler", epoch=1, state=actor, heartbeat_age=age)])


@dataclass
class Answer:
    """One answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as strict JSON."""
        return json.loads(self.body, parse_constant=lambda name: 1 / 0)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; all four keys must be there."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """JSON events of a stream; it must be well-formed and end with [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream")
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == ""
        assert parts[-2] == "data: [DONE]"
        assert all(p.startswith("data: ") for p in parts[:-1])
        return [json.loads(p[6:], parse_constant=lambda name: 1 / 0) for p in parts[:-2]]


class HttpClient:
    """A client of a gateway on a port of 127.0.0.1: `async with HttpClient(port) as http:`."""

    node: LocalNode
    """The node behind it, where a test has one."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, **kwargs: Any) -> Answer:
        """Send and read everything."""
        async with self._session.request(method, self.url + path, **kwargs) as response:
            body = await response.read()
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, body)

    async def get(self, path: str, **kwargs: Any) -> Answer:
        """GET."""
        return await self.request("GET", path, **kwargs)

    async def post(self, path: str, body: Any, **kwargs: Any) -> Answer:
        """POST JSON."""
        return await self.request("POST", path, json=body, **kwargs)

    async def until(self, question: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
        """Ask again and again until the answer is yes."""
        async with asyncio.timeout(seconds):
            while not await question():  # noqa: ASYNC110  # the server is asked from outside, it notifies nobody
                await asyncio.sleep(0.01)

    async def until_ready(self) -> None:
        """Wait for /ready."""

        async def ready() -> bool:
            return (await self.get("/ready")).status == 200

        await self.until(ready)

    async def raw(self, data: bytes) -> bytes:
        """Bytes over a socket of their own; what comes back until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await writer.drain()
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()


class Http(HttpClient):
    """A client, with the gateway and the fake engine that it talks to at hand."""

    def __init__(self, port: int, gateway: Gateway, engine: FakeEngine) -> None:
        super().__init__(port)
        self.gateway = gateway
        self.engine = engine

    async def opened(self, count: int) -> None:
        """Wait until the engine has `count` open outputs."""
        async with asyncio.timeout(10):
            while len(self.engine.open) != count:  # noqa: ASYNC110  # a fake that nobody notifies
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(engine: FakeEngine | None = None, state: str | None = "ready", **flags: Any) -> AsyncIterator[Http]:
    """A gateway with `flags` (fields of ServerArgs), in front of `engine`."""
    engine = engine or FakeEngine()
    gateway = Gateway(ServerArgs(**flags), SPEC, engine)
    if state is not None:
        gateway.note_state(node_state(state))
    server = HttpServer(Dispatcher(gateway, ROUTES))
    gateway.open_connections = lambda: len(server.connections)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    await web.SockSite(runner, sock).start()
    try:
        async with Http(port, gateway, engine) as http:
            yield http
    finally:
        await runner.cleanup()
