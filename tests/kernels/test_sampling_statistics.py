"""Frequencies of drawn tokens against exact probabilities. Seeds are fixed, so the outcome never changes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from radixcast.kernels.reference.sampling import RowSampling, sample
from radixcast.kernels.reference.uniform import uniforms

Array = npt.NDArray[np.float64]

DRAWS = 10_000


def chi_square_limit(freedom: int) -> float:
    """Wilson and Hilferty's approximation of the 99.9 % quantile."""
    a = 2 / (9 * freedom)
    return freedom * (1 - a + 3.09 * math.sqrt(a)) ** 3


@pytest.mark.parametrize("seed", [0, 2**63 + 5])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(-1, 1.0, 0.0), (12, 1.0, 0.0), (-1, 0.8, 0.0), (30, 0.95, 0.05)])
def test_draws_follow_the_distribution(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    vocab = 300
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(7)) * 2
    u = uniforms(np.full(DRAWS, seed, np.uint64), np.zeros(DRAWS, np.int64), np.arange(DRAWS))
    filtered = top_k > 0 or top_p < 1 or min_p > 0
    tokens = sample(
        logits.expand(DRAWS, -1),
        RowSampling(
            greedy_R=np.zeros(DRAWS, np.bool_),
            filtered_R=np.full(DRAWS, filtered),
            temperature_R=np.full(DRAWS, temperature, np.float32),
            top_k_R=np.full(DRAWS, top_k, np.int64),
            top_p_R=np.full(DRAWS, top_p),
            min_p_R=np.full(DRAWS, min_p),
            uniform_R=u,
        ),
    ).numpy()
    expected = exact(logits.double().numpy() / temperature, top_k, top_p, min_p) * DRAWS
    observed = np.bincount(tokens, minlength=vocab)
    assert observed[expected == 0].sum() == 0
    often = expected >= 5
    expected_bins = np.append(expected[often], expected[~often].sum())
    observed_bins = np.append(observed[often], observed[~often].sum())
    used = expected_bins > 0
    chi_square = ((observed_bins - expected_bins)[used] ** 2 / expected_bins[used]).sum()
    assert chi_square < chi_square_limit(int(used.sum()) - 1)


def exact(scaled: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Probabilities after the filters."""
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    if top_k > 0:
        probs[order[top_k:]] = 0
        probs /= probs.sum()
    ahead = np.cumsum(probs[order]) - probs[order]
    probs[order[ahead >= top_p]] = 0
    probs[probs < min_p * probs.max()] = 0
    result: Array = probs / probs.sum()
    return result
