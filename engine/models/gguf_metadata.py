"""Reader of a GGUF file's header: key/value metadata and the table of tensors, never the tensors themselves.

The `gguf` package's reader keeps a numpy view per array element and needs seconds for a vocabulary; start-up has none to
give, so this one decodes the header straight out of a memory map (~0.1 s). Format: ggml/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from radixcast.protocols.errors import StartupError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format."""
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 20
"""Keys or tensors in one header; a corrupt count is refused before it is believed."""
_MAX_DIMS = 8


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """As GGUF tells it: fastest dimension first."""
    ggml_type: int
    """0 F32, 1 F16, 30 BF16, others quantised."""
    offset: int
    """Bytes from the start of the data section."""


@dataclass(frozen=True)
class GGUFHeader:
    """Everything in front of the tensor data."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_start: int
    """Byte offset of the data section."""


def read_header(path: str | Path) -> GGUFHeader:
    """Read the header of a GGUF file. Raises StartupError when the file is missing, cut short or of another kind."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header()
    except OSError as error:
        raise StartupError(f"can't read {path}: {error.strerror or error}") from None
    except (ValueError, struct.error, IndexError, OverflowError) as error:
        raise StartupError(f"{path} is not a readable GGUF file: {error}") from None


class _Cursor:
    """A position in the mapped file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not start with 'GGUF'")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} (2 and 3 are supported, little-endian)")
        n_tensors, n_keys = self.scalar("Q"), self.scalar("Q")
        if max(n_tensors, n_keys) > _MAX_ENTRIES:
            raise ValueError(f"{n_keys} keys and {n_tensors} tensors can't be true")
        metadata = {}
        for _ in range(n_keys):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor() for _ in range(n_tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"alignment {align!r}")
        return GGUFHeader(metadata, {info.name: info for info in infos}, -(-self.at // align) * align)

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, inside its header")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
            values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return values
        if count > len(self.data):
            raise ValueError(f"an array of {count} entries can't be true")
        if kind == _STRING:
            return self.strings(count)
        return [self.value(kind) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary has 10^5 of them."""
        data, at, length = self.data, self.at, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            (size,) = length(data, at)
            at += 8
            piece = data[at : at + size]
            if len(piece) != size:
                raise ValueError("it ends inside its header")
            out.append(piece.decode("utf-8", "replace"))
            at += size
        self.at = at
        return out

    def tensor(self) -> TensorInfo:
        name = self.string()
        dims = self.scalar("I")
        if dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dims))
        return TensorInfo(name, shape, self.scalar("I"), self.scalar("Q"))
