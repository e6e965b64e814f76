"""Numbers survive the trip, bytes are little-endian whatever the machine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from radixcast.protocols.buffers import pack_floats, pack_ids, unpack_floats, unpack_ids

int32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(int32))
def test_ids_round_trip(ids: list[int]) -> None:
    data = pack_ids(ids)
    assert len(data) == 4 * len(ids)
    assert unpack_ids(data).tolist() == ids
    assert pack_ids(np.array(ids, dtype=np.int64)) == data
    assert pack_ids(iter(ids)) == data


@given(st.lists(st.floats(width=32)))
def test_floats_round_trip(values: list[float]) -> None:
    back = unpack_floats(pack_floats(values)).tolist()
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, back, strict=True))


@given(npst.arrays(np.dtype(">i4"), st.integers(0, 8)))
def test_byte_order_is_fixed(array: np.ndarray) -> None:
    assert unpack_ids(pack_ids(array)).tolist() == array.tolist()
    assert pack_ids(array[::2]) == pack_ids(array[::2].tolist())


def test_little_endian() -> None:
    assert pack_ids([1, -1]) == bytes.fromhex("01000000ffffffff")
    assert pack_floats([1.0]) == bytes.fromhex("0000803f")


def test_too_large_or_torn() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"123")


def test_no_copy_and_read_only() -> None:
    array = unpack_ids(memoryview(pack_ids([1, 2, 3])))
    assert not array.flags.owndata
    with pytest.raises(ValueError):
        array[0] = 5
