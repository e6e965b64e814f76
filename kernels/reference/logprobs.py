"""Logprobs of the model's own distribution: log-softmax of raw logits, before penalties, masks and temperature.

Shape letters: N positions, V vocabulary, K most likely tokens, A asked tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SLICE = 128
"""Positions worked on at once: the float32 copy of a long prompt's [N, V] would be larger than its KV."""


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
    top_k = min(top_k, logits_NV.shape[1])
    asked = asked_ids_A if asked_ids_A is not None else targets_N.new_empty(0)
    parts = [
        _slice(logits_NV[at : at + _SLICE], targets_N[at : at + _SLICE], top_k, asked)
        for at in range(0, len(targets_N), _SLICE)
    ]
    if not parts:
        empty = torch.empty(0)
        return PositionLogprobs(empty, empty.view(0, top_k), empty.view(0, top_k).long(), empty.view(0, len(asked)))
    if len(parts) == 1:
        return PositionLogprobs(*parts[0])
    return PositionLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _slice(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, top_k: int, asked_A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    log_p_NV = torch.log_softmax(logits_NV, dim=-1)
    values_N = log_p_NV.gather(1, targets_N[:, None])[:, 0]
    top_values_NK, top_ids_NK = order_by_value_then_id(*torch.topk(log_p_NV, top_k))
    return values_N.cpu(), top_values_NK.cpu(), top_ids_NK.cpu(), log_p_NV.index_select(1, asked_A).cpu()


def order_by_value_then_id(values_NK: torch.Tensor, ids_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort each row by descending value, equal values by ascending id (torch.topk leaves the order of ties open)."""
    ids_NK, by_id = ids_NK.sort(dim=-1)
    values_NK, by_value = values_NK.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values_NK, ids_NK.gather(-1, by_value)
