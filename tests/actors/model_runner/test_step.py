"""TorchExecutor over a model whose logits depend on all KV of a row: same tokens however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes.plans import Planner, appended, generate, opening
from fakes.table_model import TableModel, capacity
from radixcast.actors.model_runner.step import TorchExecutor
from radixcast.protocols.internal import END_EOS, END_ERROR, END_LENGTH, END_STOP_ID
from radixcast.protocols.sampling import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [1, 2, 3, 50, 60], [42]]
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=11),
    SamplingParams(temperature=1, seed=12, top_p=0.8, top_k=20, min_p=0.01),
    SamplingParams(
        temperature=0.8, seed=13, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, logit_bias={5: 3.0}
    ),
]


@pytest.fixture
def model() -> TableModel:
    return TableModel()


@pytest.fixture
def executor(model: TableModel) -> TorchExecutor:
    return TorchExecutor(model, capacity(), vocab_size=model.vocab_size, device=torch.device("cpu"))


def test_greedy_is_the_model(model: TableModel, executor: TorchExecutor) -> None:
    tokens = list(PROMPTS[0])
    for _ in range(8):
        tokens.append(int(model.logits_after(tokens).argmax()))
    assert generate(executor, Planner(), [opening(0, PROMPTS[0])])[0] == tokens[7:]


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_same_tokens_alone_chunked_batched_and_resumed(executor: TorchExecutor, sampling: SamplingParams, chunk: int) -> None:
    planner = Planner()
    alone = [generate(executor, planner, [opening(0, p, sampling=sampling)])[0] for p in PROMPTS]
    assert all(len(tokens) == 8 for tokens in alone)
    together = generate(executor, planner, [opening(5 + i, p, sampling=sampling) for i, p in enumerate(PROMPTS)], chunk)
    assert [together[5 + i] for i in range(4)] == alone
    for kept in range(1, 8):
        resumed = generate(executor, planner, [opening(1, PROMPTS[0], alone[0][:kept], sampling=sampling)], chunk)
        assert alone[0][:kept] + resumed[1] == alone[0]


def test_neighbours_with_other_parameters(executor: TorchExecutor) -> None:
    planner = Planner()
    alone = [generate(executor, planner, [opening(0, PROMPTS[0], sampling=s)])[0] for s in KINDS]
    together = generate(executor, planner, [opening(i, PROMPTS[0], sampling=s) for i, s in enumerate(KINDS)])
    assert [together[i] for i in range(4)] == alone
    assert len({tuple(t) for t in alone}) == 4


def test_a_prefix_hit_gives_the_same_tokens(executor: TorchExecutor) -> None:
    planner = Planner()
    plan = planner.plan({0: 7}, [opening(0, PROMPTS[0], sampling=KINDS[3])])
    first = appended(plan, executor.execute(plan))[0]
    for hit in (1, 4, 6, 7):
        again = generate(executor, planner, [opening(1, PROMPTS[0], slots=planner.held[0][:hit], sampling=KINDS[3])])[1]
        assert again[:1] == first


def test_choices_differ_and_repeat(executor: TorchExecutor) -> None:
    planner = Planner()
    openings = [opening(i, PROMPTS[0], sampling=KINDS[1], choice=i) for i in range(4)]
    first, second = generate(executor, planner, openings), generate(executor, planner, openings)
    assert first == second
    assert len({tuple(t) for t in first.values()}) == 4


def test_decode_input_is_what_the_runner_sampled(model: TableModel, executor: TorchExecutor) -> None:
    """Two plans made before either result is known, as the scheduler does."""
    planner = Planner()
    plans = [planner.plan({0: 7}, [opening(0, PROMPTS[0])]), planner.plan({0: 1}), planner.plan({0: 1})]
    tokens = [appended(plan, executor.execute(plan))[0][0] for plan in plans]
    assert model.batches[1].token_ids_T.tolist() == tokens[:1]
    assert model.batches[2].token_ids_T.tolist() == tokens[1:2]


def test_ends_and_no_ops(executor: TorchExecutor) -> None:
    planner = Planner()
    tokens = generate(executor, planner, [opening(0, PROMPTS[0])])[0]
    at = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    plan = planner.plan(
        {0: 7, 1: 7, 2: 7},
        [
            opening(0, PROMPTS[0], eos_ids=(tokens[at],)),
            opening(1, PROMPTS[0], stop_ids=(tokens[at],)),
            opening(2, PROMPTS[0], new=at + 1),
        ],
    )
    ends = []
    counts = {0: 0, 1: 0, 2: 0}
    for _ in range(at + 3):
        result = executor.execute(plan)
        for row, new in appended(plan, result).items():
            counts[row] += len(new)
        ends += [(e.row, e.reason, e.token) for e in result.ends]
        plan = planner.plan({0: 1, 1: 1, 2: 1})
    assert sorted(ends) == [(0, END_EOS, tokens[at]), (1, END_STOP_ID, tokens[at]), (2, END_LENGTH, -1)]
    assert set(counts.values()) == {at + 1}


@pytest.mark.parametrize("sampling", KINDS)
def test_min_new_tokens(executor: TorchExecutor, sampling: SamplingParams) -> None:
    """With every token but one an end, the others are masked until enough are out."""
    ends = tuple(range(1, 97))
    prompt = PROMPTS[0]
    out = generate(
        executor,
        Planner(),
        [opening(0, prompt, sampling=sampling, eos_ids=ends, stop_ids=(500,), min_position=len(prompt) + 4)],
    )[0]
    assert out[:4] == [0] * 4
    assert len(out) >= 5
    assert out[-1] in ends or len(out) == 8


def test_prompt_only(executor: TorchExecutor) -> None:
    planner = Planner()
    plan = planner.plan({0: 7}, [opening(0, PROMPTS[0], new=0)])
    result = executor.execute(plan)
    assert appended(plan, result)[0] == []
    assert [(e.row, e.reason) for e in result.ends] == [(0, END_LENGTH)]


@pytest.mark.parametrize("sampling", KINDS)
def test_nan_logits_end_one_row(model: TableModel, executor: TorchExecutor, sampling: SamplingParams) -> None:
    planner = Planner()
    good = generate(executor, planner, [opening(0, [1, 2], sampling=sampling)])[0]
    model.poison = {77}
    plan = planner.plan({0: 2, 1: 2}, [opening(0, [1, 2], sampling=sampling), opening(1, [1, 77], sampling=sampling)])
    result = executor.execute(plan)
    assert appended(plan, result) == {0: good[:1], 1: []}
    assert [(e.row, e.reason) for e in result.ends] == [(1, END_ERROR)]
    assert result.ends[0].error is not None
    assert result.ends[0].error.status == 500


def test_a_failed_step_changes_no_row(model: TableModel, executor: TorchExecutor) -> None:
    planner = Planner()
    expected = generate(executor, planner, [opening(0, PROMPTS[0], sampling=KINDS[3])])[0]
    plan = planner.plan({0: 7}, [opening(0, PROMPTS[0], sampling=KINDS[3])])
    tokens = appended(plan, executor.execute(plan))[0]
    for step in range(7):
        if step in (0, 3):
            model.fail_next = True
            failed = executor.execute(planner.plan({0: 1, 1: 2}, [opening(1, [3, 4])]))
            assert failed.error is not None
            assert "log" in failed.error.message
            assert (failed.appended, failed.tokens, failed.ends) == (b"", b"", [])
        plan = planner.plan({0: 1, 1: 1})
        new = appended(plan, executor.execute(plan))
        assert new[1] == []  # its opening failed
        tokens += new[0]
    assert tokens == expected


def test_nonsense_fails_the_step_only(executor: TorchExecutor) -> None:
    planner = Planner()
    plan = planner.plan({0: 1}, [opening(0, [1])])
    assert executor.execute(planner.plan({99: 1})).error is not None
    assert executor.execute(plan).error is None


def test_an_empty_plan(model: TableModel, executor: TorchExecutor) -> None:
    result = executor.execute(Planner().plan({}, closes=[0]))
    assert (result.error, result.appended, result.tokens) == (None, b"", b"")
    assert model.batches == []


def test_what_the_model_is_asked(model: TableModel, executor: TorchExecutor) -> None:
    """Logits only where a token is sampled; a page table as wide as the longest row."""
    planner = Planner()
    executor.execute(planner.plan({0: 4, 1: 2}, [opening(0, PROMPTS[0]), opening(1, [9, 8])]))
    batch = model.batches[-1]
    assert batch.logit_tokens_L.tolist() == [5]
    assert batch.page_table_RS.tolist()[0] == [0, 1, 2, 3]
    assert (batch.max_query, batch.max_kv) == (4, 4)
    assert [
        t.dtype for t in (batch.token_ids_T, batch.row_starts, batch.kv_lens_R, batch.page_table_RS, batch.out_slots_T)
    ] == [
        torch.int64,
        torch.int32,
        torch.int32,
        torch.int32,
        torch.int64,
    ]


def test_random_schedules_give_the_same_tokens(model: TableModel, executor: TorchExecutor) -> None:
    """Rows that come, are cut anyhow, retracted in the middle and come back: text never changes."""
    planner, rng = Planner(), np.random.default_rng(0)
    jobs = [(rng.integers(0, 97, rng.integers(1, 12)).tolist(), KINDS[i % 4]) for i in range(12)]
    expected = [generate(executor, planner, [opening(0, p, sampling=s)])[0] for p, s in jobs]
    out: list[list[int]] = [[] for _ in jobs]
    waiting, rows = list(range(len(jobs))), dict[int, int]()
    for _ in range(400):
        opens, closes = [], []
        for row in [r for r in rows if rng.random() < 0.05]:
            closes.append(row)
            waiting.append(rows.pop(row))
        for row in sorted(set(range(5)) - set(rows)):
            if waiting and row not in closes:
                job = waiting.pop(0)
                rows[row] = job
                opens.append(opening(row, jobs[job][0], out[job], sampling=jobs[job][1]))
        plan = planner.plan({r: int(rng.integers(1, 5)) for r in rows if rng.random() < 0.8}, opens, closes)
        result = executor.execute(plan)
        for row, tokens in appended(plan, result).items():
            out[rows[row]] += tokens
        for end in result.ends:
            del rows[end.row]
        if not waiting and not rows:
            break
    assert out == expected
