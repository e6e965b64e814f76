"""From server arguments to tokens with a real (tiny, random) decoder: the same text however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.plans import Planner, floats, generate, opening
from fakes.tiny_hf import tiny_config, tiny_spec
from radixcast.actors.model_runner.load import load_executor
from radixcast.actors.model_runner.step import TorchExecutor
from radixcast.protocols.errors import StartupError
from radixcast.protocols.sampling import SamplingParams
from radixcast.protocols.server_args import ServerArgs

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [90], [1, 2, 3, 4, 50, 60]]
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=3),
    SamplingParams(temperature=1, seed=4, top_p=0.9, repetition_penalty=1.2),
]


def args(**changes: object) -> ServerArgs:
    return ServerArgs(device="cpu", max_total_tokens=4000, max_running_requests=8, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def executor() -> TorchExecutor:
    return load_executor(args(), tiny_spec(tiny_config()), lambda: None)


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_same_tokens_alone_chunked_batched_and_resumed(executor: TorchExecutor, sampling: SamplingParams, chunk: int) -> None:
    planner = Planner()
    alone = [generate(executor, planner, [opening(0, p, sampling=sampling)])[0] for p in PROMPTS]
    together = generate(executor, planner, [opening(2 + i, p, sampling=sampling) for i, p in enumerate(PROMPTS)], chunk)
    assert [together[2 + i] for i in range(3)] == alone
    resumed = generate(executor, planner, [opening(1, PROMPTS[0], alone[0][:3], sampling=sampling)], chunk)
    assert alone[0][:3] + resumed[1] == alone[0]


def test_prompt_logprobs_do_not_depend_on_chunks(executor: TorchExecutor) -> None:
    planner = Planner()

    def values(chunk: int) -> list[float]:
        opens = [opening(0, PROMPTS[0], logprob_start=0)]
        parts = [executor.execute(planner.plan({0: chunk}, opens if i == 0 else [], [0] if i == 0 else [])) for i in range(9)]
        return [v for r in parts for entry in r.logprobs if entry.prompt for v in floats(entry.prompt.values)]

    whole = values(100)
    assert len(whole) == 9
    assert np.isnan(whole[0])
    for chunk in (1, 2, 4):
        assert values(chunk)[1:] == pytest.approx(whole[1:], abs=1e-4)


def test_warm_up_leaves_nothing_behind() -> None:
    executor = load_executor(args(), tiny_spec(tiny_config()), lambda: None)
    assert not executor.tables.alive.any()
    assert executor.capacity().total_tokens == 4000
    assert executor.capacity().max_running == 8


def test_errors_name_the_cause() -> None:
    with pytest.raises(StartupError, match="GPT2LMHeadModel"):
        load_executor(args(), tiny_spec(tiny_config("GPT2LMHeadModel")), lambda: None)
