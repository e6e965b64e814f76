"""Two links over a channel that loses, repeats and reorders, between peers that stop and start again at any moment.

Whatever happens, what arrives arrives once and in order within a session; and when the channel heals, everything arrives whose
sender was not told that the link went down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixcast.actors.link import Down, Frame, Link, State, Tuning, Up
from radixcast.protocols.wire import decode_header, encode_header

TUNING = Tuning(window=6, window_bytes=1000, ack_every=3, ack_bytes=500)
SIDES = st.sampled_from([0, 1])


@dataclass
class Side:
    """One peer: its link, and what it knows it said and heard."""

    number: int
    link: Link
    session: int = 0
    """Grows with every session that this side sees end."""
    sent: dict[int, int] = field(default_factory=dict)
    """Session -> messages sent in it."""
    ups: int = 0
    downs: int = 0

    def say(self) -> None:
        count = self.sent.get(self.session, 0)
        if self.link.send(b"%d.%d" % (self.session, count), (b"buffer" * (count % 3),)):
            self.sent[self.session] = count + 1


class LossyLinks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epochs = [100, 200]
        self.sides = [Side(0, Link(100, TUNING)), Side(1, Link(200, TUNING))]
        self.wires: list[list[Frame]] = [[], []]  # to side 0 and to side 1
        self.heard: list[dict[int, int]] = [{}, {}]  # per receiving side: the sender's session -> messages heard
        self.latest = [-1, -1]  # per receiving side: the newest session heard of
        self.sides[0].link.connect()

    # -- what the world does

    @rule(side=SIDES, count=st.integers(1, 4))
    def say(self, side: int, count: int) -> None:
        for _ in range(count):
            self.sides[side].say()

    @rule(side=SIDES)
    def transmit(self, side: int) -> None:
        self.wires[1 - side] += self.sides[side].link.outgoing(self.now)

    @rule(side=SIDES, refused=st.integers(0, 5))
    def transmit_some(self, side: int, refused: int) -> None:
        """The socket takes only the first few frames."""
        frames = self.sides[side].link.outgoing(self.now)
        cut = max(0, len(frames) - refused)
        self.wires[1 - side] += frames[:cut]
        for frame in frames[cut:]:
            self.sides[side].link.unsent(frame)

    @precondition(lambda self: any(self.wires))
    @rule(side=SIDES, place=st.integers(0, 20), copies=st.sampled_from([0, 1, 1, 2, 2]))
    def deliver(self, side: int, place: int, copies: int) -> None:
        """A frame near the head of the wire arrives; or is lost; or arrives and stays in the wire."""
        wire = self.wires[side]
        if not wire:
            return
        place = place % len(wire) if place > 12 else 0
        frame = wire.pop(place)
        if copies:
            self.receive(side, frame)
        if copies > 1:
            wire.insert(len(wire) // 2, frame)

    @rule(count=st.integers(0, 3), copied=st.booleans())
    def exchange(self, count: int, copied: bool) -> None:
        """Both speak, and a while nothing goes wrong; copies of what was said may stay in the wires."""
        for side in self.sides:
            for _ in range(count):
                side.say()
        for _ in range(3):
            for to in (0, 1):
                frames = self.sides[1 - to].link.outgoing(self.now)
                for frame in frames:
                    self.receive(to, frame)
                self.wires[to] += frames[-count:] if count and copied else []

    @rule(side=SIDES)
    def lose_all(self, side: int) -> None:
        self.wires[side] = []

    @rule(side=SIDES, count=st.integers(1, 4))
    def say_into_the_void(self, side: int, count: int) -> None:
        """What is said now is lost, and nothing said later shows the gap by itself."""
        self.say(side, count)
        self.sides[side].link.outgoing(self.now)

    @rule(side=SIDES)
    def deliver_all(self, side: int) -> None:
        wire, self.wires[side] = self.wires[side], []
        for frame in wire:
            self.receive(side, frame)

    @rule(seconds=st.sampled_from([0.001, 0.03, 0.3, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for side in self.sides:
            side.link.tick(self.now)
            self.note(side)

    @rule(side=SIDES, lost=st.booleans())
    def restart(self, side: int, lost: bool) -> None:
        """The process dies and a new one takes its place; frames in the wire may or may not survive it."""
        old = self.sides[side]
        self.epochs[side] = max(self.epochs[side], old.link.epoch) + 1
        self.sides[side] = Side(side, Link(self.epochs[side], TUNING), old.session + 1)
        if side == 0:
            self.sides[0].link.connect()
        if lost:
            self.wires = [[], []]

    @rule(side=SIDES, tell=st.booleans())
    def reset(self, side: int, tell: bool) -> None:
        self.sides[side].link.reset("test", tell=tell)
        self.note(self.sides[side])

    @rule(side=SIDES)
    def ping(self, side: int) -> None:
        self.sides[side].link.ping()

    # -- what must hold

    def receive(self, to: int, frame: Frame) -> None:
        side = self.sides[to]
        header = decode_header(encode_header(frame.header))
        messages = side.link.receive(header, frame.payload, frame.buffers, self.now)
        self.note(side)
        for message in messages:
            session, count = map(int, message.payload.split(b"."))
            assert message.buffers == (b"buffer" * (count % 3),)
            assert session >= self.latest[to], "a message of an earlier session"
            self.latest[to] = session
            assert count == self.heard[to].get(session, 0), "lost, repeated or out of order"
            self.heard[to][session] = count + 1

    def note(self, side: Side) -> None:
        while side.link.events:
            event = side.link.events.popleft()
            if isinstance(event, Up):
                side.ups += 1
            elif isinstance(event, Down):
                side.downs += 1
                side.session += 1

    @invariant()
    def window_is_bounded(self) -> None:
        for side in self.sides:
            assert side.link.unacknowledged <= TUNING.window
            assert 0 <= side.ups - side.downs <= 1
            assert (side.link.state is State.UP) == (side.ups - side.downs == 1)

    def teardown(self) -> None:
        """The channel heals: everything arrives, and the links fall silent."""
        self.heal()
        mutual = [side.link.peer_epoch == self.sides[1 - side.number].link.epoch for side in self.sides]
        if all(mutual):
            self.everything_has_arrived()
        self.sides[0].link.ping()  # the keep-alive: only so does an idle side learn that its peer started anew
        self.heal()
        for side in self.sides:
            assert side.link.state is State.UP
            assert side.link.peer_epoch == self.sides[1 - side.number].link.epoch
        self.everything_has_arrived()
        for side in self.sides:  # and they carry again
            side.say()
        self.heal()
        self.everything_has_arrived()

    def heal(self) -> None:
        for _ in range(25):
            for to in (0, 1):
                wire, self.wires[to] = self.wires[to] + self.sides[1 - to].link.outgoing(self.now), []
                for frame in wire:
                    self.receive(to, frame)
            self.pass_time(0.5)

    def everything_has_arrived(self) -> None:
        for side in self.sides:
            assert side.link.unacknowledged == 0
            assert self.heard[1 - side.number].get(side.session, 0) == side.sent.get(side.session, 0)
            assert not side.link.outgoing(self.now)


LossyLinks.TestCase.settings = settings(
    max_examples=600, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLossyLinks = LossyLinks.TestCase
