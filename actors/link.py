"""A reliable, ordered, exactly-once message stream between two peers over frames that may be lost, repeated or reordered.

Sans-IO: no sockets and no clock; the transport feeds received frames in, sends what `outgoing` returns and passes the time
in seconds. The rules that the two sides follow are in protocols/README.md ("Frames and links"); in short::

          HELLO(E, 0) ──►                         E, F: epochs of this side and of the peer. A session is the pair (E, F);
                      ◄── HELLO(F, E)             DATA counts only when it names both, so nothing of an earlier session
    ACK / DATA(E, F, seq=1) ──►                   is ever delivered in a later one. Epochs of a peer only grow.

Loss is repaired by go-back-N: the receiver delivers `seq` = last + 1 and nothing else; at a gap it sends RESEND and the sender
starts over behind `ack` from its window of unacknowledged messages. A lost tail is found by probing: a HELLO inside a session
demands an answer (ACK, or RESEND when its `seq` shows a gap), so a slow peer costs one small frame and no payload twice.
A side that can't go on takes a greater epoch; the other sees that, or the RESET, and both report `Down`: exactly as if the
peer had died.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from radixcast.protocols.wire import PROTOCOL_VERSION, Header, Kind

Buffers = Sequence[bytes]

MAX_EPOCH = 1 << 53
"""Epochs are below this, so that every language can hold one."""


class State(Enum):
    """Where a link is in its life."""

    IDLE = "idle"
    """Nothing said and nothing heard yet."""
    CONNECTING = "connecting"
    """HELLO is being said."""
    UP = "up"
    """The peer's epoch is known: messages flow."""
    CLOSED = "closed"


class Frame(NamedTuple):
    """One frame to transmit."""

    header: Header
    payload: bytes
    buffers: Buffers


class Message(NamedTuple):
    """One delivered message."""

    payload: bytes
    buffers: Buffers


@dataclass(frozen=True)
class Up:
    """A session began with the peer's incarnation `epoch`."""

    epoch: int


@dataclass(frozen=True)
class Down:
    """The session ended. `unacknowledged` messages of ours may or may not have arrived."""

    reason: str
    unacknowledged: int


@dataclass(frozen=True)
class Writable:
    """The window was full when something was to be sent, and now has room (half of it is free)."""


Event = Up | Down | Writable


@dataclass(frozen=True)
class Tuning:
    """Bounds and times (seconds) of a link."""

    window: int = 1024
    """Unacknowledged messages."""
    window_bytes: int = 64 << 20
    """Bytes of unacknowledged messages; a single larger one is taken when the window is empty."""
    ack_every: int = 32
    """Messages received before an ACK is sent at once."""
    ack_bytes: int = 1 << 20
    """Bytes received before an ACK is sent at once."""
    ack_delay: float = 0.02
    """Longest time that a received message waits for its acknowledgement (data going back carries it for free)."""
    resend_delay: float = 0.25
    """Time before RESEND is repeated for the same gap."""
    hello_delay: float = 0.1
    """Time before HELLO is repeated; doubles up to `max_delay`."""
    probe_delay: float = 0.5
    """Time without acknowledgement before the peer is probed; doubles up to `max_delay`."""
    max_delay: float = 2.0
    give_up: float = math.inf
    """Time without acknowledgement after which the link is reset."""


DEFAULT = Tuning()


class Link:
    """One side of a link. `events` collects what happened; they come before the messages that the same call delivered.

    `epoch` must be greater than that of any earlier link of this side to the same peer (positive, below 2**53).
    """

    def __init__(self, epoch: int, tuning: Tuning = DEFAULT) -> None:
        self.epoch = epoch
        self.tuning = tuning
        self.state = State.IDLE
        self.peer_epoch = 0
        """The peer's incarnation in this session; 0: none."""
        self.events: deque[Event] = deque()
        self.last_heard = -math.inf
        """When the last frame of the peer's current incarnation came."""
        self.stale_frames = 0
        """Frames dropped because they belong to another session."""
        self.resent_frames = 0
        self._floor = 1  # lower epochs of the peer are stale
        self._farewell: Header | None = None
        self._say_hello = self._say_ack = self._say_resend = False
        self._hello_at = math.inf
        self._hello_wait = tuning.hello_delay
        self._clear_session()

    def _clear_session(self) -> None:
        self._window: dict[int, Message] = {}
        self._window_bytes = 0
        self._sent = 0  # number of the last message given to `send`
        self._next = 1  # number of the next message to transmit
        self._high = 0  # highest number ever transmitted
        self._received = 0  # number of the last message delivered
        self._unacked_in = self._unacked_in_bytes = 0
        self._starved = False
        self._ack_at = self._resend_at = self._probe_at = math.inf
        self._probe_wait = self.tuning.probe_delay
        self._give_up_at = math.inf
        self._say_ack = self._say_resend = False

    # ------------------------------------------------------------------ the owner's side

    @property
    def writable(self) -> bool:
        """Whether `send` would take a message."""
        return (
            self.state is State.UP
            and len(self._window) < self.tuning.window
            and (self._window_bytes < self.tuning.window_bytes or not self._window)
        )

    @property
    def unacknowledged(self) -> int:
        """Messages sent and not acknowledged."""
        return len(self._window)

    def connect(self) -> None:
        """Begin to say HELLO. The side that dials calls it once; the other side answers."""
        if self.state is State.IDLE:
            self.state = State.CONNECTING
            self._say_hello = True

    def send(self, payload: bytes, buffers: Buffers = ()) -> bool:
        """Take a message for the peer. False, and nothing taken, when the link is not up or the window is full."""
        if not self.writable:
            self._starved = self.state is State.UP
            return False
        self._sent += 1
        self._window[self._sent] = message = Message(payload, buffers)
        self._window_bytes += _size(message)
        return True

    def ping(self) -> None:
        """Ask for a sign of life (a client's keep-alive): the peer answers, with a new epoch when it has forgotten us."""
        if self.state is State.UP:
            self._say_hello = True

    def reset(self, reason: str, *, tell: bool = True) -> None:
        """End the session and begin another under a greater epoch. `tell`: send RESET (the peer can still hear us)."""
        if self.state in (State.CLOSED, State.IDLE):
            return
        self._restart(reason, self.epoch, tell=tell)

    def close(self) -> None:
        """End for good; the RESET that tells the peer is in the next `outgoing`."""
        self._farewell = self._header(Kind.RESET, self._floor) if self.peer_epoch else None
        if self.state is State.UP:
            self.events.append(Down("closed", len(self._window)))
        self.state = State.CLOSED
        self.peer_epoch = 0
        self._clear_session()
        self._say_hello = False
        self._hello_at = math.inf

    # ------------------------------------------------------------------ the transport's side

    def receive(self, header: Header, payload: bytes, buffers: Buffers, now: float) -> list[Message]:
        """Take one frame; returns the messages that it lets through (none or one). Never raises for a peer's nonsense."""
        if self.state is State.CLOSED:
            return []
        if header.kind is Kind.RESET:
            self._on_reset(header)
            return []
        if header.epoch < self._floor:
            self.stale_frames += 1
            self._farewell = self._stale_reset(header)
            return []
        if header.epoch != self.peer_epoch:
            if header.epoch >= MAX_EPOCH:
                return []
            self._meet(header.epoch)
        self.last_heard = now
        if header.peer_epoch != self.epoch:
            self.stale_frames += header.kind is not Kind.HELLO
            self._say_hello = True
            return []
        if header.ack > self._high:
            self.reset(f"peer acknowledged message {header.ack} of {self._high}")
            return []
        self._on_ack(header.ack, now)
        return self._in_session(header, payload, buffers, now)

    def outgoing(self, now: float) -> list[Frame]:
        """Frames to transmit now, in this order. A frame that can't be transmitted may be dropped or given to `unsent`."""
        frames: list[Frame] = []
        if self._farewell is not None:
            frames.append(Frame(self._farewell, b"", ()))
            self._farewell = None
        if self.state is State.IDLE or self.state is State.CLOSED:
            return frames
        if self._say_hello:
            self._say_hello = False
            frames.append(Frame(self._header(Kind.HELLO, self._high), b"", ()))
            if self.state is State.CONNECTING:
                self._hello_at = now + self._hello_wait
                self._hello_wait = min(2 * self._hello_wait, self.tuning.max_delay)
        if self._say_resend:
            frames.append(Frame(self._header(Kind.RESEND, self._high), b"", ()))
            self._resend_at = now + self.tuning.resend_delay
            self._acknowledged()
        if self._next <= self._sent:
            self._transmit(frames, now)
        if self._say_ack:
            frames.append(Frame(self._header(Kind.ACK, self._high), b"", ()))
            self._acknowledged()
        return frames

    def unsent(self, frame: Frame) -> None:
        """`frame` could not be transmitted: data goes out again with the next `outgoing`."""
        if frame.header.kind is Kind.DATA and frame.header.epoch == self.epoch and frame.header.seq in self._window:
            self._next = min(self._next, frame.header.seq)

    def tick(self, now: float) -> None:
        """Do what is due. Call when `deadline` has passed; frames are in the next `outgoing`."""
        if self._ack_at <= now:
            self._ack_at = math.inf
            self._say_ack = True
        if self._resend_at <= now:
            self._resend_at = math.inf
            self._say_resend = True
        if self._hello_at <= now:
            self._hello_at = math.inf
            self._say_hello = True
        if self._probe_at <= now:
            if self._give_up_at <= now:
                self.reset(f"no acknowledgement for {self.tuning.give_up:g} s")
                return
            self._say_hello = True
            self._probe_wait = min(2 * self._probe_wait, self.tuning.max_delay)
            self._probe_at = now + self._probe_wait

    @property
    def deadline(self) -> float:
        """When `tick` has something to do (infinite: nothing)."""
        return min(self._ack_at, self._resend_at, self._hello_at, self._probe_at)

    # ------------------------------------------------------------------ inside

    def _header(self, kind: Kind, seq: int) -> Header:
        return Header(PROTOCOL_VERSION, kind, self.epoch, self.peer_epoch, seq, self._received)

    def _acknowledged(self) -> None:
        """Whatever is owed to the peer in acknowledgements is in a frame now."""
        self._say_ack = self._say_resend = False
        self._unacked_in = self._unacked_in_bytes = 0
        self._ack_at = math.inf

    def _transmit(self, frames: list[Frame], now: float) -> None:
        self.resent_frames += max(0, self._high - self._next + 1)
        todo = range(self._next, self._sent + 1)
        frames.extend(Frame(self._header(Kind.DATA, seq), *self._window[seq]) for seq in todo)
        self._next = self._sent + 1
        self._high = self._sent
        self._acknowledged()
        if self._probe_at == math.inf:
            self._probe_at = now + self._probe_wait
            self._give_up_at = now + self.tuning.give_up

    def _meet(self, peer_epoch: int) -> None:
        """The peer speaks under an epoch that is new to this session."""
        if self.state is State.UP:
            self.events.append(Down("the peer started anew", len(self._window)))
        self._clear_session()
        self.peer_epoch = self._floor = peer_epoch
        self.state = State.UP
        self._hello_at = math.inf
        self._hello_wait = self.tuning.hello_delay
        self._say_hello = False
        self.events.append(Up(peer_epoch))

    def _restart(self, reason: str, at_least: int, *, tell: bool) -> None:
        if tell and self.peer_epoch:
            self._farewell = self._header(Kind.RESET, self._floor)
        if self.state is State.UP:
            self.events.append(Down(reason, len(self._window)))
        self._clear_session()
        self.epoch = max(self.epoch, at_least) + 1
        self.peer_epoch = 0
        self.state = State.CONNECTING
        self._say_hello = True
        self._hello_at = math.inf
        self._hello_wait = self.tuning.hello_delay

    def _stale_reset(self, header: Header) -> Header:
        """Tell a sender whose epoch is behind (its clock went back) which epoch it must exceed; a dead one never hears it."""
        return Header(PROTOCOL_VERSION, Kind.RESET, self.epoch, header.epoch, self._floor, 0)

    def _on_reset(self, header: Header) -> None:
        known = header.peer_epoch == self.epoch and self._floor <= header.epoch < MAX_EPOCH and header.seq < MAX_EPOCH
        if not known or self.state is State.IDLE:
            self.stale_frames += 1
            return
        told_stale = header.seq > self.epoch  # else the peer has left its epoch, and what still comes under it is late
        self._floor = header.epoch if told_stale else header.epoch + 1
        self._restart("reset by the peer", header.seq, tell=False)

    def _on_ack(self, ack: int, now: float) -> None:
        base = self._sent - len(self._window) + 1
        if ack < base:
            return
        for seq in range(base, ack + 1):
            self._window_bytes -= _size(self._window.pop(seq))
        self._next = max(self._next, ack + 1)
        self._probe_wait = self.tuning.probe_delay
        waiting = bool(self._window)
        self._probe_at = now + self._probe_wait if waiting else math.inf
        self._give_up_at = now + self.tuning.give_up if waiting else math.inf
        if self._starved and 2 * len(self._window) <= self.tuning.window and self.writable:
            self._starved = False
            self.events.append(Writable())

    def _in_session(self, header: Header, payload: bytes, buffers: Buffers, now: float) -> list[Message]:
        kind, seq = header.kind, header.seq
        if kind is Kind.DATA:
            if seq == self._received + 1:
                return [self._accept(Message(payload, buffers), now)]
            if seq <= self._received:
                self._say_ack = True
            else:
                self._gap(now)
            return []
        if kind is Kind.RESEND:
            self._next = self._sent - len(self._window) + 1
        if seq > self._received:
            self._gap(now, urgent=kind is Kind.HELLO)
        elif kind is Kind.HELLO:
            self._say_ack = True
        return []

    def _accept(self, message: Message, now: float) -> Message:
        self._received += 1
        self._resend_at = math.inf
        self._say_resend = False
        self._unacked_in += 1
        self._unacked_in_bytes += _size(message)
        if self._unacked_in >= self.tuning.ack_every or self._unacked_in_bytes >= self.tuning.ack_bytes:
            self._say_ack = True
        elif self._ack_at == math.inf:
            self._ack_at = now + self.tuning.ack_delay
        return message

    def _gap(self, now: float, *, urgent: bool = False) -> None:
        """Something before this frame is missing: ask once, then again only after a while (or when probed)."""
        if urgent or self._resend_at == math.inf:
            self._say_resend = True
            self._resend_at = now + self.tuning.resend_delay


def _size(message: Message) -> int:
    return len(message.payload) + sum(map(len, message.buffers)) if message.buffers else len(message.payload)
