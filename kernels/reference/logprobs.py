"""Logprobs of the model's own distribution: log-softmax of raw logits, before penalties, masks and temperature.

Shape letters: N positions, V vocabulary, K most likely tokens, A asked tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PositionLogprobs:
    """Logprobs of N positions, on the CPU, float32."""

    values_N: torch.Tensor
    top_values_NK: torch.Tensor
    """Descending; equal values in order of their ids."""
    top_ids_NK: torch.Tensor
    """int64."""
    asked_values_NA: torch.Tensor


def logprobs_of(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, top_k: int = 0, asked_ids_A: torch.Tensor | None = None
) -> PositionLogprobs:
    """Logprob of each position's target, of its `top_k` most likely tokens and of the asked tokens.

    logits_NV: float32, left as it is; targets_N, asked_ids_A: int64 on the same device. K = min(top_k, V).
    """
    asked_ids_A = targets_N.new_empty(0) if asked_ids_A is None else asked_ids_A
    log_p_NV = torch.log_softmax(logits_NV, dim=-1)
    values_N = log_p_NV.gather(1, targets_N[:, None])[:, 0]
    top_values_NK, top_ids_NK = order_by_value_then_id(*torch.topk(log_p_NV, min(top_k, logits_NV.shape[1])))
    asked_NA = log_p_NV.index_select(1, asked_ids_A)
    return PositionLogprobs(values_N.cpu(), top_values_NK.cpu(), top_ids_NK.cpu(), asked_NA.cpu())


def join(parts: Sequence[PositionLogprobs], top_k: int, asked: int) -> PositionLogprobs:
    """Consecutive positions as one; with `top_k` and `asked` columns when there is none."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = torch.empty(0)
        return PositionLogprobs(empty, empty.view(0, top_k), empty.view(0, top_k).long(), empty.view(0, asked))
    return PositionLogprobs(
        torch.cat([p.values_N for p in parts]),
        torch.cat([p.top_values_NK for p in parts]),
        torch.cat([p.top_ids_NK for p in parts]),
        torch.cat([p.asked_values_NA for p in parts]),
    )


def order_by_value_then_id(values_NK: torch.Tensor, ids_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort each row by descending value, equal values by ascending id (torch.topk leaves the order of ties open)."""
    ids_NK, by_id = ids_NK.sort(dim=-1)
    values_NK, by_value = values_NK.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values_NK, ids_NK.gather(-1, by_value)
