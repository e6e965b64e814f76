"""Attention on the CPU: which tokens go through the Numba loop one by one, which rows through torch's fused kernel.

A decode row, or a chunk of a few tokens, is bound by reading its keys: the loop reads them where they are. A longer chunk
is bound by arithmetic: its keys are gathered once and torch's blocked kernel does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from radixcast.kernels.cpu.loops import F32, Ints
from radixcast.kernels.ops import RaggedRows

MAX_LOOP_QUERIES = 2
"""Longest row whose tokens go through the loop one by one."""
_NO_WINDOW = 1 << 60


@dataclass(frozen=True)
class Singles:
    """Query tokens for the loop: their index, row and position; int32 [P] each."""

    tokens_P: Ints
    rows_P: Ints
    positions_P: Ints


@dataclass(frozen=True)
class Chunk:
    """One row for torch's kernel."""

    start: int
    end: int
    slots_L: torch.Tensor
    """int64 [L]: slots of the keys that any of its queries sees."""
    hidden_QL: torch.Tensor | None
    """bool [Q, L], True where a query may not look; None: a single query that sees all."""
    biases: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask as an additive tensor (0 or -inf), made once for all layers: torch's kernel is fastest with it."""
        if self.hidden_QL is None:
            return None
        found = self.biases.get(dtype)
        if found is None:
            found = torch.zeros(self.hidden_QL.shape, dtype=dtype).masked_fill_(self.hidden_QL, float("-inf"))
            self.biases[dtype] = found
        return found


@dataclass(frozen=True)
class CpuAttentionPlan:
    """One forward's rows, cut by which code serves them."""

    rows: RaggedRows
    window: int
    page_table_RL: Ints
    scores_L: F32
    """Scratch for the loop."""
    singles: Singles | None
    chunks: list[Chunk]

    def split(self, dtype: torch.dtype) -> tuple[Singles | None, list[Chunk]]:
        """What runs in the loop and what in torch. The loop knows fp32 only: other dtypes run in torch altogether."""
        if dtype is torch.float32 or self.singles is None:
            return self.singles, self.chunks
        return None, _cut(self.rows, self.window, loop_queries=0)[1]


def plan_attention(rows: RaggedRows, window: int | None) -> CpuAttentionPlan:
    """Plan for `CpuOps.attention`; costs a few µs a row."""
    reach = _NO_WINDOW if window is None else window
    singles, chunks = _cut(rows, reach, MAX_LOOP_QUERIES)
    scores_L = np.empty(max(rows.max_kv, 1), np.float32)
    return CpuAttentionPlan(rows, reach, rows.page_table_RL.numpy(), scores_L, singles, chunks)


def _cut(rows: RaggedRows, window: int, loop_queries: int) -> tuple[Singles | None, list[Chunk]]:
    starts, kv_lens = rows.row_starts.numpy(), rows.kv_lens_R.numpy()
    counts = np.diff(starts)
    chunks = [
        _chunk(rows.page_table_RL[row], int(starts[row]), int(counts[row]), int(kv_lens[row]), window)
        for row in np.flatnonzero(counts > loop_queries)
    ]
    looped = np.where(counts <= loop_queries, counts, 0)
    total = int(looped.sum())
    if not total:
        return None, chunks
    rows_P = np.repeat(np.arange(len(counts), dtype=np.int32), looped)
    offsets_P = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(looped) - looped, looped).astype(np.int32)
    tokens_P = (starts[:-1][rows_P] + offsets_P).astype(np.int32)
    positions_P = ((kv_lens - counts)[rows_P] + offsets_P).astype(np.int32)
    return Singles(tokens_P, rows_P, positions_P), chunks


def _chunk(pages_L: torch.Tensor, start: int, count: int, kv_len: int, window: int) -> Chunk:
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
    return Chunk(start, start + count, slots_L, hidden_QL)


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
        q_NQD[None], k_KLD[None], v_KLD[None], attn_mask=chunk.bias(qkv_TAD.dtype), scale=scale, enable_gqa=True
    )
    out_TND[chunk.start : chunk.end] = result[0].transpose(0, 1)
