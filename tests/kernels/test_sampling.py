"""Sampling against naive definitions in numpy, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from radixcast.kernels.reference import sampling
from radixcast.kernels.reference.sampling import INVALID, RowSampling, sample

Array = npt.NDArray[Any]

LOGITS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 40)),
    # Few distinct values, so that ties are common.
    elements=st.integers(-8, 8).map(lambda i: i / 2),
)


def params(rows: int, **given: Any) -> RowSampling:
    """One parameter for all rows, or an array."""
    values = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5, "greedy": False} | given
    full = {k: np.broadcast_to(np.asarray(v), (rows,)).copy() for k, v in values.items()}
    greedy = full["greedy"] | (full["temperature"] <= 1e-5) | (full["top_k"] == 1)
    return RowSampling(
        greedy_R=greedy,
        filtered_R=~greedy & ((full["top_k"] > 0) | (full["top_p"] < 1) | (full["min_p"] > 0)),
        temperature_R=full["temperature"].astype(np.float32),
        top_k_R=full["top_k"].astype(np.int64),
        top_p_R=full["top_p"].astype(np.float64),
        min_p_R=full["min_p"].astype(np.float64),
        uniform_R=full["uniform"].astype(np.float64),
    )


def naive_support(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Tokens left by top_k, top_p, min_p, in order of (descending logit, id): one filter after another, as defined."""
    probs = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    probs /= probs.sum()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    mass = sum(probs[i] for i in order)
    kept: list[int] = []
    for i in order:
        kept.append(i)
        if top_p < 1 and sum(probs[j] for j in kept) >= top_p * mass * (1 - 1e-6):
            break
    return [i for i in kept if probs[i] >= min_p * probs[order[0]]]


@settings(max_examples=200, deadline=None)
@given(
    LOGITS,
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([-1, 2, 3, 7, 1000]),
    st.sampled_from([1.0, 0.1, 0.47, 0.83, 0.99]),
    st.sampled_from([0.0, 0.013, 0.31, 1.0]),
    st.floats(0, 1, exclude_max=True),
)
def test_filters_keep_what_their_definitions_say(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    p = params(len(logits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=u)
    tokens = sample(torch.from_numpy(logits), p).tolist()
    for row, token in zip(logits, tokens, strict=True):
        assert token in naive_support(row, temperature, top_k, top_p, min_p)


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.sampled_from([2, 3, 7]), st.sampled_from([1.0, 0.47, 0.83]), st.sampled_from([0.0, 0.31]))
def test_every_token_of_the_support_can_be_drawn_and_has_its_share(
    logits: Array, top_k: int, top_p: float, min_p: float
) -> None:
    """Over a fine grid of uniforms each token's share is its renormalised probability."""
    grid = 512
    row = logits[0]
    tokens = sample(
        torch.from_numpy(np.repeat(row[None], grid, axis=0)),
        params(grid, top_k=top_k, top_p=top_p, min_p=min_p, uniform=(np.arange(grid) + 0.5) / grid),
    ).numpy()
    support = naive_support(row, 1.0, top_k, top_p, min_p)
    probs = np.exp(row[support].astype(np.float64))
    probs /= probs.sum()
    shares = np.array([(tokens == i).mean() for i in support])
    assert np.abs(shares - probs).max() <= 1.5 / grid
    assert set(tokens.tolist()) <= set(support)


@settings(max_examples=100, deadline=None)
@given(LOGITS, st.floats(0, 1, exclude_max=True))
def test_unfiltered_draw_is_the_inverse_cdf_in_order_of_ids(logits: Array, u: float) -> None:
    tokens = sample(torch.from_numpy(logits), params(len(logits), uniform=u)).tolist()
    for row, token in zip(logits, tokens, strict=True):
        probs = np.exp(row.astype(np.float64) - row.max())
        cdf = np.cumsum(probs) / probs.sum()
        before = cdf[token - 1] if token else 0.0
        assert before - 1e-6 <= u <= cdf[token] + 1e-6


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1e-5}, {"top_k": 1}, {"top_p": 1e-6}])
@pytest.mark.parametrize("vocab", [5, 300, 5000])
def test_greedy_in_all_its_spellings(how: dict[str, float], vocab: int) -> None:
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=0)  # many ties
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, params(16, uniform=0.999, **how)).tolist() == expected


@pytest.mark.parametrize("vocab", [4, 255, 256, 257, 1000, 5000])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("how", [{}, {"top_p": 0.999999}, {"top_k": 3}])
def test_extreme_uniforms_never_leave_the_support(vocab: int, u: float, how: dict[str, float]) -> None:
    """Masked tokens at both ends, and whole masked blocks, are never drawn."""
    logits = torch.zeros(2, vocab)
    logits[:, 0] = logits[:, -1] = -torch.inf
    if vocab > 600:
        logits[:, : vocab // 2] = -torch.inf
    tokens = sample(logits, params(2, uniform=u, **how))
    assert logits.gather(1, tokens[:, None]).isfinite().all()


def test_small_probabilities_are_not_lost() -> None:
    """A million tokens of 1e-9 behind a certain one: a float32 running sum would never reach them."""
    vocab = 200_000
    logits = torch.full((1, vocab), -16.0)
    logits[0, 0] = 0.0
    tail = (vocab - 1) * np.exp(-16.0)
    expected_half = (1 + tail / 2) / (1 + tail)
    token = int(sample(logits, params(1, uniform=expected_half)))
    assert abs(token - vocab / 2) < vocab * 0.001


@pytest.mark.parametrize("vocab", [300, 5000, 9000])
def test_more_candidates_change_nothing(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether 256 candidates are enough, or a full sort is needed, is not seen in the result."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(24, vocab, generator=rng) * torch.linspace(0, 6, 24)[:, None]
    logits[::3] = logits[::3].round()
    p = params(
        24,
        top_p=np.tile([0.9, 0.999, 0.3], 8),
        top_k=np.tile([-1, 50, 700, 5], 6),
        min_p=np.tile([0.0, 0.01], 12),
        uniform=np.linspace(0, 0.999, 24),
    )
    tokens = sample(logits, p)
    monkeypatch.setattr(sampling, "_CANDIDATES", ())
    assert torch.equal(tokens, sample(logits, p))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows, vocab = 33, 1003
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 2
    rng = np.random.default_rng(0)
    p = params(
        rows,
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0], rows),
        top_k=rng.choice([-1, -1, 1, 40], rows),
        top_p=rng.choice([1.0, 1.0, 0.9], rows),
        min_p=rng.choice([0.0, 0.0, 0.1], rows),
        uniform=rng.random(rows),
    )
    together = sample(logits, p).tolist()
    for r in rng.permutation(rows).tolist():
        one = RowSampling(**{f: getattr(p, f)[r : r + 1] for f in RowSampling.__dataclass_fields__})
        assert sample(logits[r : r + 1], one).tolist() == [together[r]]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_no_distribution(how: dict[str, float], bad: float) -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(5))
    good = sample(logits, params(4, **how)).tolist()
    logits[1, 650] = bad
    logits[2] = -torch.inf
    assert sample(logits, params(4, **how)).tolist() == [good[0], INVALID, INVALID, good[3]]


def test_logits_are_left_alone() -> None:
    logits = torch.randn(6, 50)
    before = logits.clone()
    sample(logits, params(6, temperature=[0.0, 1, 1, 1, 0, 1], top_p=[1, 1, 0.5, 0.5, 1, 1]))
    assert torch.equal(logits, before)


@settings(max_examples=100, deadline=None)
@given(
    LOGITS,
    st.lists(st.integers(0, 39), max_size=30),
    st.integers(0, 30),
    st.sampled_from([1.0, 1.3, 0.7, 2.0]),
    st.sampled_from([0.0, 0.5, -2.0]),
    st.sampled_from([0.0, 1.5, -0.25]),
)
def test_penalties(logits: Array, ids: list[int], prompt: int, repetition: float, frequency: float, presence: float) -> None:
    vocab = logits.shape[1]
    ids = [i % vocab for i in ids]
    outputs = ids[prompt:]
    expected = logits.astype(np.float64)
    for i in set(ids):
        expected[:, i] = np.where(expected[:, i] > 0, expected[:, i] / repetition, expected[:, i] * repetition)
    for i in outputs:
        expected[:, i] -= frequency
    for i in set(outputs):
        expected[:, i] -= presence
    rows = len(logits)
    seen = torch.zeros(rows, vocab, dtype=torch.bool)
    seen[:, ids] = True
    counts = torch.from_numpy(np.bincount(np.array(outputs, np.int64), minlength=vocab).astype(np.float32)).expand(rows, -1)
    full = [torch.full((rows,), v) for v in (repetition, frequency, presence)]
    found = sampling.apply_penalties(torch.from_numpy(logits), seen, counts, *full)
    assert np.allclose(found.numpy(), expected, atol=1e-4)


def test_bias_bans_and_bitmask() -> None:
    logits = torch.zeros(2, 70)
    rows, ids = torch.tensor([0, 0, 1]), torch.tensor([3, 69, 3])
    sampling.add_bias(logits, rows, ids, torch.tensor([1.0, -2.0, 5.0]))
    assert logits[0, 3] == 1
    assert logits[0, 69] == -2
    assert logits[1, 3] == 5
    assert logits.sum() == 4
    sampling.ban_tokens(logits, rows, ids)
    assert logits.isinf().sum() == 3
