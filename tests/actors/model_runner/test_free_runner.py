"""The runner that costs nothing follows the same rules, and its tokens depend on nothing but the row."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fakes.plans import Planner, appended, floats, generate, opening
from fakes.table_model import capacity
from radixcast.actors.model_runner.free import FreeRunner
from radixcast.protocols.buffers import unpack_ids
from radixcast.protocols.sampling import SamplingParams


@pytest.fixture
def runner() -> FreeRunner:
    return FreeRunner(capacity(), vocab_size=97)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_same_tokens_alone_batched_and_resumed(runner: FreeRunner, chunk: int) -> None:
    planner = Planner()
    prompts = [[1, 2, 3], [4], [1, 2, 4], [9] * 20]
    alone = [generate(runner, planner, [opening(0, p)])[0] for p in prompts]
    assert len({tuple(t) for t in alone}) == 4
    together = generate(runner, planner, [opening(3 + i, p) for i, p in enumerate(prompts)], chunk)
    assert [together[3 + i] for i in range(4)] == alone
    resumed = generate(runner, planner, [opening(0, prompts[0], alone[0][:3])], chunk)
    assert alone[0][:3] + resumed[0] == alone[0]


def test_every_token_seed_and_choice_matters(runner: FreeRunner) -> None:
    openings = [
        opening(0, [1, 2, 3]),
        opening(1, [2, 1, 3]),
        opening(2, [0, 1, 2, 3]),
        opening(3, [1, 2, 3], choice=1),
        opening(4, [1, 2, 3], sampling=SamplingParams(seed=9)),
    ]
    assert len({tuple(t) for t in generate(runner, Planner(), openings).values()}) == 5


def test_ends(runner: FreeRunner) -> None:
    planner = Planner()
    tokens = generate(runner, planner, [opening(0, [1, 2, 3], new=20)])[0]
    assert generate(runner, planner, [opening(0, [1, 2, 3], new=20, eos_ids=(tokens[0],))])[0] == tokens[:1]
    later = generate(runner, planner, [opening(0, [1, 2, 3], new=20, eos_ids=(tokens[0],), min_position=6)])[0]
    assert tokens[0] not in later[:3]
    plan = planner.plan({0: 3}, [opening(0, [1, 2, 3], new=0)])
    assert len(runner.execute(plan).ends) == 1


def test_logprobs_have_the_shape_of_real_ones(runner: FreeRunner) -> None:
    planner = Planner()
    asking = opening(0, [10, 20, 30], logprobs=True, logprob_start=0, top_logprobs=2, logprob_token_ids=(5,))
    first = runner.execute(planner.plan({0: 2}, [asking]))
    (part,) = first.logprobs
    assert part.output is None
    assert part.prompt is not None
    assert unpack_ids(part.prompt.ids).tolist() == [10, 20, 30]
    assert str(floats(part.prompt.values)) == "[nan, -7.0, -3.0]"
    assert len(part.prompt.top_ids) == 4 * 6
    assert len(part.prompt.asked_values) == 4 * 3
    plan = planner.plan({0: 2})
    second = runner.execute(plan)
    (part,) = second.logprobs
    assert part.prompt is None
    assert part.output is not None
    assert unpack_ids(part.output.ids).tolist() == appended(plan, second)[0]


def test_needs_no_torch() -> None:
    code = (
        "import sys; import radixcast.actors.model_runner.free, radixcast.actors.model_runner.actor; "
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
