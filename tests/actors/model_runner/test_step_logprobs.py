"""Logprobs of prompts and outputs: the model's own, at the right positions, however the prompt is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fakes.plans import Planner, opening
from fakes.table_model import TableModel, capacity
from radixcast.actors.model_runner.report import SLICE
from radixcast.actors.model_runner.step import TorchExecutor
from radixcast.protocols.buffers import unpack_floats, unpack_ids
from radixcast.protocols.internal import RowOpen, StepResult
from radixcast.protocols.public import Logprobs
from radixcast.protocols.sampling import SamplingParams

PROMPT = [1, 2, 3, 4, 5, 6, 7]
ASKED = (3, 96)


def exact(model: TableModel, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Log-softmax after these tokens."""
    logits = model.logits_after(tokens).astype(np.float64)
    logits -= np.log(np.exp(logits).sum())
    return logits


def run(model: TableModel, opens: list[RowOpen], chunk: int, steps: int) -> list[StepResult]:
    """One executor, the rows of `opens` in chunks."""
    executor = TorchExecutor(model, capacity(), vocab_size=97, device=torch.device("cpu"))
    planner = Planner(next_slot=100)
    return [executor.execute(planner.plan({o.row: chunk for o in opens}, opens if i == 0 else [])) for i in range(steps)]


def collect(results: list[StepResult], row: int, which: str) -> list[tuple[int, float, list[int], list[float], list[float]]]:
    """(token, logprob, top ids, top values, asked values) of each position, in order."""
    positions = []
    for result in results:
        for entry in result.logprobs:
            part: Logprobs | None = getattr(entry, which)
            if entry.row == row and part is not None:
                n = len(part.ids) // 4
                columns: list[Any] = [unpack_ids(part.ids).tolist(), unpack_floats(part.values).tolist()]
                columns += [x.reshape(n, -1).tolist() for x in (unpack_ids(part.top_ids), unpack_floats(part.top_values))]
                columns.append(unpack_floats(part.asked_values).reshape(n, -1).tolist())
                positions += list(zip(*columns, strict=True))
    return positions


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("start", [0, 1, 4, 6])
def test_prompt_logprobs(chunk: int, start: int) -> None:
    model = TableModel()
    plain = opening(1, [9, 9, 9, 9])
    asking = opening(0, PROMPT, logprob_start=start, logprobs=True, top_logprobs=3, logprob_token_ids=ASKED)
    results = run(model, [plain, asking], chunk, 9)
    found = collect(results, 0, "prompt")
    assert [f[0] for f in found] == PROMPT[start:]
    for position, (token, value, top_ids, top_values, asked) in enumerate(found, start):
        if position == 0:
            assert np.isnan([value, *top_values, *asked]).all()
            continue
        expected = exact(model, PROMPT[:position])
        assert value == pytest.approx(expected[token], abs=1e-4)
        assert top_ids == np.argsort(-expected, kind="stable")[:3].tolist()
        assert top_values == pytest.approx(expected[top_ids].tolist(), abs=1e-4)
        assert asked == pytest.approx(expected[list(ASKED)].tolist(), abs=1e-4)
    assert collect(results, 1, "prompt") == []


def test_prompt_positions_are_told_as_soon_as_they_are_computed() -> None:
    results = run(TableModel(), [opening(0, PROMPT, logprob_start=2)], 3, 3)
    assert [[f[0] for f in collect([r], 0, "prompt")] for r in results] == [[3, 4], [5, 6, 7], []]


def test_logits_only_where_wanted() -> None:
    model = TableModel()
    run(model, [opening(1, [9, 9]), opening(0, PROMPT, logprob_start=5)], 50, 1)
    assert model.batches[0].logit_tokens_L.tolist() == [1, 6, 7, 8]


def test_positions_inside_a_hit_have_none() -> None:
    """The scheduler never matches beyond logprob_start; if it did, positions must not shift."""
    model = TableModel()
    executor = TorchExecutor(model, capacity(), vocab_size=97, device=torch.device("cpu"))
    planner = Planner()
    executor.execute(planner.plan({1: 7}, [opening(1, PROMPT)]))
    for hit in (4, 6):
        again = opening(0, PROMPT, slots=planner.held[1][:hit], logprob_start=2, top_logprobs=1)
        found = collect([executor.execute(planner.plan({0: 50}, [again], [0]))], 0, "prompt")
        assert [f[0] for f in found] == PROMPT[2:]
        assert [bool(np.isnan(f[1])) for f in found] == [p <= hit for p in range(2, 7)]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.3, seed=1, top_k=5),
        SamplingParams(temperature=1, seed=1, repetition_penalty=2.0, frequency_penalty=2.0, logit_bias={8: 100.0}),
    ],
)
def test_output_logprobs_are_the_models_own(sampling: SamplingParams) -> None:
    """Before temperature, penalties and bias; rows that ask for different things share a step."""
    model = TableModel()
    opens = [
        opening(0, PROMPT, sampling=sampling, logprobs=True, top_logprobs=4),
        opening(1, [9], sampling=sampling),
        opening(2, PROMPT, sampling=sampling, logprobs=True, logprob_token_ids=ASKED),
    ]
    results = run(model, opens, 50, 1)
    first, second = collect(results, 0, "output"), collect(results, 2, "output")
    expected = exact(model, PROMPT)
    assert len(first) == len(second) == 1
    token, value, top_ids, top_values, asked = first[0]
    assert value == pytest.approx(expected[token], abs=1e-4)
    assert top_ids == np.argsort(-expected, kind="stable")[:4].tolist()
    assert top_values == pytest.approx(expected[top_ids].tolist(), abs=1e-4)
    assert asked == []
    assert second[0][:3] == (token, value, [])
    assert second[0][4] == pytest.approx(expected[list(ASKED)].tolist(), abs=1e-4)
    assert collect(results, 1, "output") == []


def test_resumed_outputs_are_not_reported_again() -> None:
    results = run(TableModel(), [opening(0, PROMPT, [8, 9], logprob_start=5, logprobs=True)], 50, 2)
    assert [f[0] for f in collect(results, 0, "prompt")] == PROMPT[5:]
    assert [len(collect([r], 0, "output")) for r in results] == [1, 1]


def test_prompt_only_scoring() -> None:
    results = run(TableModel(), [opening(0, PROMPT, new=0, logprob_start=0)], 50, 1)
    assert [f[0] for f in collect(results, 0, "prompt")] == PROMPT
    assert len(results[0].ends) == 1


def test_invalid_logits_report_nothing() -> None:
    model = TableModel()
    model.poison = {7}
    results = run(model, [opening(0, PROMPT, logprobs=True), opening(1, [5], logprobs=True)], 50, 1)
    assert collect(results, 0, "output") == []
    assert len(collect(results, 1, "output")) == 1


def test_long_prompts_are_scored_in_slices() -> None:
    """Logits of at most SLICE positions exist at a time, and nothing is lost between slices."""
    model = TableModel()
    prompt = [i % 97 for i in range(2 * SLICE + 9)]
    executor = TorchExecutor(model, capacity(context_length=500), vocab_size=97, device=torch.device("cpu"))
    found = collect([executor.execute(Planner().plan({0: 400}, [opening(0, prompt, logprob_start=0)]))], 0, "prompt")
    assert [f[0] for f in found] == prompt
    for position in (1, SLICE, SLICE + 1, 2 * SLICE + 1, 2 * SLICE + 8):
        assert found[position][1] == pytest.approx(exact(model, prompt[:position])[prompt[position]], abs=1e-4)
    assert max(model.head_sizes) == SLICE
