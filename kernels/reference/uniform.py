"""Counter-based uniforms: the randomness of an output position is a pure function of (seed, choice, position).

Philox-4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
Nothing is remembered between calls, so a row draws the same numbers alone or batched, before or after preemption, a
restart or a migration. In numpy, because a step needs but one number for a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox_4x32(counter_N4: npt.NDArray[Any], key_N2: npt.NDArray[Any]) -> UInt64Array:
    """Philox-4x32-10 of N counters under N keys.

    counter_N4, key_N2: unsigned integers < 2**32, any integer dtype. Returns uint64 [N, 4], each value < 2**32.
    """
    c0, c1, c2, c3 = (column.astype(np.uint64) for column in counter_N4.T)
    k0, k1 = (column.astype(np.uint64) for column in key_N2.T)
    m0, m1 = _MULTIPLIERS
    for _ in range(_ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1)


def uniforms(seed_R: UInt64Array, choice_R: npt.NDArray[Any], position_R: npt.NDArray[Any]) -> Float64Array:
    """One uniform in [0, 1) with 53 random bits for each (seed, choice, output position).

    seed_R: uint64; choice_R, position_R: integers >= 0 (choice < 2**32). Returns float64 [R].
    """
    position = position_R.astype(np.uint64)
    counter = np.stack((position & _LOW, position >> _32, choice_R.astype(np.uint64), np.zeros_like(position)), axis=-1)
    words = philox_4x32(counter, np.stack((seed_R & _LOW, seed_R >> _32), axis=-1))
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    result: Float64Array = (high.astype(np.float64) * 2.0**26 + low.astype(np.float64)) * 2.0**-53
    return result
