"""The op table's interface: what a model asks of a device, and the plain-torch answer that defines right.

Shape letters: T tokens, R rows, N query heads, K key/value heads, A = N + 2K heads of a fused projection, D head size,
C = D/2 rotary pairs, H hidden, I inner, O outputs, V vocabulary, S slots of the KV pool, L longest page table.

For masks: S rows of logits, N of them masked, W = ceil(V / 32) words, K gathered tokens.

A fused projection's heads lie q, k, v: `qkv_TAD[:, :N]` are queries, `[:, N:N+K]` keys, `[:, N+K:]` values. Ops take the
fused tensor rather than three strided views, so that a kernel always sees contiguous memory.

Knows nothing of batches, schedulers, models or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from radixcast.kernels.reference import activation, attention, embedding, kv, linear, mask, norm, rope


@dataclass(frozen=True)
class RaggedRows:
    """Which tokens belong to which row, and where each row's keys and values are. Tensors on the ops' device."""

    row_starts: torch.Tensor
    """int32 [R + 1]: row r's tokens are row_starts[r] … row_starts[r + 1] - 1; rows may be empty."""
    kv_lens_R: torch.Tensor
    """int32 [R]: keys of the row; its tokens are the last of them."""
    page_table_RL: torch.Tensor
    """int32 [R, L]: KV slot of every position < kv_lens_R[r]; entries beyond are undefined and never read."""
    max_kv: int
    """max(kv_lens_R)."""


@dataclass(frozen=True)
class PackedLinear:
    """A weight in the form that its device's `linear` wants; made by `Ops.pack_linear`, read only by the same ops."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    private: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        return self.weight_OI.nbytes + bias


class Ops:
    """All ops, in plain torch, on any device. A device's own table overrides what it does faster."""

    name = "reference"

    def warm_up(self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Compile whatever is compiled on first use, for a model of this shape. Does nothing here."""

    def embedding(self, ids_T: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        """Rows of the table: int64 [T] -> [T, H]. Ids must be in [0, V)."""
        return embedding.embedding(ids_T, weight_VH)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) · weight, accumulated in fp32."""
        return norm.rms_norm(x_TH, weight_H, eps)

    def add_rms_norm_(self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x, in place; returns rms_norm(residual)."""
        return norm.add_rms_norm_(x_TH, residual_TH, weight_H, eps)

    def rope_(self, qkv_TAD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor, heads: int) -> None:
        """Rotate the first `heads` heads in place (half layout: element i pairs with i + D/2). cos and sin are fp32."""
        rope.rope_(qkv_TAD, cos_TC, sin_TC, heads)

    def kv_write(
        self, qkv_TAD: torch.Tensor, k_pool_SKD: torch.Tensor, v_pool_SKD: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        """Store the k and v heads of each token in its slot (int64 [T])."""
        kv.kv_write(qkv_TAD, k_pool_SKD, v_pool_SKD, slots_T)

    def plan_attention(self, rows: RaggedRows, window: int | None, dtype: torch.dtype) -> Any:
        """What all layers' attention of one forward shares. `window`: keys a query may look back, itself included; None: all.
        `dtype`: that of queries and pool."""
        return attention.plan(rows.row_starts, rows.kv_lens_R, rows.page_table_RL, window)

    def attention(
        self, qkv_TAD: torch.Tensor, k_pool_SKD: torch.Tensor, v_pool_SKD: torch.Tensor, plan: Any, scale: float
    ) -> torch.Tensor:
        """Causal grouped-query attention of each row over its own paged keys -> [T, N, D]. k and v are in the pool already."""
        return attention.attention(qkv_TAD, k_pool_SKD, v_pool_SKD, plan, scale)

    def pack_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> PackedLinear:
        """Bring a weight into this device's form. May keep a reference to it: don't write to it afterwards."""
        return PackedLinear(weight_OI, bias_O)

    def linear(self, x_TI: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x · weightᵀ + bias -> [T, O]."""
        return linear.linear(x_TI, packed.weight_OI, packed.bias_O)

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up, the halves of the last axis -> [T, I]."""
        return activation.silu_mul(gate_up_T2I)

    def gated_linear(self, x_TH: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """silu_mul(linear(x, packed)), for a packed [gate; up] weight -> [T, I]."""
        return self.silu_mul(self.linear(x_TH, packed))

    def apply_bitmask_(self, logits_SV: torch.Tensor, at_N: torch.Tensor, mask_NW: torch.Tensor) -> None:
        """logits[at[n], v] = -inf where bit v % 32 of mask[n, v // 32] is 0, in place; rows not in `at` stay. int64, int32."""
        mask.apply_bitmask_(logits_SV, at_N, mask_NW)

    def gather_allowed(
        self, logits_SV: torch.Tensor, at_N: torch.Tensor, mask_NW: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and ids (int64, ascending) of the allowed tokens of rows `at`, [N, width] each; -inf and 0 behind the last.

        No row may allow more than `width` tokens.
        """
        return mask.gather_allowed(logits_SV, at_N, mask_NW, width)
