"""Attention on the CPU: which tokens go through the Numba loop one by one, which rows through torch's fused kernel.

A decode row, or a chunk of a few tokens, is bound by reading its keys: the loop reads them where they are. A longer chunk
is bound by arithmetic: its keys are gathered once and torch's blocked kernel does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixcast.kernels.cpu.loops import F32, Ints
from radixcast.kernels.ops import RaggedRows

MAX_LOOP_QUERIES = 2
"""Longest row whose tokens go through the loop one by one."""
_NO_WINDOW = 1 << 60


@dataclass(frozen=True)
class Singles:
    """Query tokens for the loop: their index, row and position (int32 [P] each), and what the loop reads and scribbles on."""

    tokens_P: Ints
    rows_P: Ints
    positions_P: Ints
    page_table_RL: Ints
    scores_L: F32


@dataclass(frozen=True)
class Chunk:
    """One row for torch's kernel."""

    start: int
    end: int
    slots_L: torch.Tensor
    """int64 [L]: slots of the keys that any of its queries sees."""
    bias_QL: torch.Tensor | None
    """0 where a query may look, -inf where not: torch's kernel is fastest with that; None: a single query that sees all."""


@dataclass(frozen=True)
class CpuAttentionPlan:
    """One forward's rows, cut by which code serves them."""

    window: int
    singles: Singles | None
    chunks: list[Chunk]


def plan_attention(rows: RaggedRows, window: int | None, dtype: torch.dtype) -> CpuAttentionPlan:
    """Plan for `CpuOps.attention`; costs some 10 µs and a few more a chunk. The loop knows fp32 only: rows of another dtype
    go through torch altogether."""
    reach = _NO_WINDOW if window is None else window
    loop_queries = MAX_LOOP_QUERIES if dtype is torch.float32 else 0
    starts, kv_lens = rows.row_starts.numpy(), rows.kv_lens_R.numpy()
    counts = np.diff(starts)
    chunks = [
        _chunk(rows.page_table_RL[row], int(starts[row]), int(counts[row]), int(kv_lens[row]), reach, dtype)
        for row in np.flatnonzero(counts > loop_queries)
    ]
    looped = np.where(counts <= loop_queries, counts, 0)
    total = int(looped.sum())
    if not total:
        return CpuAttentionPlan(reach, None, chunks)
    rows_P = np.repeat(np.arange(len(counts), dtype=np.int32), looped)
    offsets_P = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(looped) - looped, looped).astype(np.int32)
    singles = Singles(
        tokens_P=(starts[:-1][rows_P] + offsets_P).astype(np.int32),
        rows_P=rows_P,
        positions_P=((kv_lens - counts)[rows_P] + offsets_P).astype(np.int32),
        page_table_RL=rows.page_table_RL.contiguous().numpy(),
        scores_L=np.empty(rows.max_kv, np.float32),
    )
    return CpuAttentionPlan(reach, singles, chunks)


def _chunk(pages_L: torch.Tensor, start: int, count: int, kv_len: int, window: int, dtype: torch.dtype) -> Chunk:
    """A row's keys from the first that its first query sees; the mask of what each query may not see."""
    first_query = kv_len - count
    first_key = max(0, first_query + 1 - window)
    slots_L = pages_L[first_key:kv_len].long()
    if count == 1:
        return Chunk(start, start + 1, slots_L, None)
    query_Q1 = torch.arange(first_query, kv_len)[:, None]
    key_L = torch.arange(first_key, kv_len)
    hidden_QL = key_L > query_Q1
    if window < kv_len:
        hidden_QL |= key_L <= query_Q1 - window
    bias_QL = torch.zeros(hidden_QL.shape, dtype=dtype).masked_fill_(hidden_QL, float("-inf"))
    return Chunk(start, start + count, slots_L, bias_QL)


def chunk_attention(
    qkv_TAD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    chunk: Chunk,
    scale: float,
    out_TND: torch.Tensor,
) -> None:
    """Attention of one row through torch's fused kernel, into out_TND[chunk.start : chunk.end]."""
    heads = out_TND.shape[1]
    q_NQD = qkv_TAD[chunk.start : chunk.end, :heads].transpose(0, 1)
    k_KLD = k_pool_SKD.index_select(0, chunk.slots_L).transpose(0, 1)
    v_KLD = v_pool_SKD.index_select(0, chunk.slots_L).transpose(0, 1)
    result = torch.nn.functional.scaled_dot_product_attention(
        q_NQD[None], k_KLD[None], v_KLD[None], attn_mask=chunk.bias_QL, scale=scale, enable_gqa=True
    )
    out_TND[chunk.start : chunk.end] = result[0].transpose(0, 1)
