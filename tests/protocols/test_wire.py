"""Headers and payloads: what fits is decoded to the same, anything else is a ProtocolError and nothing worse."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcast.protocols import wire
from radixcast.protocols.errors import ProtocolError
from radixcast.protocols.public import Abort, ClientToTokenizer, Generate, TextDelta
from radixcast.protocols.wire import Codec, Header, Kind, decode_header, encode_header

numbers = st.integers(0, 2**53)


@given(st.sampled_from(Kind), numbers, numbers, numbers, numbers)
def test_header_round_trip(kind: Kind, epoch: int, peer: int, seq: int, ack: int) -> None:
    header = Header(wire.PROTOCOL_VERSION, kind, epoch, peer, seq, ack)
    assert decode_header(encode_header(header)) == header
    assert msgspec.msgpack.decode(encode_header(header)) == [1, int(kind), epoch, peer, seq, ack]


@given(st.binary(max_size=40))
def test_noise_is_a_protocol_error(data: bytes) -> None:
    codec: Codec[ClientToTokenizer] = Codec(ClientToTokenizer)
    for decode in (decode_header, codec.decode):
        with contextlib.suppress(ProtocolError):
            decode(data)


@pytest.mark.parametrize("fields", [[2, 1, 1, 1, 1, 1], [1, 9, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, "1", 1, 1, 1], {}])
def test_bad_headers(fields: object) -> None:
    with pytest.raises(ProtocolError):
        decode_header(msgspec.msgpack.encode(fields))


def test_longer_headers_of_a_later_minor_version_are_read() -> None:
    assert decode_header(msgspec.msgpack.encode([1, 1, 2, 3, 4, 5, "new"])).ack == 5


def test_codec_takes_only_its_inbox() -> None:
    codec: Codec[ClientToTokenizer] = Codec(ClientToTokenizer)
    assert codec.decode(codec.encode(Abort(rid="r"))) == Abort(rid="r")
    assert codec.decode(memoryview(codec.encode(Generate(rid="r", text="x")))) == Generate(rid="r", text="x")
    with pytest.raises(ProtocolError, match="TextDelta"):
        codec.decode(codec.encode(TextDelta(rid="r")))
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(Abort(rid="r"))[:-1])
