"""Sampling in plain torch: the definition of right.

    logits --> repetition --> frequency, presence --> bias --> masks --> temperature --> top_k --> top_p --> min_p --> draw

A token is drawn by inverse CDF from one given uniform, so it is a pure function of (logits, parameters, uniform). What
a row gets never depends on the other rows of the batch: every reduction is along the vocabulary of one row, and the
path that a row takes (greedy, all tokens, filtered) follows from its own parameters. Ties go to the lowest id.

NaN or +inf among the logits of a row, or no token left, gives INVALID; -inf is a token with probability 0.

Shape letters: R rows, V vocabulary, K candidates, B blocks. All logits are float32 [R, V]; parameters of rows are
numpy arrays on the host, because they decide which kernels run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from radixcast.kernels.reference.logprobs import order_by_value_then_id

INVALID = -1
"""Instead of a token id: the row's logits are no distribution."""

_CANDIDATES = (256, 4096)
"""Candidates looked at before a whole row is sorted. Sorting costs ~2 ms a row of 49k, topk(256) ~0.1 ms."""
_BLOCK = 256


@dataclass(frozen=True)
class RowSampling:
    """Parameters of R rows. `filtered` rows are those with any of top_k, top_p, min_p set (and not greedy)."""

    greedy_R: npt.NDArray[np.bool_]
    filtered_R: npt.NDArray[np.bool_]
    temperature_R: npt.NDArray[np.float32]
    top_k_R: npt.NDArray[np.int64]
    """Values outside [1, V) keep all tokens."""
    top_p_R: npt.NDArray[np.float64]
    min_p_R: npt.NDArray[np.float64]
    uniform_R: npt.NDArray[np.float64]
    """In [0, 1)."""


def sample(logits_RV: torch.Tensor, params: RowSampling) -> torch.Tensor:
    """Token of each row, int64 [R], or INVALID. Leaves the logits as they are."""
    if params.greedy_R.all():
        return greedy(logits_RV)
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    for mask_R, draw in (
        (params.greedy_R, _greedy_part),
        (~params.greedy_R & ~params.filtered_R, _unfiltered_part),
        (~params.greedy_R & params.filtered_R, _filtered_part),
    ):
        if mask_R.all():
            return draw(logits_RV, params, slice(None))
        if mask_R.any():
            rows = np.flatnonzero(mask_R)
            at = torch.from_numpy(rows).to(logits_RV.device)
            tokens_R.index_copy_(0, at, draw(logits_RV.index_select(0, at), params, rows))
    return tokens_R


def greedy(logits_RV: torch.Tensor) -> torch.Tensor:
    """argmax of each row, lowest id among equals; int64 [R], or INVALID."""
    if logits_RV.device.type == "cpu":
        # numpy's argmax is vectorised (torch's took ten times as long); both take the first maximum and let NaN win.
        best_R = torch.from_numpy(logits_RV.numpy().argmax(axis=-1))
    else:
        best_R = logits_RV.argmax(dim=-1)
    return _check(best_R, logits_RV.gather(1, best_R[:, None])[:, 0])


def draw_unfiltered(logits_RV: torch.Tensor, temperature_R: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over the whole vocabulary in order of ids. temperature_R: float32; uniform_R: float64. int64 [R].

    The running sum has two levels (float32 within a block of 256 tokens, float64 over blocks): a plain float32 sum would
    lose every token below 2**-24, and a float64 one costs ten times as much.
    """
    probs_RV = torch.softmax(logits_RV / temperature_R[:, None], dim=-1)
    vocab = probs_RV.shape[1]
    within_RBb = pad(probs_RV, (0, -vocab % _BLOCK)).view(len(probs_RV), -1, _BLOCK).cumsum(dim=-1)
    blocks_RB = within_RBb[:, :, -1].double().cumsum(dim=-1)
    total_R = blocks_RB[:, -1]
    target_R = _below(uniform_R * total_R, total_R)
    block_R = (blocks_RB <= target_R[:, None]).sum(dim=-1).clamp_(max=blocks_RB.shape[1] - 1)
    before_R = pad(blocks_RB, (1, 0)).gather(1, block_R[:, None])[:, 0]
    within_Rb = within_RBb[torch.arange(len(block_R), device=block_R.device), block_R].double()
    # The block's own sum bounds the rest, which rounding may have pushed to it.
    rest_R = _below(target_R - before_R, within_Rb[:, -1])
    index_R = (within_Rb <= rest_R[:, None]).sum(dim=-1)
    return _check((block_R * _BLOCK + index_R).clamp_(max=vocab - 1), total_R)


def draw_filtered(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
) -> torch.Tensor:
    """Inverse CDF over the tokens that top_k, top_p and min_p leave, in order of (descending logit, id). int64 [R].

    In that order each filter keeps a prefix (at least one token)::

        top_k   the first k
        top_p   every token with less than top_p of the mass of the first k in front of it (the smallest set that reaches it)
        min_p   every token with at least min_p of the first one's probability

    temperature_R: float32; top_k_R: int64, outside [1, V) means all; the others float64.
    """
    rows, vocab = logits_RV.shape
    probs_RV = torch.softmax(logits_RV / temperature_R[:, None], dim=-1)
    limits = _Limits(torch.where((top_k_R < 1) | (top_k_R > vocab), vocab, top_k_R), top_p_R, min_p_R, uniform_R)
    tokens_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    todo = torch.arange(rows, device=logits_RV.device)
    for k in (*(c for c in _CANDIDATES if c < vocab), vocab):
        values_RK, ids_RK = _best(logits_RV[todo], k)
        picked_R, known_R = limits.take(todo).pick(values_RK, ids_RK, probs_RV[todo].gather(1, ids_RK), vocab)
        tokens_R[todo] = picked_R
        todo = todo[~known_R]
        if not len(todo):
            break
    return _check(tokens_R, probs_RV[:, 0])


@dataclass(frozen=True)
class _Limits:
    """top_k (resolved to [1, V]), top_p, min_p and uniform of R rows."""

    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    uniform_R: torch.Tensor

    def take(self, rows: torch.Tensor) -> _Limits:
        return _Limits(self.top_k_R[rows], self.top_p_R[rows], self.min_p_R[rows], self.uniform_R[rows])

    def pick(
        self, values_RK: torch.Tensor, ids_RK: torch.Tensor, probs_RK: torch.Tensor, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token of each row, and whether these K candidates were enough to know it."""
        k = values_RK.shape[1]
        probs_RK = probs_RK.double()
        sums_RK = probs_RK.cumsum(dim=-1)
        mass_R = torch.where(self.top_k_R >= vocab, 1.0, sums_RK.gather(1, (self.top_k_R - 1).clamp(max=k - 1)[:, None])[:, 0])
        threshold_R = torch.where(self.top_p_R >= 1, torch.inf, self.top_p_R * mass_R)
        keep_RK = (sums_RK - probs_RK < threshold_R[:, None]) & (probs_RK >= self.min_p_R[:, None] * probs_RK[:, :1])
        kept_R = torch.minimum(keep_RK.cumprod(dim=-1).sum(dim=-1), self.top_k_R).clamp_(min=1)
        total_R = sums_RK.gather(1, (kept_R - 1).clamp(max=k - 1)[:, None])[:, 0]
        target_R = _below(self.uniform_R * total_R, total_R)
        index_R = (sums_RK <= target_R[:, None]).sum(dim=-1).clamp_(max=k - 1)
        token_R = ids_RK.gather(1, index_R[:, None])[:, 0]
        if k == vocab:
            return token_R, torch.ones_like(kept_R, dtype=torch.bool)
        # Which of the tokens that equal the last candidate are among the K is open, so only those above it count.
        certain_R = (values_RK > values_RK[:, -1:]).sum(dim=-1)
        mass_known_R = (self.top_k_R >= vocab) | (self.top_k_R <= k) | (self.top_p_R >= 1)
        invalid_R = probs_RK[:, 0].isnan()
        return token_R, ((kept_R <= certain_R) & mass_known_R) | invalid_R


def _best(logits_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids of the best k tokens, in order of (descending logit, id)."""
    if k < logits_RV.shape[1]:
        return order_by_value_then_id(*torch.topk(logits_RV, k))
    values_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    return values_RV, ids_RV


def _greedy_part(logits_RV: torch.Tensor, params: RowSampling, at: Any) -> torch.Tensor:
    return greedy(logits_RV)


def _unfiltered_part(logits_RV: torch.Tensor, params: RowSampling, at: Any) -> torch.Tensor:
    device = logits_RV.device
    return draw_unfiltered(
        logits_RV, torch.from_numpy(params.temperature_R[at]).to(device), torch.from_numpy(params.uniform_R[at]).to(device)
    )


def _filtered_part(logits_RV: torch.Tensor, params: RowSampling, at: Any) -> torch.Tensor:
    arrays = (params.temperature_R, params.top_k_R, params.top_p_R, params.min_p_R, params.uniform_R)
    return draw_filtered(logits_RV, *(torch.from_numpy(a[at]).to(logits_RV.device) for a in arrays))


def _below(target_R: torch.Tensor, total_R: torch.Tensor) -> torch.Tensor:
    """`target`, kept under `total` where rounding reached it: then a token with probability > 0 has a sum above it."""
    return torch.minimum(target_R, torch.nextafter(total_R, torch.zeros_like(total_R))).clamp_(min=0)


def _check(tokens_R: torch.Tensor, evidence_R: torch.Tensor) -> torch.Tensor:
    """INVALID where the evidence (a best logit, a sum of probabilities) is NaN or infinite."""
    return torch.where(evidence_R.isfinite(), tokens_R, INVALID)


# ------------------------------------------------------------------ what changes logits before the draw


def apply_penalties(
    logits_RV: torch.Tensor,
    seen_RV: torch.Tensor,
    output_counts_RV: torch.Tensor,
    repetition_R: torch.Tensor,
    frequency_R: torch.Tensor,
    presence_R: torch.Tensor,
) -> torch.Tensor:
    """New logits [R, V]::

        l = l / repetition if l > 0 else l * repetition        where the token is in prompt or output (Keskar 2019, CTRL)
        l = l - frequency * count - presence * (count > 0)     count among output tokens only (OpenAI)

    seen_RV: bool; output_counts_RV: float32; the others float32 [R]. 1, 0 and 0 change nothing.
    """
    repetition = repetition_R[:, None]
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
    logits_RV = torch.where(seen_RV, repeated_RV, logits_RV)
    return logits_RV - frequency_R[:, None] * output_counts_RV - presence_R[:, None] * (output_counts_RV > 0)


def add_bias(logits_RV: torch.Tensor, rows_N: torch.Tensor, ids_N: torch.Tensor, values_N: torch.Tensor) -> None:
    """logits[rows[n], ids[n]] += values[n], in place. Indices int64, each pair once; values float32."""
    logits_RV.index_put_((rows_N, ids_N), values_N, accumulate=True)


def ban_tokens(logits_RV: torch.Tensor, rows_N: torch.Tensor, ids_N: torch.Tensor) -> None:
    """logits[rows[n], ids[n]] = -inf, in place. Indices int64."""
    logits_RV[rows_N, ids_N] = -torch.inf
