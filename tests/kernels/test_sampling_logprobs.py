"""Logprobs against log-softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixcast.kernels.reference.logprobs import join, logprobs_of


@pytest.mark.parametrize("positions", [0, 1, 5, 300])
def test_values_top_and_asked(positions: int) -> None:
    vocab = 50
    logits = torch.randn(positions, vocab, generator=torch.Generator().manual_seed(1)) * 3
    targets = torch.arange(positions) % vocab
    asked = torch.tensor([7, 7, 0])
    found = logprobs_of(logits, targets, 4, asked)
    exact = torch.log_softmax(logits.double(), -1).numpy()
    assert np.allclose(found.values_N.numpy(), exact[np.arange(positions), targets.numpy()], atol=1e-5)
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :4]
    assert found.top_ids_NK.tolist() == order.tolist()
    assert np.allclose(found.top_values_NK.numpy(), np.take_along_axis(exact, order, -1), atol=1e-5)
    assert np.allclose(found.asked_values_NA.numpy(), exact[:, [7, 7, 0]], atol=1e-5)
    assert found.values_N.shape == (positions,)
    assert found.top_values_NK.shape == (positions, 4)


def test_ties_are_in_order_of_ids_and_k_is_capped() -> None:
    found = logprobs_of(torch.tensor([[1.0, 3.0, 1.0, 3.0]]), torch.tensor([0]), 9)
    assert found.top_ids_NK.tolist() == [[1, 3, 0, 2]]
    assert found.asked_values_NA.shape == (1, 0)


def test_join() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(2))
    targets, asked = torch.arange(6), torch.tensor([4])
    whole = logprobs_of(logits, targets, 3, asked)
    parts = [logprobs_of(logits[a:b], targets[a:b], 3, asked) for a, b in ((0, 2), (2, 6))]
    for got, want in zip(vars(join(parts, 3, 1)).values(), vars(whole).values(), strict=True):
        assert torch.equal(got, want)
    assert [tuple(t.shape) for t in vars(join([], 3, 1)).values()] == [(0,), (0, 3), (0, 3), (0, 1)]
