"""Causal attention over paged keys and values, one row at a time: gather, softmax in fp32, sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowPlan:
    """One row: its tokens, the slots of the keys that any of them sees, and who sees what."""

    start: int
    end: int
    slots_L: torch.Tensor
    """int64 [L]."""
    visible_QL: torch.Tensor
    """bool [end - start, L]."""


def plan(row_starts: torch.Tensor, kv_lens_R: torch.Tensor, page_table_RL: torch.Tensor, window: int | None) -> list[RowPlan]:
    """The rows that have tokens. Query q of a row stands at position kv_len - queries + q and sees no later key, nor one
    `window` or more positions back."""
    starts = row_starts.tolist()
    plans = []
    for row, kv_len in enumerate(kv_lens_R.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        query_Q1 = torch.arange(kv_len - (end - start), kv_len, device=page_table_RL.device)[:, None]
        key_L = torch.arange(kv_len, device=page_table_RL.device)
        visible_QL = key_L <= query_Q1
        if window is not None:
            visible_QL &= key_L > query_Q1 - window
        plans.append(RowPlan(start, end, page_table_RL[row, :kv_len].long(), visible_QL))
    return plans


def attention(
    qkv_TAD: torch.Tensor, k_pool_SKD: torch.Tensor, v_pool_SKD: torch.Tensor, plans: list[RowPlan], scale: float
) -> torch.Tensor:
    """softmax(scale · q·kᵀ + mask) · v for each row -> [T, N, D] in q's dtype; tokens of no row get zeros.

    Query head n reads key/value head n // (N / K). Sums and softmax are fp32.
    """
    kv_heads = k_pool_SKD.shape[1]
    heads = qkv_TAD.shape[1] - 2 * kv_heads
    out_TND = torch.zeros_like(qkv_TAD[:, :heads])
    for row in plans:
        q_NQD = qkv_TAD[row.start : row.end, :heads].transpose(0, 1).float()
        k_NLD = k_pool_SKD[row.slots_L].transpose(0, 1).float().repeat_interleave(heads // kv_heads, dim=0)
        v_NLD = v_pool_SKD[row.slots_L].transpose(0, 1).float().repeat_interleave(heads // kv_heads, dim=0)
        score_NQL = (q_NQD @ k_NLD.transpose(1, 2) * scale).masked_fill(~row.visible_QL, float("-inf"))
        out_TND[row.start : row.end] = (score_NQL.softmax(-1) @ v_NLD).transpose(0, 1).to(out_TND.dtype)
    return out_TND
