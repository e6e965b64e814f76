"""Grammar masks: both op tables against numpy, on vocabularies of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcast.kernels import Ops, select

CPU = torch.device("cpu")
TABLES = [select(CPU), select(CPU, reference=True)]
fast = settings(max_examples=60, deadline=None)


def packed(allowed_NV: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Bits as int32 words; those beyond the vocabulary are set, which must not matter."""
    beyond = -allowed_NV.shape[1] % 32
    full = np.pad(allowed_NV, ((0, 0), (0, beyond)), constant_values=True)
    return torch.from_numpy(np.packbits(full, axis=1, bitorder="little").view("<i4").copy())


@st.composite
def masked_logits(draw: st.DrawFn) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Logits [S, V], rows to mask, their allowed tokens [N, V] from none to all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows, vocab = draw(st.integers(1, 6)), draw(st.integers(1, 200))
    at = rng.permutation(rows)[: draw(st.integers(0, rows))]
    share = draw(st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]))
    return rng.standard_normal((rows, vocab)).astype(np.float32), at, rng.random((len(at), vocab)) < share


@pytest.mark.parametrize("ops", TABLES, ids=lambda ops: ops.name)
@fast
@given(masked_logits(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_apply_bitmask(ops: Ops, case: Any, dtype: torch.dtype) -> None:
    logits, at, allowed = case
    found = torch.from_numpy(logits).to(dtype)
    wanted = found.clone()
    for n, s in enumerate(at):
        wanted[s, torch.from_numpy(~allowed[n])] = -torch.inf
    ops.apply_bitmask_(found, torch.from_numpy(at), packed(allowed))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("ops", TABLES, ids=lambda ops: ops.name)
@fast
@given(masked_logits(), st.integers(0, 3))
def test_gather_allowed(ops: Ops, case: Any, spare: int) -> None:
    logits, at, allowed = case
    width = int(allowed.sum(axis=1).max(initial=1)) + spare
    values, ids = ops.gather_allowed(torch.from_numpy(logits), torch.from_numpy(at), packed(allowed), width)
    assert values.shape == ids.shape == (len(at), width)
    for n, s in enumerate(at):
        wanted = np.flatnonzero(allowed[n])
        assert ids[n].tolist() == wanted.tolist() + [0] * (width - len(wanted))
        assert values[n].tolist() == logits[s, wanted].tolist() + [-np.inf] * (width - len(wanted))
