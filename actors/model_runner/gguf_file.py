"""Reading the tensors of a GGUF file: directory, names as Hugging Face calls them, blocks dequantised.

`gguf.GGUFReader` takes seconds, since it makes an array of every word of the tokenizer; here those are stepped over.
Q4_0, Q4_1, Q8_0 and the plain types are decoded by torch straight into the destination, the others by `gguf`: the same
fp32 bits either way. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from radixcast.protocols.errors import StartupError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT_KEY = b"general.alignment"
_DEFAULT_ALIGNMENT = 32

_BLOCK = 32
_PIECE = 32768
"""Blocks decoded at a time: 4 MB of fp32, few enough OpenMP regions that their barriers don't show."""

Bytes2D = npt.NDArray[np.uint8]

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the directory."""

    name: str
    shape: tuple[int, ...]
    """As torch orders it: rows first."""
    kind: GGMLQuantizationType
    offset: int
    """Of its first byte in the file."""
    nbytes: int


class GGUFFile:
    """A GGUF file, mapped into memory. Raises StartupError for a file that is none, is damaged or has unknown types."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                # A private map: torch takes no read-only memory without a warning.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise StartupError(f"can't read {self.path}: {error}") from None
        try:
            self.tensors = {tensor.name: tensor for tensor in _Directory(self._map).read()}
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            raise StartupError(f"{self.path} is no valid GGUF file: {error}") from None

    def raw(self, tensor: GGUFTensor) -> Bytes2D:
        """Its bytes, uint8 [rows, bytes a row], without a copy. Writing to them would not reach the file."""
        rows = math.prod(tensor.shape[:-1])
        data = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return data.reshape(rows, tensor.nbytes // rows)

    def read_into(self, tensor: GGUFTensor, out: torch.Tensor, row_order: torch.Tensor | None = None) -> None:
        """Decode into `out` (any float dtype; contiguous, on the CPU; the tensor's shape).

        `row_order`: int64, output row i is file row row_order[i].
        """
        raw = self.raw(tensor) if len(tensor.shape) > 1 else self.raw(tensor).reshape(-1, self._value_bytes(tensor))
        if row_order is not None:
            raw = raw[row_order.numpy()]
        decode_into(raw, tensor.kind, out)

    def _value_bytes(self, tensor: GGUFTensor) -> int:
        """Bytes that can be moved as a unit in a vector: a value, or the whole vector where values share a block."""
        values, size = GGML_QUANT_SIZES[tensor.kind]
        return size if values == 1 else tensor.nbytes


class _Directory:
    """A cursor over the header of a GGUF file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._alignment = _DEFAULT_ALIGNMENT

    def read(self) -> list[GGUFTensor]:
        """The whole header -> its tensors, checked to lie inside the file."""
        if self._data[:4] != _MAGIC:
            raise ValueError("the magic number is missing")
        self._at = 4
        version = self._u32()
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (big-endian file?)")
        tensors, pairs = self._u64(), self._u64()
        for _ in range(pairs):
            self._skip_pair()
        entries = [self._entry() for _ in range(tensors)]
        start = -(-self._at // self._alignment) * self._alignment
        return [self._placed(entry, start) for entry in entries]

    def _u32(self) -> int:
        self._at += 4
        return int(_U32.unpack_from(self._data, self._at - 4)[0])

    def _u64(self) -> int:
        self._at += 8
        return int(_U64.unpack_from(self._data, self._at - 8)[0])

    def _bytes(self) -> bytes:
        length = self._u64()
        if length > len(self._data) - self._at:
            raise ValueError("a string runs past the end")
        self._at += length
        return self._data[self._at - length : self._at]

    def _skip_pair(self) -> None:
        key, kind = self._bytes(), self._u32()
        if key == _ALIGNMENT_KEY:
            self._alignment = self._u32()
            if not 0 < self._alignment <= 1 << 20:
                raise ValueError(f"alignment {self._alignment}")
        else:
            self._skip_value(kind)

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._bytes()
        elif kind == _ARRAY:
            item, count = self._u32(), self._u64()
            if item == _STRING:
                self._skip_strings(count)
            elif item == _ARRAY:
                raise ValueError("nested arrays are not supported")
            else:
                self._at += count * _SCALAR_BYTES[item]
        else:
            self._at += _SCALAR_BYTES[kind]

    def _skip_strings(self, count: int) -> None:
        """The hot loop: a tokenizer has some 10^5 strings."""
        data, at, read = self._data, self._at, _U64.unpack_from
        for _ in range(count):
            at += 8 + read(data, at)[0]
        self._at = at

    def _entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._bytes().decode()
        shape = tuple(reversed([self._u64() for _ in range(self._u32())]))
        kind = GGMLQuantizationType(self._u32())
        return name, shape, kind, self._u64()

    def _placed(self, entry: tuple[str, tuple[int, ...], GGMLQuantizationType, int], start: int) -> GGUFTensor:
        name, shape, kind, offset = entry
        values, size = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % values:
            raise ValueError(f"tensor {name} has shape {shape}")
        nbytes = math.prod(shape) // values * size
        if start + offset + nbytes > len(self._data):
            raise ValueError(f"tensor {name} runs past the end of the file")
        return GGUFTensor(name, shape, kind, start + offset, nbytes)


def decode_into(raw: Bytes2D, kind: GGMLQuantizationType, out: torch.Tensor) -> None:
    """Bytes of whole rows (uint8 [rows, bytes a row]) -> `out`, as many values in the same order, any float dtype.

    Values are those of `gguf.quants.dequantize`, in fp32, then rounded to out's dtype. Raises StartupError for a type that
    `gguf` can't decode.
    """
    raw = np.ascontiguousarray(raw)
    if kind in _PLAIN:
        out.copy_(torch.from_numpy(raw).view(_PLAIN[kind]).view(out.shape))
    elif kind in _BLOCK_DECODERS:
        _decode_blocks(raw, kind, out.view(-1, _BLOCK))
    else:
        try:
            values = torch.from_numpy(dequantize(raw, kind))
        except (NotImplementedError, KeyError):
            raise StartupError(f"GGUF tensors of type {kind.name} can't be decoded") from None
        out.copy_(values.view(out.shape))


def _decode_blocks(raw: Bytes2D, kind: GGMLQuantizationType, out_B32: torch.Tensor) -> None:
    """A piece at a time, so that the passes of a decoder find their values in the cache."""
    decoder = _BLOCK_DECODERS[kind]
    blocks_BN = torch.from_numpy(raw).view(-1, GGML_QUANT_SIZES[kind][1])
    direct = out_B32.dtype is torch.float32
    for first in range(0, len(blocks_BN), _PIECE):
        piece = blocks_BN[first : first + _PIECE]
        target = out_B32[first : first + _PIECE]
        values = target if direct else torch.empty(target.shape)
        decoder(piece, values)
        if not direct:
            target.copy_(values)


def _scales(blocks_BN: torch.Tensor, first: int) -> torch.Tensor:
    """The fp16 at byte `first` of every block -> fp32 [B, 1]."""
    return blocks_BN[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(packed_B16: torch.Tensor, out_B32: torch.Tensor) -> None:
    """16 bytes a block -> 32 values: the low halves, then the high ones."""
    out_B32[:, :16] = packed_B16 & 15
    out_B32[:, 16:] = packed_B16 >> 4


def _q4_0(blocks_BN: torch.Tensor, out_B32: torch.Tensor) -> None:
    _nibbles(blocks_BN[:, 2:], out_B32)
    out_B32.sub_(8).mul_(_scales(blocks_BN, 0))


def _q4_1(blocks_BN: torch.Tensor, out_B32: torch.Tensor) -> None:
    _nibbles(blocks_BN[:, 4:], out_B32)
    out_B32.mul_(_scales(blocks_BN, 0)).add_(_scales(blocks_BN, 2))


def _q8_0(blocks_BN: torch.Tensor, out_B32: torch.Tensor) -> None:
    out_B32.copy_(blocks_BN[:, 2:].view(torch.int8))
    out_B32.mul_(_scales(blocks_BN, 0))


_BLOCK_DECODERS = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}
