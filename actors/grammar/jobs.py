"""What the prover and its worker say to each other over two pipes: frames of a 4-byte length (big-endian) and msgpack."""

from __future__ import annotations

import struct

import msgspec

from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.internal import Internal
from radixcast.protocols.model import ModelSpec

HEADER = struct.Struct(">I")
MAX_FRAME = 16 << 20
"""Bytes of one frame."""


class Start(Internal, frozen=True, tag="Start"):
    """The first frame to a worker: whose vocabulary it is about."""

    model: ModelSpec
    run_dir: str
    """Where automata go; '': nowhere, none are made."""


class Started(Internal, frozen=True, tag="Started"):
    """The vocabulary is loaded, or `error` says why it can't be."""

    error: ErrorInfo | None = None


class Job(Internal, frozen=True, tag="Job"):
    """Show that a constraint can be compiled."""

    id: int
    spec: GrammarSpec
    seconds: float
    """After which it is killed."""
    outlines_seconds: float = 0.0
    """How long an automaton may take once the constraint is proven; 0: none is made."""
    memory: int = 1 << 30
    """Bytes that it may allocate."""


class Done(Internal, frozen=True, tag="Done"):
    """What came of a job."""

    id: int
    error: ErrorInfo | None = None
    lasting: bool = True
    """Whether the error would come again. It would not if the worker was killed or ran out of time."""
    automaton: bool = False
    """An automaton lies in the run folder."""


ToWorker = Start | Job
FromWorker = Started | Done


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes into a pipe."""
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data


class Frames:
    """Takes bytes as they come and gives whole payloads. Raises ValueError for one larger than MAX_FRAME."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now."""
        self._data += data
        result = []
        while len(self._data) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._data)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            end = HEADER.size + length
            if len(self._data) < end:
                break
            result.append(bytes(self._data[HEADER.size : end]))
            del self._data[:end]
        return result
