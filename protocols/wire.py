"""Bytes of one message: a header frame, a payload frame and optional buffer frames.

    frame 0   msgpack array [version, kind, epoch, peer_epoch, seq, ack]
    frame 1   msgpack payload: a tagged map (public messages) or a tagged array (between our own actors); may be empty
    frame 2…  raw buffers that the payload refers to (images, tensors)

`epoch` names the sender's incarnation, `peer_epoch` the receiver's incarnation that the sender knows (0: none yet).
`seq` counts the sender's data frames from 1; `ack` is the highest seq received in order. README.md has the rules.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Generic, TypeVar

import msgspec

from radixcast.protocols.errors import ProtocolError

PROTOCOL_VERSION = 1


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 0
    """First frame of an incarnation; no payload. Answered by HELLO when the answerer has not said it yet, else ACK."""
    DATA = 1
    """Carries payload number `seq`."""
    ACK = 2
    """Tells `ack`; no payload."""
    RESEND = 3
    """Ask for everything after `ack`; no payload."""
    RESET = 4
    """The sender can't go on with this link (window lost, or the peer's epoch is stale); both sides start anew."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The fixed part of every frame."""

    version: int
    kind: Kind
    epoch: int
    peer_epoch: int
    seq: int
    ack: int


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)


def encode_header(header: Header) -> bytes:
    """Header -> msgpack bytes."""
    return _header_encoder.encode(header)


def decode_header(data: bytes | memoryview) -> Header:
    """Msgpack bytes -> Header. Raises ProtocolError for anything else, an unknown version included."""
    try:
        header = _header_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"bad header: {error}") from None
    if header.version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {header.version}, this side speaks {PROTOCOL_VERSION}")
    return header


T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes messages and decodes one closed union of them (an actor's inbox)."""

    def __init__(self, inbox: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(inbox)

    def encode(self, message: msgspec.Struct) -> bytes:
        """Message -> msgpack bytes."""
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> T:
        """Msgpack bytes -> a message of the inbox. Raises ProtocolError when it is none of them."""
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"bad message: {error}") from None
