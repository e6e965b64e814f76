"""ZMQ sockets under links: `Router` binds and serves many peers, `Dealer` dials one.

Both live on the running asyncio loop (plain zmq sockets watched through their file descriptor; everything that has arrived is
read in one wake-up, everything to be sent leaves in one flush). Usable outside of actors, for instance by a client::

    dealer = Dealer(context, "ipc:///run/x/public_in", identity="client:42", peer="tokenizer", epoch=new_epoch(),
                    inbox=TokenizerToClient, on_message=handle, on_up=up, on_down=down)
    dealer.open()                       # on the loop's thread; on_up follows when the peer has answered
    dealer.send(Generate(...))          # True: taken; False: link down or window full (on_writable tells when there is room)
    dealer.close()

Callbacks (see `port.Callbacks`) are plain functions, called on the loop. After `on_down` what was sent and unanswered may or
may not have arrived; the link connects again by itself and `on_up` follows. The identity of a Dealer is its link name.
For `tcp://` both sides need CURVE keys: the server its secret key, the dialler the server's public key.

How a peer's death shows: a Dealer by the DISCONNECTED event of the socket monitor (1-2 ms on ipc); a Router, whose events name
nobody, then asks every peer with one small frame (ROUTER_MANDATORY: EHOSTUNREACH when it is gone).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from typing import Any, Unpack

import msgspec
import zmq

from radixcast.actors.link import Buffers, Frame, Link, State, Tuning
from radixcast.actors.port import Callbacks, Peer, Port, has
from radixcast.actors.setup import CLIENT_PREFIX
from radixcast.protocols import limits
from radixcast.protocols.wire import Codec

logger = logging.getLogger(__name__)

CLIENT_IDLE_SECONDS = 60.0
"""A client without a frame for so long is forgotten."""
KEEP_ALIVE_SECONDS = 10.0
"""A Dealer asks its peer for a sign of life so often."""
INPROC_KEEP_ALIVE_SECONDS = 0.25
"""The same on inproc, where ZMQ has no event for a peer that is gone."""
TCP_GRACE_SECONDS = 3.0
"""A tcp peer may be away so long before its link goes down."""
MAX_CLIENTS = 16384
"""Client links of one Router; frames of further ones are dropped."""

_BIND_ATTEMPTS = 50
_CLIENT_TUNING = Tuning(window=512, window_bytes=16 << 20)


def new_epoch() -> int:
    """An epoch greater than any this machine has given out before, as long as its clock does not go back (microseconds)."""
    return time.time_ns() // 1000


class Router(Port):
    """The side that binds. `inboxes` maps a peer's link name, or 'client:', to the union of messages it may send.

    Peers of other names are not answered. `epoch` is the start of this incarnation's link epochs: each link takes its own.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        *,
        epoch: int,
        inboxes: dict[str, Any],
        curve_secret: str = "",
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(context, endpoint, **callbacks)
        self._epoch = epoch
        self._codecs = {name: Codec[Any](inbox) for name, inbox in inboxes.items()}
        self._curve_secret = curve_secret
        self._peers: dict[bytes, Peer] = {}
        self._names: dict[str, Peer] = {}
        self._clients = 0
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._recheck: asyncio.TimerHandle | None = None
        self.refused_frames = 0
        self.client_idle_seconds = CLIENT_IDLE_SECONDS

    def open(self) -> None:
        """Bind. Raises zmq.ZMQError when the address is in use."""
        super().open()
        self._sweep_timer = self._loop.call_later(1.0, self._sweep)

    def _cancel_timers(self) -> None:
        super()._cancel_timers()
        for timer in (self._sweep_timer, self._recheck):
            if timer is not None:
                timer.cancel()

    def peers(self) -> Iterable[Peer]:
        """All links of this port."""
        return list(self._peers.values())

    def get(self, name: str) -> Peer | None:
        """The peer of this link name, if it has said hello."""
        return self._names.get(name)

    def _make_socket(self) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if CLIENT_PREFIX in self._codecs:
            socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_BODY_BYTES + (1 << 20))
        if self._curve_secret:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve_secret.encode())
        return socket

    def _attach(self, socket: zmq.Socket[Any]) -> None:
        if self.endpoint.startswith("tcp://") and not self._curve_secret:
            raise ValueError(f"{self.endpoint}: tcp endpoints need CURVE keys")
        for attempt in range(_BIND_ATTEMPTS, 0, -1):
            try:
                socket.bind(self.endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or attempt == 1:
                    raise
            time.sleep(0.002)  # ZMQ's own thread may still be closing a predecessor of this process

    def _take(self, frames: list[bytes], now: float) -> None:
        peer = self._peers.get(frames[0])
        if peer is None:
            peer = self._admit(frames[0])
            if peer is None:
                self.refused_frames += 1
                return
        peer.unreachable_since = math.inf
        self._feed(peer, frames[1:], now)

    def _admit(self, identity: bytes) -> Peer | None:
        try:
            name = identity.decode()
        except UnicodeDecodeError:
            name = ""
        is_client = name.startswith(CLIENT_PREFIX)
        codec = self._codecs.get(CLIENT_PREFIX if is_client else name)
        if codec is None or not name.isprintable():
            logger.warning("%s: no peer may be called %r here", self.endpoint, identity[:64])
            return None
        if is_client and self._clients >= MAX_CLIENTS:
            logger.warning("%s: %d clients, %s is not served", self.endpoint, self._clients, name)
            return None
        self._clients += is_client
        self._epoch += 1
        link = Link(self._epoch, _CLIENT_TUNING if is_client else Tuning())
        peer = self._peers[identity] = self._names[name] = Peer(self, name, identity, link, codec)
        return peer

    def _send(self, peer: Peer, frame: Frame) -> bool:
        try:
            self._send_parts([peer.identity], frame)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable(peer)
        return True

    def _unreachable(self, peer: Peer) -> None:
        """ZMQ has no connection to the peer. On tcp it may come back; elsewhere it is dead."""
        now = self._clock()
        if peer.unreachable_since == math.inf:
            peer.unreachable_since = now
        if not self.endpoint.startswith("tcp://") or now - peer.unreachable_since > TCP_GRACE_SECONDS:
            self._loop.call_soon(self._forget, peer, "disconnected")

    def _forget(self, peer: Peer, reason: str) -> None:
        if self._peers.get(peer.identity) is not peer:
            return
        del self._peers[peer.identity], self._names[peer.name]
        self._clients -= peer.is_client
        self._active.discard(peer)
        self._touched.discard(peer)
        peer.link.reset(reason, tell=False)
        self._tell(peer)
        peer.link.close()
        self._epoch = max(self._epoch, peer.link.epoch)

    def _disconnected(self) -> None:
        self._probe_all()
        if self._recheck is None:  # ZMQ may take a moment to drop the route
            self._recheck = self._loop.call_later(0.05, self._probe_again)

    def _probe_again(self) -> None:
        self._recheck = None
        self._probe_all()
        self.flush()

    def _probe_all(self) -> None:
        for peer in self._peers.values():
            peer.link.ping()
            self._touched.add(peer)

    def _sweep(self) -> None:
        """Once a second: forget clients that are silent and tcp peers that stayed away."""
        self._sweep_timer = self._loop.call_later(1.0, self._sweep)
        now = self._clock()
        for peer in self.peers():
            if now - peer.unreachable_since > TCP_GRACE_SECONDS:
                self._forget(peer, "disconnected")
            elif peer.is_client and now - peer.link.last_heard > self.client_idle_seconds:
                self._forget(peer, f"silent for {self.client_idle_seconds:g} s")


class Dealer(Port):
    """The side that dials `peer` under the link name `identity`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        *,
        identity: str,
        peer: str,
        epoch: int,
        inbox: Any,
        server_key: str = "",
        tuning: Tuning | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(context, endpoint, **callbacks)
        self.identity = identity.encode()
        self._server_key = server_key
        is_client = identity.startswith(CLIENT_PREFIX)
        link = Link(epoch, tuning or (_CLIENT_TUNING if is_client else Tuning()))
        self.peer = Peer(self, peer, b"", link, Codec[Any](inbox))
        self._keep_alive = INPROC_KEEP_ALIVE_SECONDS if endpoint.startswith("inproc://") else KEEP_ALIVE_SECONDS
        self._keep_alive_timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Connect and begin to say HELLO."""
        super().open()
        self.peer.link.connect()
        self.touch(self.peer)
        self._keep_alive_timer = self._loop.call_later(self._keep_alive, self._say_alive)

    def _cancel_timers(self) -> None:
        super()._cancel_timers()
        if self._keep_alive_timer is not None:
            self._keep_alive_timer.cancel()

    @property
    def up(self) -> bool:
        """Whether the link is up."""
        return self.peer.link.state is State.UP

    @property
    def writable(self) -> bool:
        """Whether `send` would take a message."""
        return self.peer.link.writable

    def send(self, message: msgspec.Struct, buffers: Buffers = ()) -> bool:
        """Queue a message; it leaves before the loop goes on. False, and nothing queued: link down or window full."""
        return self.peer.send(message, buffers)

    def peers(self) -> Iterable[Peer]:
        """The one link of this port."""
        return (self.peer,)

    def _make_socket(self) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.identity)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._server_key:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._server_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        return socket

    def _attach(self, socket: zmq.Socket[Any]) -> None:
        if self.endpoint.startswith("tcp://") and not self._server_key:
            raise ValueError(f"{self.endpoint}: tcp endpoints need the server's public CURVE key")
        socket.connect(self.endpoint)

    def _take(self, frames: list[bytes], now: float) -> None:
        self.peer.unreachable_since = math.inf
        self._feed(self.peer, frames, now)

    def _send(self, peer: Peer, frame: Frame) -> bool:
        try:
            self._send_parts([], frame)
        except zmq.Again:
            if self.endpoint.startswith("inproc://"):
                self._loop.call_soon(self._reconnect_inproc)
            return False
        return True

    def _disconnected(self) -> None:
        if self.endpoint.startswith("tcp://"):  # ZMQ connects again; the session goes on if the peer still knows it
            self.peer.link.ping()
            self.peer.unreachable_since = self._clock()
            self._loop.call_later(TCP_GRACE_SECONDS, self._still_away)
        else:
            self._lost()
        self.touch(self.peer)

    def _still_away(self) -> None:
        if self._clock() - self.peer.unreachable_since >= TCP_GRACE_SECONDS:
            self.peer.unreachable_since = math.inf
            self._lost()

    def _lost(self) -> None:
        self.peer.link.reset("disconnected", tell=False)
        self._tell(self.peer)
        self.touch(self.peer)

    def _reconnect_inproc(self) -> None:
        """An inproc peer that closed is never reconnected by ZMQ, and there is no event: sending fails, then we dial anew."""
        if self._socket is None or has(self._socket, zmq.POLLOUT):
            return
        self.drain(1 << 30)
        self._close_socket()
        self._open_socket()
        self._disconnected()
        self.touch(self.peer)

    def _say_alive(self) -> None:
        self._keep_alive_timer = self._loop.call_later(self._keep_alive, self._say_alive)
        self.peer.link.ping()
        self.touch(self.peer)
