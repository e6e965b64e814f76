"""Drawing under masks: few allowed tokens are gathered, many are masked in place, and nobody can tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.plans import Planner, opening
from radixcast.actors.model_runner import sampler as module
from radixcast.actors.model_runner.constraint import popcounts
from radixcast.actors.model_runner.constraints import Masks
from radixcast.actors.model_runner.sampler import Sampler
from radixcast.actors.model_runner.tables import RowTables
from radixcast.protocols.sampling import SamplingParams

VOCAB = 2100


def sampler_with(params: list[SamplingParams]) -> Sampler:
    tables = RowTables(max_running=8, context_length=16, total_tokens=100, vocab_size=VOCAB)
    tables.lay_out(Planner().plan({}, [opening(r, [1], sampling=p) for r, p in enumerate(params)]))
    return Sampler(tables, torch.device("cpu"))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_k=st.sampled_from([-1, 1, 5, 50, 1500]),
    top_p=st.sampled_from([1.0, 0.5]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**31), st.data())
def test_gathered_and_masked_rows_draw_the_same(params: list[SamplingParams], seed: int, data: Any) -> None:
    rng = np.random.default_rng(seed)
    rows = len(params)
    masked = np.array(data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows)), np.int64)
    allowed = np.ones((rows, VOCAB), np.bool_)
    for s in masked:
        allowed[s] = False
        allowed[s, rng.permutation(VOCAB)[: data.draw(st.sampled_from([1, 2, 32, 33, 1024, 1025, VOCAB]))]] = True
    logits = rng.standard_normal((rows, VOCAB)).astype(np.float32) * 2
    full = np.pad(allowed, ((0, 0), (0, -VOCAB % 32)))
    words = np.packbits(full, axis=1, bitorder="little").view(np.int32)
    masks = Masks(masked, words[masked], popcounts(words[masked]))
    sampler = sampler_with(params)
    at, positions = np.arange(rows), np.full(rows, 3)
    found = sampler.sample(torch.from_numpy(logits.copy()), at, positions, masks)
    expected = sampler.sample(torch.from_numpy(np.where(allowed, logits, -np.inf).astype(np.float32)), at, positions)
    assert allowed[at, found].all()
    assert found.tolist() == expected.tolist()


def test_the_width_of_a_row_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row draws does not depend on the rows beside it: each is gathered to a width that follows from its own mask."""
    sampler = sampler_with([SamplingParams(temperature=1)] * 4 + [SamplingParams(temperature=0)])
    counts = np.array([2, 32, 33, 1025, 5])
    assert sampler._widths(np.arange(5), counts).tolist() == [32, 32, 1024, 0, 0]
    assert module.GATHER_WIDTHS == (32, 1024)


def test_popcounts(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = np.array([[0, 0], [-1, 1], [1 << 30, -(1 << 31)]], np.int32)
    assert popcounts(masks).tolist() == [0, 33, 2]
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert popcounts(masks).tolist() == [0, 33, 2]
