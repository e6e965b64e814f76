"""Numba loops over contiguous fp32 arrays, compiled once and cached on disk.

All run on the calling thread, without the GIL and without an OpenMP team: one core reads these weights at the memory's
speed, while a fork–join costs milliseconds as soon as other processes are busy. `fastmath` lets LLVM reorder sums (that is
what vectorises them); infinities and NaN are not needed by any caller.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[Any]

_jit = njit(fastmath=True, nogil=True, error_model="numpy", cache=True)
_inline = njit(fastmath=True, nogil=True, error_model="numpy", inline="always")

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-3.0e38)


@_inline
def _exp(x: np.float32) -> np.float32:
    """e^x for x in [-87, 88], relative error < 3e-7 (Cephes' expf); smaller x give e^-87. Vectorises, unlike libm's."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(p * power)


@_jit
def linear_rows(x_TI: F32, weight_OI: F32, out_TO: F32) -> None:
    """x · weightᵀ for few rows. Each pass over the weight serves two rows: more spill the vector registers."""
    rows = x_TI.shape[0]
    outputs, inputs = weight_OI.shape
    for t in range(0, rows - 1, 2):
        for o in range(outputs):
            a = _ZERO
            b = _ZERO
            for i in range(inputs):
                w = weight_OI[o, i]
                a += x_TI[t, i] * w
                b += x_TI[t + 1, i] * w
            out_TO[t, o] = a
            out_TO[t + 1, o] = b
    if rows % 2:
        t = rows - 1
        for o in range(outputs):
            a = _ZERO
            for i in range(inputs):
                a += x_TI[t, i] * weight_OI[o, i]
            out_TO[t, o] = a


@_jit
def rms_norm(x_TH: F32, weight_H: F32, eps: float, out_TH: F32) -> None:
    """RMSNorm of each row."""
    size = x_TH.shape[1]
    for t in range(x_TH.shape[0]):
        total = _ZERO
        for i in range(size):
            total += x_TH[t, i] * x_TH[t, i]
        inverse = np.float32(1.0 / np.sqrt(total / np.float32(size) + np.float32(eps)))
        for i in range(size):
            out_TH[t, i] = weight_H[i] * (x_TH[t, i] * inverse)


@_jit
def add_rms_norm(x_TH: F32, residual_TH: F32, weight_H: F32, eps: float, out_TH: F32) -> None:
    """residual += x, then RMSNorm of each row of it."""
    size = x_TH.shape[1]
    for t in range(x_TH.shape[0]):
        total = _ZERO
        for i in range(size):
            value = residual_TH[t, i] + x_TH[t, i]
            residual_TH[t, i] = value
            total += value * value
        inverse = np.float32(1.0 / np.sqrt(total / np.float32(size) + np.float32(eps)))
        for i in range(size):
            out_TH[t, i] = weight_H[i] * (residual_TH[t, i] * inverse)


@_jit
def rope(qkv_TAD: F32, cos_TC: F32, sin_TC: F32, heads: int) -> None:
    """Rotate the first `heads` heads in place."""
    half = cos_TC.shape[1]
    for t in range(qkv_TAD.shape[0]):
        for h in range(heads):
            for i in range(half):
                a = qkv_TAD[t, h, i]
                b = qkv_TAD[t, h, i + half]
                qkv_TAD[t, h, i] = a * cos_TC[t, i] - b * sin_TC[t, i]
                qkv_TAD[t, h, i + half] = b * cos_TC[t, i] + a * sin_TC[t, i]


@_jit
def kv_write(qkv_TAD: F32, k_pool_SKD: F32, v_pool_SKD: F32, slots_T: Ints) -> None:
    """Store k and v heads."""
    kv_heads, size = k_pool_SKD.shape[1:]
    first = qkv_TAD.shape[1] - 2 * kv_heads
    for t in range(slots_T.shape[0]):
        slot = slots_T[t]
        for h in range(kv_heads):
            for i in range(size):
                k_pool_SKD[slot, h, i] = qkv_TAD[t, first + h, i]
                v_pool_SKD[slot, h, i] = qkv_TAD[t, first + kv_heads + h, i]


@_jit
def silu_mul(gate_TI: F32, up_TI: F32, out_TI: F32) -> None:
    """silu(gate) · up."""
    for t in range(out_TI.shape[0]):
        for i in range(out_TI.shape[1]):
            gate = gate_TI[t, i]
            out_TI[t, i] = gate / (_ONE + _exp(-max(gate, np.float32(-87.0)))) * up_TI[t, i]


@_jit
def silu_mul_fused(gate_up_T2I: F32, out_TI: F32) -> None:
    """silu(gate) · up of the halves of each row."""
    size = out_TI.shape[1]
    for t in range(out_TI.shape[0]):
        for i in range(size):
            gate = gate_up_T2I[t, i]
            out_TI[t, i] = gate / (_ONE + _exp(-max(gate, np.float32(-87.0)))) * gate_up_T2I[t, size + i]


@_inline
def _softmax(scores_L: F32, count: int) -> np.float32:
    """Replace scores by e^(score - max); returns 1 / their sum."""
    highest = _LOWEST
    for s in range(count):
        highest = max(highest, scores_L[s])
    total = _ZERO
    for s in range(count):
        weight = _exp(scores_L[s] - highest)
        scores_L[s] = weight
        total += weight
    return _ONE / total


@_jit
def attention(
    qkv_TAD: F32,
    k_pool_SKD: F32,
    v_pool_SKD: F32,
    page_table_RL: Ints,
    tokens_P: Ints,
    rows_P: Ints,
    positions_P: Ints,
    window: int,
    scale: float,
    scores_L: F32,
    out_TND: F32,
) -> None:
    """Attention of single query tokens: token tokens_P[p] of row rows_P[p] at positions_P[p] over its row's keys.

    Four keys at a time share one read of the query, and four values one read of the accumulator.
    """
    kv_heads, size = k_pool_SKD.shape[1:]
    heads = qkv_TAD.shape[1] - 2 * kv_heads
    group = heads // kv_heads
    factor = np.float32(scale)
    sums_D = np.empty(size, np.float32)
    for p in range(tokens_P.shape[0]):
        t = tokens_P[p]
        last = positions_P[p] + 1
        first = max(0, last - window)
        count = last - first
        blocked = count - count % 4
        pages = page_table_RL[rows_P[p], first:last]
        for h in range(heads):
            q = qkv_TAD[t, h]
            kv = h // group
            for s in range(0, blocked, 4):
                k0 = k_pool_SKD[pages[s], kv]
                k1 = k_pool_SKD[pages[s + 1], kv]
                k2 = k_pool_SKD[pages[s + 2], kv]
                k3 = k_pool_SKD[pages[s + 3], kv]
                a = _ZERO
                b = _ZERO
                c = _ZERO
                d = _ZERO
                for i in range(size):
                    x = q[i]
                    a += x * k0[i]
                    b += x * k1[i]
                    c += x * k2[i]
                    d += x * k3[i]
                scores_L[s] = a * factor
                scores_L[s + 1] = b * factor
                scores_L[s + 2] = c * factor
                scores_L[s + 3] = d * factor
            for s in range(blocked, count):
                k0 = k_pool_SKD[pages[s], kv]
                a = _ZERO
                for i in range(size):
                    a += q[i] * k0[i]
                scores_L[s] = a * factor
            inverse = _softmax(scores_L, count)
            for i in range(size):
                sums_D[i] = _ZERO
            for s in range(0, blocked, 4):
                v0 = v_pool_SKD[pages[s], kv]
                v1 = v_pool_SKD[pages[s + 1], kv]
                v2 = v_pool_SKD[pages[s + 2], kv]
                v3 = v_pool_SKD[pages[s + 3], kv]
                a = scores_L[s]
                b = scores_L[s + 1]
                c = scores_L[s + 2]
                d = scores_L[s + 3]
                for i in range(size):
                    sums_D[i] += a * v0[i] + b * v1[i] + c * v2[i] + d * v3[i]
            for s in range(blocked, count):
                v0 = v_pool_SKD[pages[s], kv]
                a = scores_L[s]
                for i in range(size):
                    sums_D[i] += a * v0[i]
            for i in range(size):
                out_TND[t, h, i] = sums_D[i] * inverse
