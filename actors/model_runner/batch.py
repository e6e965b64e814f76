"""ForwardBatch: one ragged batch as the model sees it.

There is no prefill or decode phase: each row brings the tokens that its KV lacks (one for a decode, a chunk for a prompt).
Shape letters: T tokens of all rows, R rows, L logit rows, S longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ForwardBatch:
    """Inputs of one forward pass; all tensors on the model's device."""

    token_ids_T: torch.Tensor
    """int64 [T]."""
    positions_T: torch.Tensor
    """int64 [T], position of each token in its row."""
    row_starts: torch.Tensor
    """int32 [R + 1]: row r's tokens are token_ids_T[row_starts[r] : row_starts[r + 1]]; every row has at least one."""
    kv_lens_R: torch.Tensor
    """int32 [R]: tokens with KV after this pass (those of the batch included)."""
    page_table_RS: torch.Tensor
    """int32 [R, S]: KV slot of every position < kv_lens_R[r]; entries beyond are undefined."""
    out_slots_T: torch.Tensor
    """int64 [T]: KV slot that each token's k and v are written to."""
    logit_tokens_L: torch.Tensor
    """int64 [L]: indices into T whose logits are wanted, ascending."""
    max_query: int
    """Longest row of the batch (tokens)."""
    max_kv: int
    """max(kv_lens_R)."""
