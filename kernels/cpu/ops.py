"""CpuOps: fp32 runs in Numba for what reads memory and in MKL for what multiplies; other dtypes run in torch.

Measured on two cores of an EPYC (AVX-512, ~31 GB/s), weight 3072 x 576 fp32, µs a product:

    rows                         1     2     4     8    16    32   512
    torch linear, 2 threads    647  1124   792   680  1014  1536 11642
    torch bmm in 2 halves      322   619   420   486   678  1053  9896
    Numba, 1 thread            230   232   322   741  1008  1600     -

Numba's figures from eight rows on are those of a 4 x 4 tile that was tried and not kept; up to four, of `loops.linear_rows`.
At a load average of 4, `gated_linear` of this shape (threads asleep at barriers): one row 320, four 524, sixteen 2013. A
decode of SmolLM2-135M (538 MB of fp32): 22 ms at best with little else running, 27 at that load, of which 3 are no products.

Hence Numba up to four rows, which is memory speed on one core (the other one stays with the other actors), and a batched
product of row blocks of the weight, one a thread, beyond.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixcast.kernels.cpu import loops, mask
from radixcast.kernels.cpu.attention import CpuAttentionPlan, chunk_attention, plan_attention
from radixcast.kernels.ops import Ops, PackedLinear, RaggedRows

_MAX_LOOP_ROWS = 4
_MAX_BLOCKS = 8


@dataclass(frozen=True)
class _Blocks:
    """Views of one fp32 weight: as an array for Numba, and cut into B row blocks for a batched product."""

    array_OI: loops.F32
    blocks_BIO: torch.Tensor | None


class CpuOps(Ops):
    """The table for `torch.device("cpu")`. Falls back to the reference for dtypes other than fp32."""

    name = "cpu"

    def warm_up(self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Run every op once on tiny tensors: Numba compiles, or loads what it compiled before from its cache."""
        with torch.inference_mode():
            hidden, heads = 8, num_heads + 2 * num_kv_heads
            x_TH = torch.zeros(2, hidden, dtype=dtype)
            weight_H = torch.ones(hidden, dtype=dtype)
            self.rms_norm(x_TH, weight_H, 1e-5)
            self.add_rms_norm_(x_TH, x_TH.clone(), weight_H, 1e-5)
            packed = self.pack_linear(torch.zeros(2 * hidden, hidden, dtype=dtype))
            self.gated_linear(x_TH, packed)
            self.gated_linear(x_TH.repeat(4, 1), packed)
            qkv_TAD = torch.zeros(2, heads, head_dim, dtype=dtype)
            angle_TC = torch.zeros(2, head_dim // 2)
            self.rope_(qkv_TAD, angle_TC, angle_TC, num_heads + num_kv_heads)
            pool_SKD = torch.zeros(4, num_kv_heads, head_dim, dtype=dtype)
            self.kv_write(qkv_TAD, pool_SKD, pool_SKD.clone(), torch.arange(2))
            starts, lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
            rows = RaggedRows(starts, lens, torch.arange(2, dtype=torch.int32)[None], max_kv=2)
            self.attention(qkv_TAD, pool_SKD, pool_SKD, self.plan_attention(rows, None, dtype), 1.0)
            logits_SV = torch.zeros(1, 40)
            first_N, mask_NW = torch.zeros(1, dtype=torch.int64), torch.ones((1, 2), dtype=torch.int32)
            self.gather_allowed(logits_SV, first_N, mask_NW, 2)
            self.apply_bitmask_(logits_SV, first_N, mask_NW)
            at_N, mask_NW = torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int32)
            self.apply_bitmask_(torch.zeros(1, 2), at_N, mask_NW)
            self.gather_allowed(torch.zeros(1, 2), at_N, mask_NW, 1)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        if x_TH.dtype is not torch.float32:
            return super().rms_norm(x_TH, weight_H, eps)
        out_TH = torch.empty_like(x_TH)
        loops.rms_norm(x_TH.numpy(), weight_H.numpy(), eps, out_TH.numpy())
        return out_TH

    def add_rms_norm_(self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        if x_TH.dtype is not torch.float32:
            return super().add_rms_norm_(x_TH, residual_TH, weight_H, eps)
        out_TH = torch.empty_like(x_TH)
        loops.add_rms_norm(x_TH.numpy(), residual_TH.numpy(), weight_H.numpy(), eps, out_TH.numpy())
        return out_TH

    def rope_(self, qkv_TAD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor, heads: int) -> None:
        if qkv_TAD.dtype is not torch.float32:
            super().rope_(qkv_TAD, cos_TC, sin_TC, heads)
        else:
            loops.rope(qkv_TAD.numpy(), cos_TC.numpy(), sin_TC.numpy(), heads)

    def kv_write(
        self, qkv_TAD: torch.Tensor, k_pool_SKD: torch.Tensor, v_pool_SKD: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        if qkv_TAD.dtype is not torch.float32:
            super().kv_write(qkv_TAD, k_pool_SKD, v_pool_SKD, slots_T)
        else:
            loops.kv_write(qkv_TAD.numpy(), k_pool_SKD.numpy(), v_pool_SKD.numpy(), slots_T.contiguous().numpy())

    def plan_attention(self, rows: RaggedRows, window: int | None, dtype: torch.dtype) -> CpuAttentionPlan:
        return plan_attention(rows, window, dtype)

    def attention(
        self, qkv_TAD: torch.Tensor, k_pool_SKD: torch.Tensor, v_pool_SKD: torch.Tensor, plan: CpuAttentionPlan, scale: float
    ) -> torch.Tensor:
        tokens, heads, size = qkv_TAD.shape
        heads -= 2 * k_pool_SKD.shape[1]
        out_TND = torch.empty((tokens, heads, size), dtype=qkv_TAD.dtype)
        singles = plan.singles
        if singles is not None:
            loops.attention(
                qkv_TAD.numpy(),
                k_pool_SKD.numpy(),
                v_pool_SKD.numpy(),
                singles.page_table_RL,
                singles.tokens_P,
                singles.rows_P,
                singles.positions_P,
                plan.window,
                scale,
                singles.scores_L,
                out_TND.numpy(),
            )
        for chunk in plan.chunks:
            chunk_attention(qkv_TAD, k_pool_SKD, v_pool_SKD, chunk, scale, out_TND)
        return out_TND

    def pack_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> PackedLinear:
        if weight_OI.dtype is not torch.float32:
            return PackedLinear(weight_OI, bias_O)
        outputs, inputs = weight_OI.shape
        blocks = torch.get_num_threads()
        # The halves of a gate-up weight must be whole blocks, so that gated_linear finds gate and up side by side.
        usable = 2 <= blocks <= _MAX_BLOCKS and blocks % 2 == 0 and outputs % blocks == 0
        cut = weight_OI.view(blocks, outputs // blocks, inputs).transpose(1, 2) if usable else None
        return PackedLinear(weight_OI, bias_O, _Blocks(weight_OI.numpy(), cut))

    def linear(self, x_TI: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        private = packed.private
        rows = x_TI.shape[0]
        if private is None or rows == 0:
            return super().linear(x_TI, packed)
        if rows <= _MAX_LOOP_ROWS:
            out_TO = torch.empty((rows, packed.weight_OI.shape[0]))
            loops.linear_rows(x_TI.numpy(), private.array_OI, out_TO.numpy())
        elif private.blocks_BIO is not None:
            out_TO = _blocked(x_TI, private.blocks_BIO).transpose(0, 1).reshape(rows, -1)
        else:
            return super().linear(x_TI, packed)
        return out_TO if packed.bias_O is None else out_TO.add_(packed.bias_O)

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        if gate_up_T2I.dtype is not torch.float32:
            return super().silu_mul(gate_up_T2I)
        tokens, double = gate_up_T2I.shape
        out_TI = torch.empty((tokens, double // 2))
        loops.silu_mul_fused(gate_up_T2I.numpy(), out_TI.numpy())
        return out_TI

    def gated_linear(self, x_TH: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        private = packed.private
        rows = x_TH.shape[0]
        two_blocks = private is not None and private.blocks_BIO is not None and private.blocks_BIO.shape[0] == 2
        if rows <= _MAX_LOOP_ROWS or not two_blocks or packed.bias_O is not None:
            return super().gated_linear(x_TH, packed)
        gate_TI, up_TI = _blocked(x_TH, private.blocks_BIO).unbind(0)
        out_TI = torch.empty_like(gate_TI)
        loops.silu_mul(gate_TI.numpy(), up_TI.numpy(), out_TI.numpy())
        return out_TI

    def apply_bitmask_(self, logits_SV: torch.Tensor, at_N: torch.Tensor, mask_NW: torch.Tensor) -> None:
        if logits_SV.dtype is not torch.float32:
            super().apply_bitmask_(logits_SV, at_N, mask_NW)
        else:
            mask.apply_bitmask(logits_SV.numpy(), at_N.numpy(), mask_NW.numpy())

    def gather_allowed(
        self, logits_SV: torch.Tensor, at_N: torch.Tensor, mask_NW: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if logits_SV.dtype is not torch.float32:
            return super().gather_allowed(logits_SV, at_N, mask_NW, width)
        values_NK = torch.full((len(at_N), width), -torch.inf)
        ids_NK = torch.zeros((len(at_N), width), dtype=torch.int64)
        mask.gather_allowed(logits_SV.numpy(), at_N.numpy(), mask_NW.numpy(), values_NK.numpy(), ids_NK.numpy())
        return values_NK, ids_NK


def _blocked(x_TI: torch.Tensor, blocks_BIO: torch.Tensor) -> torch.Tensor:
    """[T, I] times each block -> [B, T, O / B]."""
    return torch.bmm(x_TI.expand(blocks_BIO.shape[0], -1, -1), blocks_BIO)
