"""Routers and dealers over real sockets: ipc, tcp with keys, inproc; strangers, nonsense and death."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq

from fakes.dialling import Client, eventually
from radixcast.actors.link import State
from radixcast.actors.transport import Router, new_epoch
from radixcast.protocols import limits
from radixcast.protocols.wire import Header, Kind, decode_header, encode_header


class Note(msgspec.Struct, frozen=True, tag=True):
    text: str


class Server:
    """A Router that answers every note with the same note."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, *, epoch: int | None = None, secret: str = "") -> None:
        self.heard: list[tuple[str, Any, list[bytes]]] = []
        self.events: list[str] = []
        self.writable: list[str] = []
        self.router = Router(
            context,
            endpoint,
            epoch=epoch or new_epoch(),
            inboxes={"client:": Note, "friend": Note},
            curve_secret=secret,
            on_message=self.answer,
            on_up=lambda peer: self.events.append(f"+{peer}"),
            on_down=lambda peer, reason: self.events.append(f"-{peer}"),
            on_writable=self.writable.append,
        )
        self.router.open()

    def answer(self, message: Any, peer: str, buffers: list[bytes]) -> None:
        self.heard.append((peer, message, buffers))
        other = self.router.get(peer)
        assert other is not None
        other.send(message, buffers)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["ipc", "tcp", "inproc"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, str]]:
    """(endpoint, server's secret key, its public key)."""
    if request.param == "ipc":
        with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as folder:
            yield f"ipc://{folder}/socket", "", ""
    elif request.param == "tcp":
        public, secret = zmq.curve_keypair()
        with zmq.Context() as probe_context, probe_context.socket(zmq.ROUTER) as probe:
            port = probe.bind_to_random_port("tcp://127.0.0.1")
        yield f"tcp://127.0.0.1:{port}", secret.decode(), public.decode()
    else:
        yield "inproc://transport-test", "", ""


@pytest_asyncio.fixture
async def server(context: zmq.Context[Any], address: tuple[str, str, str]) -> AsyncIterator[Server]:
    made = Server(context, address[0], secret=address[1])
    yield made
    made.router.close()


@pytest_asyncio.fixture
async def client(context: zmq.Context[Any], address: tuple[str, str, str], server: Server) -> AsyncIterator[Client]:
    made = Client(context, address[0], Note, key=address[2])
    yield made
    made.close()


async def test_messages_and_buffers_go_there_and_back(client: Client, server: Server) -> None:
    await client.up()
    big = bytes(range(256)) * 2000
    for i in range(200):
        assert client.dealer.send(Note(str(i)), [b"", big] if i % 50 == 0 else ())
    await eventually(lambda: len(client.received) == 200)
    assert [m.text for m in client.received] == [str(i) for i in range(200)]
    assert server.heard[50][2] == [b"", big]
    assert server.events == ["+client:test"]


async def test_more_than_a_window_arrives_when_the_sender_waits_for_room(client: Client, server: Server) -> None:
    await client.up()
    total, sent = 3000, 0
    while sent < total:
        while sent < total and client.dealer.send(Note(str(sent))):
            sent += 1
        await eventually(lambda: client.dealer.writable)
    await eventually(lambda: len(server.heard) == total)
    assert [m.text for _, m, _ in server.heard] == [str(i) for i in range(total)]


async def test_everything_sent_is_acknowledged_when_flushed(client: Client) -> None:
    await client.up()
    client.dealer.send(Note("x"))
    assert await client.dealer.flushed(10.0)
    assert client.dealer.peer.link.unacknowledged == 0


async def test_death_of_the_client_is_noticed(client: Client, server: Server) -> None:
    await client.ask(Note("x"))
    client.dealer.abort()
    if server.router.endpoint.startswith("inproc"):  # no event there: noticed when something is to be sent
        peer = server.router.get("client:test")
        assert peer is not None
        peer.send(Note("anybody?"))
    await eventually(lambda: server.events == ["+client:test", "-client:test"])
    assert server.router.get("client:test") is None


async def test_closing_tells_the_peer_at_once(client: Client, server: Server) -> None:
    await client.ask(Note("x"))
    client.close()
    await eventually(lambda: "-client:test" in server.events)


async def test_server_that_starts_again_is_found(
    context: zmq.Context[Any], address: tuple[str, str, str], client: Client, server: Server
) -> None:
    await client.ask(Note("before"))
    server.router.abort()
    if address[0].startswith("inproc"):
        client.dealer.send(Note("lost"))
    again = Server(context, address[0], secret=address[1])
    try:
        await eventually(lambda: client.events == ["+server", "-server", "+server"])
        assert (await client.ask(Note("after"))).text == "after"
        assert [m.text for _, m, _ in again.heard] == ["after"]
    finally:
        again.router.close()


async def test_client_that_starts_again_under_its_name_is_a_new_session(
    context: zmq.Context[Any], address: tuple[str, str, str], client: Client, server: Server
) -> None:
    await client.ask(Note("x"))
    client.dealer.abort()
    again = Client(context, address[0], Note, key=address[2])
    assert (await again.ask(Note("y"))).text == "y"
    assert server.events[-1] == "+client:test"
    assert server.events.count("-client:test") == 1
    again.close()


async def test_tcp_without_keys_is_refused(context: zmq.Context[Any]) -> None:
    with pytest.raises(ValueError, match="CURVE"):
        Server(context, "tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="CURVE"):
        Client(context, "tcp://127.0.0.1:1", Note)


async def test_what_can_not_be_opened_leaves_no_socket(context: zmq.Context[Any]) -> None:
    opened: list[zmq.Socket[Any]] = []

    class Watched(Router):
        def _make_socket(self) -> zmq.Socket[Any]:
            opened.append(super()._make_socket())
            return opened[-1]

    for endpoint in ("tcp://127.0.0.1:1", "ipc:///no/such/folder/x"):
        router = Watched(
            context,
            endpoint,
            epoch=1,
            inboxes={},
            on_message=lambda *_: None,
            on_up=lambda peer: None,
            on_down=lambda peer, reason: None,
        )
        with pytest.raises((ValueError, zmq.ZMQError)):
            router.open()
        router.close()
    assert [socket.closed for socket in opened] == [True, True]


# -- what does not depend on the kind of socket


@pytest_asyncio.fixture
async def local(context: zmq.Context[Any]) -> AsyncIterator[Server]:
    made = Server(context, "inproc://local")
    yield made
    made.router.close()


def raw(context: zmq.Context[Any], name: bytes) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect("inproc://local")
    return socket


HELLO = encode_header(Header(1, Kind.HELLO, 5, 0, 0, 0))


async def test_named_peers_may_speak_and_strangers_may_not(context: zmq.Context[Any], local: Server) -> None:
    friend = Client(context, "inproc://local", Note, name="friend")
    assert (await friend.ask(Note("hi"))).text == "hi"
    for name in (b"enemy", b"client", b"friend:", b"\xff\xfe", b"client:\n"):
        with raw(context, name) as stranger:
            count = local.router.refused_frames
            stranger.send_multipart([HELLO, b""])
            await eventually(lambda count=count: local.router.refused_frames > count)  # type: ignore[misc]
    assert local.events == ["+friend"]
    friend.close()


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xc1"],
        [b"nonsense", b"more"],
        [msgspec.msgpack.encode([2, 0, 1, 0, 0, 0]), b""],
        [msgspec.msgpack.encode([1, 9, 1, 0, 0, 0]), b""],
        [msgspec.msgpack.encode([1, 0, -1, 0, 0, 0]), b""],
        [msgspec.msgpack.encode([1, 0, 2**64 - 1, 0, 0, 0]), b""],
        [msgspec.msgpack.encode([1, 0, "x", 0, 0, 0]), b""],
        [msgspec.msgpack.encode([1, 0]), b""],
        [HELLO, *[b""] * limits.MAX_ZMQ_FRAMES],
    ],
)
async def test_nonsense_harms_nobody(
    context: zmq.Context[Any], local: Server, parts: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    good = Client(context, "inproc://local", Note, name="client:good")
    await good.ask(Note("1"))
    with raw(context, b"client:bad") as bad:
        bad.send_multipart(parts)
        bad.send_multipart([HELLO, b""])
        await eventually(lambda: "+client:bad" in local.events)
    assert (await good.ask(Note("2"))).text == "2"
    assert not caplog.records
    good.close()


async def test_a_payload_that_is_not_understood_resets_the_link(context: zmq.Context[Any], local: Server) -> None:
    client = Client(context, "inproc://local", Note)
    await client.ask(Note("1"))
    client.dealer.peer.link.send(b"\xc1 no message")
    client.dealer.touch(client.dealer.peer)
    await eventually(lambda: client.events == ["+server", "-server", "+server"])
    assert local.events[:2] == ["+client:test", "-client:test"]
    assert local.router.malformed_frames == 1
    assert (await client.ask(Note("2"))).text == "2"
    client.close()


async def test_a_silent_client_is_forgotten_and_met_again_under_a_new_epoch(context: zmq.Context[Any], local: Server) -> None:
    async def answer(socket: zmq.Socket[Any]) -> Header:
        await eventually(lambda: socket.poll(0))
        return decode_header(socket.recv_multipart()[0])

    local.router.client_idle_seconds = 0.1
    with raw(context, b"client:raw") as socket:
        socket.send_multipart([HELLO, b""])
        first = await answer(socket)
        await eventually(lambda: local.router.get("client:raw") is None)
        assert local.events == ["+client:raw", "-client:raw"]
        socket.send_multipart([encode_header(Header(1, Kind.HELLO, 5, first.epoch, 0, 0)), b""])
        second = await answer(socket)
    assert second.kind is Kind.HELLO
    assert second.epoch > first.epoch
    assert second.peer_epoch == 5


async def test_an_error_in_a_callback_does_not_stop_the_reading(context: zmq.Context[Any], local: Server) -> None:
    client = Client(context, "inproc://local", Note)
    await client.ask(Note("1"))
    seen: list[str] = []

    def careless(message: Any, peer: str, buffers: list[bytes]) -> None:
        seen.append(message.text)
        raise ZeroDivisionError

    client.dealer._on_message = careless
    client.dealer._loop.set_exception_handler(lambda loop, context: None)
    for i in range(5):
        client.dealer.send(Note(str(i)))
    await eventually(lambda: seen == ["0", "1", "2", "3", "4"])
    assert client.dealer.peer.link.state is State.UP
    client.close()
