"""What every ZMQ socket under links has in common: reading, writing and timers. `transport` has the two kinds.

A plain zmq socket watched through its file descriptor; everything that has arrived is read in one wake-up, everything to be
sent leaves in one flush, and one timer, which runs only while a link waits for something, serves all links of the socket.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NotRequired, Required, TypedDict, Unpack

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from radixcast.actors.link import Buffers, Down, Frame, Link, Up
from radixcast.actors.setup import CLIENT_PREFIX
from radixcast.protocols import limits
from radixcast.protocols.errors import ProtocolError
from radixcast.protocols.wire import Codec, decode_header, encode_header

logger = logging.getLogger(__name__)

TICK = 0.02
"""Seconds between two looks at the links' timers, while any is running."""
READ_BATCH = 256
"""Messages read in one go before they are handled."""

_HWM = 2048  # a tripwire: windows are smaller, so it is not reached while peers keep to the protocol
_COPY_BELOW = 1 << 16


class Callbacks(TypedDict, total=False):
    """What a port tells its owner. All run on the loop; none may block."""

    on_message: Required[Callable[[Any, str, list[bytes]], None]]
    """(decoded message, peer, buffers)"""
    on_up: Required[Callable[[str], None]]
    """(peer): a session began; what was said in an earlier one is void."""
    on_down: Required[Callable[[str, str], None]]
    """(peer, reason): the session ended."""
    on_writable: NotRequired[Callable[[str], None]]
    """(peer): a `send` was refused because the window was full; now there is room."""
    on_readable: NotRequired[Callable[[Port], None]]
    """Something has arrived: the owner calls `drain` and `flush` when it likes. Left out: the port does it at once."""


class Peer:
    """The other end of one link of a port."""

    __slots__ = ("codec", "identity", "is_client", "link", "name", "port", "unreachable_since")

    def __init__(self, port: Port, name: str, identity: bytes, link: Link, codec: Codec[Any]) -> None:
        self.port = port
        self.name = name
        self.identity = identity
        self.link = link
        self.codec = codec
        self.is_client = name.startswith(CLIENT_PREFIX)
        self.unreachable_since = math.inf

    @property
    def writable(self) -> bool:
        """Whether `send` would take a message."""
        return self.link.writable

    def send(self, message: msgspec.Struct, buffers: Buffers = ()) -> bool:
        """Queue a message; it leaves with the next flush. False, and nothing queued: link down or window full."""
        link = self.link
        if not link.writable:
            return link.send(b"")  # notes that room is wanted
        link.send(self.codec.encode(message), buffers)
        self.port.touch(self)
        return True


class Port:
    """A socket, its links and their timers. Base of Router and Dealer."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        self.context = context
        self.endpoint = endpoint
        self.received_messages = 0
        self.malformed_frames = 0
        self._on_message = callbacks["on_message"]
        self._on_up = callbacks["on_up"]
        self._on_down = callbacks["on_down"]
        self._on_writable = callbacks.get("on_writable")
        self._on_readable = callbacks.get("on_readable")
        self._clock = time.monotonic
        self._touched: set[Peer] = set()
        self._active: set[Peer] = set()
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop
        self._socket: zmq.Socket[Any] | None = None
        self._monitor: zmq.Socket[Any] | None = None

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Create the socket on the running loop. Raises zmq.ZMQError when the endpoint can't be bound or is
        malformed, ValueError when it needs a key and there is none."""
        self._loop = asyncio.get_running_loop()
        self._open_socket()

    def close(self) -> None:
        """Tell the peers and close. Idempotent. Messages that are not acknowledged may be lost (see `flushed`)."""
        if self._socket is None:
            return
        for peer in self.peers():
            peer.link.close()
            peer.link.events.clear()
            self._touched.add(peer)
        self.flush()
        self._cancel_timers()
        self._close_socket(linger=100)

    def abort(self) -> None:
        """Close without a word, as if killed."""
        self._cancel_timers()
        self._close_socket()

    def _cancel_timers(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def flushed(self, seconds: float) -> bool:
        """Wait until every message sent is acknowledged. False after so many seconds."""
        deadline = self._clock() + seconds
        self.flush()
        while any(p.link.unacknowledged for p in self.peers()):
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(TICK / 4)
            self.drain()
            self.flush()
        return True

    def peers(self) -> Iterable[Peer]:
        """All links of this port."""
        raise NotImplementedError

    # ------------------------------------------------------------------ reading

    def drain(self, limit: int = READ_BATCH) -> bool:
        """Read what has arrived (at most `limit` messages) and deliver it. True when there may be more."""
        socket = self._socket
        if socket is None:
            return False
        now = self._clock()
        for _ in range(limit):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._take(frames, now)
        return True

    def _take(self, frames: list[bytes], now: float) -> None:
        raise NotImplementedError

    def _feed(self, peer: Peer, frames: list[bytes], now: float) -> None:
        """Header, payload and buffers of one message of `peer`. Nothing that a peer sends raises."""
        link = peer.link
        self.touch(peer)
        messages: list[tuple[Any, list[bytes]]] = []
        try:
            if not 1 <= len(frames) <= limits.MAX_ZMQ_FRAMES:
                raise ProtocolError(f"{len(frames)} frames in one message")
            header = decode_header(frames[0])
            payload = frames[1] if len(frames) > 1 else b""
            delivered = link.receive(header, payload, frames[2:], now)
            messages += [(peer.codec.decode(m.payload), frames[2:]) for m in delivered]
        except ProtocolError as error:
            self.malformed_frames += 1
            logger.warning("%s sent a frame that is not understood, its link is reset: %s", peer.name, error)
            link.reset("a malformed frame")
        if link.events:
            self._tell(peer)
        for message, buffers in messages:
            self.received_messages += 1
            self._on_message(message, peer.name, buffers)

    def _tell(self, peer: Peer) -> None:
        events = peer.link.events
        while events:
            event = events.popleft()
            if isinstance(event, Up):
                self._on_up(peer.name)
            elif isinstance(event, Down):
                self._on_down(peer.name, event.reason)
            elif self._on_writable is not None:
                self._on_writable(peer.name)

    def _readable(self) -> None:
        if self._on_readable is not None:
            self._on_readable(self)
            return
        more = True
        try:
            more = self.drain()
        finally:  # a callback that raised must not leave the descriptor without its next edge
            if more:
                self._loop.call_soon(self._readable)
        self.flush()

    # ------------------------------------------------------------------ writing

    def touch(self, peer: Peer) -> None:
        """`peer` may have something to transmit: flush before the loop goes on."""
        self._touched.add(peer)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._scheduled_flush)

    def _scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Transmit all that is waiting."""
        if not self._touched or self._socket is None:
            return
        now = self._clock()
        touched, self._touched = self._touched, set()
        for peer in touched:
            self._transmit(peer, now)
            if peer.link.deadline < math.inf:
                self._active.add(peer)
        self._arm()
        # The descriptor is edge-triggered, and a send may have swallowed the edge of something that arrived.
        if self._socket is not None and has(self._socket, zmq.POLLIN):
            self._loop.call_soon(self._readable)

    def _transmit(self, peer: Peer, now: float) -> None:
        frames = peer.link.outgoing(now)
        for i, frame in enumerate(frames):
            if not self._send(peer, frame):
                for later in frames[i:]:
                    peer.link.unsent(later)
                self._active.add(peer)
                break

    def _send(self, peer: Peer, frame: Frame) -> bool:
        """Hand one frame to ZMQ. False: not now (the link stays active and tries again with the next tick)."""
        raise NotImplementedError

    def _send_parts(self, head: list[bytes], frame: Frame) -> None:
        parts = [*head, encode_header(frame.header), frame.payload, *frame.buffers]
        assert self._socket is not None
        small = len(frame.payload) < _COPY_BELOW and not frame.buffers
        self._socket.send_multipart(parts, zmq.DONTWAIT, copy=small)

    # ------------------------------------------------------------------ timers

    def _arm(self) -> None:
        if self._active and self._timer is None:
            self._timer = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock()
        active, self._active = self._active, set()
        for peer in active:
            link = peer.link
            if link.deadline <= now:
                link.tick(now)
                if link.events:
                    self._tell(peer)
            self._transmit(peer, now)
            if link.deadline < math.inf:
                self._active.add(peer)
        self._arm()
        if self._socket is not None and has(self._socket, zmq.POLLIN):
            self._readable()

    # ------------------------------------------------------------------ socket

    def _make_socket(self) -> zmq.Socket[Any]:
        raise NotImplementedError

    def _open_socket(self) -> None:
        socket = self._make_socket()
        socket.setsockopt(zmq.SNDHWM, _HWM)
        socket.setsockopt(zmq.RCVHWM, _HWM)
        socket.setsockopt(zmq.LINGER, 0)
        if self.endpoint.startswith("tcp://"):
            socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._monitor = socket.get_monitor_socket(events)
        try:
            self._attach(socket)
        except (zmq.ZMQError, ValueError):
            socket.disable_monitor()
            socket.close(0)
            self._monitor = None
            raise
        self._socket = socket
        self._loop.add_reader(socket.FD, self._readable)
        self._loop.add_reader(self._monitor.FD, self._monitored)
        self._loop.call_soon(self._readable)
        self._loop.call_soon(self._monitored)

    def _attach(self, socket: zmq.Socket[Any]) -> None:
        """Bind or connect."""
        raise NotImplementedError

    def _close_socket(self, linger: int = 0) -> None:
        socket, monitor, self._socket, self._monitor = self._socket, self._monitor, None, None
        if socket is None or monitor is None:
            return
        self._loop.remove_reader(socket.FD)
        self._loop.remove_reader(monitor.FD)
        socket.disable_monitor()
        socket.close(linger)

    def _monitored(self) -> None:
        disconnected = False
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
            if event["event"] == zmq.EVENT_DISCONNECTED:
                disconnected = True
            else:
                logger.warning("%s: ZMQ handshake failed (wrong or missing CURVE keys?)", self.endpoint)
        if disconnected and self._socket is not None:
            self.drain(1 << 30)  # what arrived before the end still counts
            self._disconnected()
            self.flush()

    def _disconnected(self) -> None:
        raise NotImplementedError


def has(socket: zmq.Socket[Any], event: int) -> bool:
    """Whether the socket is ready for POLLIN or POLLOUT right now."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & event)
