"""Numbers as they travel: little-endian int32 / float32 buffers, never a Python object per token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_I32 = np.dtype("<i4")
_F32 = np.dtype("<f4")

EMPTY = b""


def pack_ids(ids: Iterable[int] | npt.NDArray[Any]) -> bytes:
    """Ids (any integers that fit int32; shape [n]) -> 4n bytes, little-endian. Raises OverflowError for larger ones."""
    if isinstance(ids, np.ndarray):
        return np.ascontiguousarray(ids, dtype=_I32).tobytes()
    return np.array(list(ids), dtype=_I32).tobytes()


def unpack_ids(data: bytes | memoryview) -> Int32Array:
    """4n bytes -> int32 array [n], read-only and without a copy. Raises ValueError when the length is no multiple of 4."""
    return np.frombuffer(data, dtype=_I32)


def pack_floats(values: Iterable[float] | npt.NDArray[Any]) -> bytes:
    """Floats (shape [n]) -> 4n bytes of little-endian float32."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values, dtype=_F32).tobytes()
    return np.array(list(values), dtype=_F32).tobytes()


def unpack_floats(data: bytes | memoryview) -> Float32Array:
    """4n bytes -> float32 array [n], read-only and without a copy."""
    return np.frombuffer(data, dtype=_F32)
