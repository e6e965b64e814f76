"""Link, case by case: two sides and a wire that the test holds in its hands."""

from __future__ import annotations

import itertools
import math

import pytest

from fakes.clock import ManualClock
from radixcast.actors.link import DEFAULT, Down, Event, Frame, Link, Message, State, Tuning, Up, Writable
from radixcast.protocols.wire import Header, Kind


def carry(source: Link, target: Link, now: float = 0.0, *, drop: tuple[Kind, ...] = ()) -> list[bytes]:
    """Transmit what `source` has to say, but for kinds in `drop`; returns the payloads that `target` delivered."""
    delivered: list[Message] = []
    for frame in source.outgoing(now):
        if frame.header.kind not in drop:
            delivered += target.receive(frame.header, frame.payload, frame.buffers, now)
    return [m.payload for m in delivered]


def settle(a: Link, b: Link, now: float = 0.0) -> tuple[list[bytes], list[bytes]]:
    """Exchange frames until both are silent; returns what a and b delivered."""
    at_a: list[bytes] = []
    at_b: list[bytes] = []
    for _ in range(20):
        at_b += carry(a, b, now)
        at_a += carry(b, a, now)
    return at_a, at_b


def events(link: Link) -> list[Event]:
    out = list(link.events)
    link.events.clear()
    return out


def pair(tuning: Tuning = DEFAULT) -> tuple[Link, Link]:
    """Two links with a session between them."""
    a, b = Link(10, tuning), Link(20, tuning)
    a.connect()
    settle(a, b)
    assert events(a) == [Up(20)]
    assert events(b) == [Up(10)]
    return a, b


def kinds(frames: list[Frame]) -> list[Kind]:
    return [f.header.kind for f in frames]


def test_handshake_takes_hello_hello_ack() -> None:
    a, b = Link(10), Link(20)
    a.connect()
    (hello,) = a.outgoing(0)
    assert hello.header == Header(1, Kind.HELLO, 10, 0, 0, 0)
    b.receive(*hello, 0)
    (answer,) = b.outgoing(0)
    assert answer.header == Header(1, Kind.HELLO, 20, 10, 0, 0)
    a.receive(*answer, 0)
    (ack,) = a.outgoing(0)
    assert ack.header == Header(1, Kind.ACK, 10, 20, 0, 0)
    b.receive(*ack, 0)
    assert not b.outgoing(0)
    assert a.state is b.state is State.UP


def test_nothing_is_taken_before_the_link_is_up() -> None:
    link = Link(1)
    assert not link.writable
    assert not link.send(b"x")
    link.connect()
    assert not link.send(b"x")


def test_messages_and_buffers_arrive_in_order_both_ways() -> None:
    a, b = pair()
    for i in range(5):
        assert a.send(b"a%d" % i, (b"buf",))
        assert b.send(b"b%d" % i)
    frames = a.outgoing(0)
    got = [m for f in frames for m in b.receive(*f, 0)]
    assert got == [Message(b"a%d" % i, (b"buf",)) for i in range(5)]
    assert carry(b, a) == [b"b%d" % i for i in range(5)]
    assert a.unacknowledged == 0  # acknowledged by b's data
    assert b.unacknowledged == 5


def test_ack_is_delayed_then_sent_alone() -> None:
    a, b = pair()
    a.send(b"x")
    assert carry(a, b, 1.0) == [b"x"]
    assert b.outgoing(1.0) == []
    assert b.deadline == pytest.approx(1.0 + DEFAULT.ack_delay)
    b.tick(b.deadline)
    frames = b.outgoing(2.0)
    assert kinds(frames) == [Kind.ACK]
    a.receive(*frames[0], 2.0)
    assert a.unacknowledged == 0
    assert a.deadline == math.inf
    assert b.deadline == math.inf


def test_ack_comes_at_once_after_many_messages_or_bytes() -> None:
    a, b = pair(Tuning(ack_every=4, ack_bytes=100))
    for _ in range(4):
        a.send(b"x")
    carry(a, b)
    assert kinds(b.outgoing(0)) == [Kind.ACK]
    a.send(b"x", (b"y" * 100,))
    carry(a, b)
    assert kinds(b.outgoing(0)) == [Kind.ACK]


def test_gap_is_asked_for_once_and_repaired() -> None:
    a, b = pair()
    for i in range(4):
        a.send(b"%d" % i)
    first, second, third, fourth = a.outgoing(0)
    got = b.receive(*first, 0)
    for late in (third, fourth):  # the second is lost
        assert b.receive(*late, 0) == []
    asked = b.outgoing(0)
    assert kinds(asked) == [Kind.RESEND]
    assert asked[0].header.ack == 1
    a.receive(*asked[0], 0)
    got += [m for f in a.outgoing(0) for m in b.receive(*f, 0)]
    assert [m.payload for m in got] == [b"0", b"1", b"2", b"3"]
    assert a.resent_frames == 3
    assert b.receive(*second, 0) == []  # a late copy
    assert kinds(b.outgoing(0)) == [Kind.ACK]


def test_lost_resend_is_repeated() -> None:
    a, b = pair()
    a.send(b"0")
    a.send(b"1")
    b.receive(*a.outgoing(0)[1], 0)
    assert kinds(b.outgoing(0)) == [Kind.RESEND]  # lost
    b.tick(DEFAULT.resend_delay)
    assert carry(b, a, 1.0) == []
    assert carry(a, b, 1.0) == [b"0", b"1"]


def test_lost_tail_is_found_by_a_probe_without_sending_payload_to_a_slow_peer() -> None:
    a, b = pair()
    a.send(b"0")
    assert kinds(a.outgoing(0)) == [Kind.DATA]  # lost
    a.tick(a.deadline)
    probe = a.outgoing(1)
    assert kinds(probe) == [Kind.HELLO]
    b.receive(*probe[0], 1)
    answer = b.outgoing(1)
    assert kinds(answer) == [Kind.RESEND]
    a.receive(*answer[0], 1)
    assert carry(a, b, 1) == [b"0"]


def test_lost_ack_is_repeated_for_a_probe() -> None:
    a, b = pair()
    a.send(b"0")
    assert carry(a, b) == [b"0"]
    b.tick(1)
    assert kinds(b.outgoing(1)) == [Kind.ACK]  # lost
    a.tick(1)
    assert settle(a, b, 1) == ([], [])
    assert a.unacknowledged == 0


def test_probes_back_off_and_end_in_a_reset() -> None:
    a, _ = pair(Tuning(give_up=10))
    a.send(b"0")
    a.outgoing(0)
    times = []
    while a.state is State.UP:
        times.append(a.deadline)
        a.tick(a.deadline)
        a.outgoing(a.deadline)
    gaps = [y - x for x, y in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert max(gaps) == DEFAULT.max_delay
    (down,) = events(a)
    assert isinstance(down, Down)
    assert "10 s" in down.reason
    assert a.epoch == 11


def test_window_is_bounded_in_messages_and_tells_when_there_is_room() -> None:
    a, b = pair(Tuning(window=4, ack_every=1))
    assert [a.send(b"x") for _ in range(6)] == [True] * 4 + [False] * 2
    assert not a.writable
    assert len(carry(a, b)) == 4
    carry(b, a)
    assert events(a) == [Writable()]
    assert a.send(b"y")


def test_window_is_bounded_in_bytes_but_takes_one_large_message() -> None:
    a, b = pair(Tuning(window_bytes=100))
    assert a.send(b"x" * 1000)
    assert not a.send(b"y")
    settle(a, b)
    b.tick(1)
    settle(a, b)
    assert events(a) == [Writable()]
    assert a.send(b"y" * 99)
    assert a.send(b"z")
    assert not a.send(b"z")


def test_restarted_peer_takes_the_old_session_down() -> None:
    a, b = pair()
    b.send(b"lost")
    old = a.outgoing(0)
    a2 = Link(12)
    a2.connect()
    assert settle(a2, b) == ([], [])
    assert events(b) == [Down("the peer started anew", 1), Up(12)]
    assert not any(b.receive(*f, 0) for f in old)
    assert b.send(b"new")
    assert settle(a2, b) == ([b"new"], [])


def test_data_of_an_earlier_session_is_never_delivered() -> None:
    a, _b = pair()
    a.send(b"early")
    (early,) = a.outgoing(0)
    b2 = Link(21)  # b restarts and a does not know yet
    assert b2.receive(*early, 0) == []
    assert b2.stale_frames == 1
    settle(a, b2)
    assert events(a) == [Down("the peer started anew", 1), Up(21)]
    assert b2.receive(*early, 0) == []
    assert a.send(b"late")
    assert settle(a, b2) == ([], [b"late"])


def test_reset_begins_a_new_session_also_when_its_frame_is_lost() -> None:
    for drop in ((), (Kind.RESET,)):
        a, b = pair()
        a.send(b"unknown")
        a.outgoing(0)
        a.reset("test")
        assert a.epoch == 11
        carry(a, b, drop=drop)
        settle(a, b)
        assert [type(e) for e in events(a)] == [Down, Up]
        assert [type(e) for e in events(b)] == [Down, Up]
        assert b.peer_epoch == a.epoch
        a.send(b"x")
        assert settle(a, b) == ([], [b"x"])


def test_both_reset_at_once() -> None:
    a, b = pair()
    a.reset("a")
    b.reset("b")
    settle(a, b)
    assert a.peer_epoch == b.epoch
    assert b.peer_epoch == a.epoch
    a.send(b"x")
    assert settle(a, b) == ([], [b"x"])


def test_peer_whose_clock_went_back_learns_a_usable_epoch() -> None:
    _, b = pair()
    a2 = Link(3)
    a2.connect()
    settle(a2, b)
    assert a2.epoch == 11
    assert a2.state is State.UP
    a2.send(b"x")
    assert settle(a2, b) == ([], [b"x"])


def test_impossible_acknowledgement_resets() -> None:
    a, _ = pair()
    a.receive(Header(1, Kind.ACK, 20, 10, 0, 5), b"", (), 0)
    (down,) = events(a)
    assert isinstance(down, Down)
    assert kinds(a.outgoing(0)) == [Kind.RESET, Kind.HELLO]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("number", [-(2**63), -1, 0, 1, 2**53, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", ["epoch", "peer_epoch", "seq", "ack"])
def test_no_header_harms(kind: Kind, number: int, place: str) -> None:
    from radixcast.protocols.wire import encode_header

    a, b = pair()
    fields = {"epoch": 10, "peer_epoch": 20, "seq": 0, "ack": 0} | {place: number}
    b.receive(Header(1, kind, **fields), b"", (), 0)
    for link in (a, b):
        for frame in link.outgoing(0):
            encode_header(frame.header)
    a2 = Link(max(b.peer_epoch, 10) + 1)
    a2.connect()
    settle(a2, b)
    assert a2.state is State.UP


def test_unsent_frames_go_out_again_in_order() -> None:
    a, b = pair()
    for i in range(3):
        a.send(b"%d" % i)
    frames = a.outgoing(0)
    got = b.receive(*frames[0], 0)
    a.unsent(frames[1])
    a.unsent(frames[2])
    got += [m for f in a.outgoing(0) for m in b.receive(*f, 0)]
    assert [m.payload for m in got] == [b"0", b"1", b"2"]


def test_close_tells_the_peer_and_takes_nothing_more() -> None:
    a, b = pair()
    a.close()
    assert events(a) == [Down("closed", 0)]
    carry(a, b)
    assert [type(e) for e in events(b)] == [Down]
    assert a.state is State.CLOSED
    assert not a.send(b"x")
    assert a.outgoing(0) == []
    assert a.deadline == math.inf
    carry(b, a)
    assert a.state is State.CLOSED


def test_ping_is_answered_and_shows_a_peer_that_forgot() -> None:
    a, b = pair()
    a.ping()
    carry(a, b)
    assert kinds(b.outgoing(0)) == [Kind.ACK]
    forgetful = Link(25)
    a.ping()
    settle(a, forgetful)
    assert events(a) == [Down("the peer started anew", 0), Up(25)]


def test_hello_is_repeated_with_a_growing_delay() -> None:
    clock = ManualClock()
    link = Link(1)
    link.connect()
    times = []
    for _ in range(8):
        assert kinds(link.outgoing(clock())) == [Kind.HELLO]
        times.append(link.deadline - clock())
        clock.now = link.deadline
        link.tick(clock())
    assert times[0] == DEFAULT.hello_delay
    assert times == sorted(times)
    assert times[-1] == pytest.approx(DEFAULT.max_delay)
