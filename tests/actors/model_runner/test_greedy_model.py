"""The embedded model gives the reference texts: greedy, fp32, made with transformers from the same GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.paged import PagedModel
from radixcast.actors.model_runner.models.base import DecoderModel
from radixcast.actors.model_runner.models.registry import load_model
from radixcast.protocols.model import ModelSpec

CASES = [json.loads(line) for line in (Path(__file__).parents[2] / "data" / "smollm2_greedy.jsonl").read_text().splitlines()]
EOS = 2
SLOTS = 8192


@pytest.fixture(scope="module")
def model(smollm2_spec: ModelSpec) -> DecoderModel:
    return load_model(smollm2_spec, device=torch.device("cpu"), dtype=torch.float32, quantization="auto")


def greedy(model: DecoderModel, cases: list[dict[str, Any]]) -> list[list[int]]:
    """Outputs of all cases, as one batch."""
    paged = PagedModel(model, model.config, SLOTS)
    return paged.greedy([case["prompt_ids"] for case in cases], EOS, [len(case["output_ids"]) for case in cases])


def test_three_prompts(model: DecoderModel) -> None:
    shortest = sorted(CASES, key=lambda case: len(case["prompt_ids"]) + 4 * len(case["output_ids"]))[:3]
    assert greedy(model, shortest[:1]) == [shortest[0]["output_ids"]]
    assert greedy(model, shortest) == [case["output_ids"] for case in shortest]


@pytest.mark.slow
def test_all_prompts_alone(model: DecoderModel) -> None:
    assert [greedy(model, [case])[0] for case in CASES] == [case["output_ids"] for case in CASES]


@pytest.mark.slow
def test_all_prompts_as_one_ragged_batch(model: DecoderModel) -> None:
    assert greedy(model, CASES) == [case["output_ids"] for case in CASES]


@pytest.mark.slow
def test_all_prompts_in_chunks_of_16(model: DecoderModel) -> None:
    """Prefilled in chunks, one prompt at a time, then decoded."""
    for case in CASES:
        paged = PagedModel(model, model.config, SLOTS)
        ids, wanted = case["prompt_ids"], case["output_ids"]
        row = paged.row(ids, len(ids) + len(wanted))
        while len(row.ids) < len(ids) + len(wanted):
            count = min(16, len(row.ids) - row.computed)
            last = paged.step([row], [count])[-1]
            if row.computed == len(row.ids):
                row.ids.append(int(last.argmax()))
        assert row.ids[len(ids) :] == wanted
