"""Rows under a grammar whose language is known exactly: every text is in it, however the work is cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.plans import Planner, appended, floats, opening
from fakes.table_model import TableModel, capacity
from fakes.word_grammar import Grammars, Word, grammar
from radixcast.actors.model_runner import constraint
from radixcast.actors.model_runner.constraints import GrammarOptions
from radixcast.actors.model_runner.executor import TableExecutor
from radixcast.actors.model_runner.free import FreeRunner
from radixcast.actors.model_runner.step import TorchExecutor
from radixcast.protocols.buffers import unpack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.grammar import GRAMMAR_MISSING
from radixcast.protocols.internal import END_EOS, END_ERROR, END_GRAMMAR, END_LENGTH, END_STOP_ID, RowEnd, RowOpen, StepResult
from radixcast.protocols.sampling import SamplingParams

VOCAB, EOS = 97, 96
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=11),
    SamplingParams(temperature=1, seed=12, top_p=0.8, top_k=20, min_p=0.01),
    SamplingParams(temperature=0.8, seed=13, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={5: 3.0, 7: 100.0}),
]
LANGUAGES = st.sets(
    st.lists(st.sampled_from([0, 1, 5, 7, 31, 32, 63, 95]), min_size=1, max_size=12).map(tuple), min_size=1, max_size=6
)


def torch_executor(grammars: Grammars, *, jump: bool = True, model: TableModel | None = None) -> TorchExecutor:
    options = GrammarOptions(grammars, jump, (EOS,))
    return TorchExecutor(model or TableModel(VOCAB), capacity(), vocab_size=VOCAB, device=torch.device("cpu"), grammars=options)


def free_runner(grammars: Grammars, *, jump: bool = True) -> FreeRunner:
    return FreeRunner(capacity(), vocab_size=VOCAB, grammars=GrammarOptions(grammars, jump, (EOS,)))


class Run:
    """Runs rows to their ends, `most` tokens a plan at most, and keeps what came of them."""

    def __init__(self, executor: TableExecutor, openings: list[RowOpen], most: int = 8) -> None:
        self.planner = Planner()
        self.out: dict[int, list[int]] = {o.row: [] for o in openings}
        self.ends: dict[int, RowEnd] = {}
        self.forced: dict[int, int] = dict.fromkeys(self.out, 0)
        self.steps = 0
        self.results: list[StepResult] = []
        opens = openings
        while len(self.ends) < len(openings):
            rows = {r: most for r in self.out if r not in self.ends}
            plan = self.planner.plan(rows, opens)
            opens = []
            result = executor.execute(plan)
            assert result.error is None
            self.take(plan, result)
            assert self.steps < 300

    def take(self, plan: Any, result: StepResult) -> None:
        self.steps += 1
        self.results.append(result)
        new = appended(plan, result)
        for row, tokens in new.items():
            self.out[row] += tokens
        for row, count in zip(new, unpack_ids(result.forced).tolist() if result.forced else [0] * len(new), strict=True):
            assert count <= len(new[row])
            self.forced[row] += count
        self.ends |= {end.row: end for end in result.ends}

    def reasons(self) -> dict[int, int]:
        return {row: end.reason for row, end in self.ends.items()}

    def error(self, row: int) -> ErrorInfo:
        error = self.ends[row].error
        assert error is not None
        return error


def constrained(row: int, key: str = "g", *, new: int = 20, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> RowOpen:
    fields = {"eos_ids": (EOS,)} | fields
    return opening(row, list(prompt), fields.pop("output", None), grammar=key, new=new, **fields)


def text(output: list[int]) -> Word:
    """Without the EOS."""
    return tuple(output[:-1] if output and output[-1] == EOS else output)


@settings(max_examples=60, deadline=None)
@given(LANGUAGES, st.sampled_from(KINDS), st.sampled_from([1, 2, 8]), st.sampled_from([1, 3, 8]), st.booleans())
def test_every_text_is_in_the_language(words: set[Word], sampling: SamplingParams, most: int, other: int, free: bool) -> None:
    """And the same with jump-forward and without, in plans of any size, resumed anywhere."""
    grammars = Grammars(g=grammar(words, eos_ids=(EOS,)))
    make: Any = free_runner if free else torch_executor
    plain = Run(make(grammars, jump=False), [constrained(0, sampling=sampling)], 1)
    assert text(plain.out[0]) in words
    assert plain.reasons()[0] in (END_GRAMMAR, END_EOS)
    assert not plain.forced[0]
    executor = make(grammars)
    for size in (most, other):
        jumped = Run(executor, [constrained(1, sampling=sampling)], size)
        assert jumped.out[1] == plain.out[0]
        assert jumped.reasons()[1] == plain.reasons()[0]
    for kept in range(len(plain.out[0]) - 1):
        resumed = Run(executor, [constrained(2, sampling=sampling, output=plain.out[0][:kept])], most)
        assert plain.out[0][:kept] + resumed.out[2] == plain.out[0]


@settings(max_examples=25, deadline=None)
@given(st.lists(LANGUAGES, min_size=1, max_size=3), st.integers(0, 2**31), st.booleans())
def test_rows_do_not_disturb_each_other(languages: list[set[Word]], seed: int, jump: bool) -> None:
    """Constrained and free rows of one batch, under random plans and retractions: what each would get alone."""
    rng = np.random.default_rng(seed)
    grammars = Grammars({f"g{i}": grammar(words, eos_ids=(EOS,)) for i, words in enumerate(languages)})
    executor = torch_executor(grammars, jump=jump)
    jobs = [("", s) for s in KINDS[1:3]] + [(key, s) for key in grammars for s in KINDS[1:4]]
    alone = [Run(executor, [constrained(0, key, new=9, sampling=s)]).out[0] for key, s in jobs]
    out: list[list[int]] = [[] for _ in jobs]
    waiting, rows, planner = list(range(len(jobs))), dict[int, int](), Planner()
    for _ in range(600):
        opens, closes = [], []
        for row in [r for r in rows if rng.random() < 0.05]:
            closes.append(row)
            waiting.append(rows.pop(row))
        for row in sorted(set(range(4)) - set(rows)):
            if waiting and row not in closes:
                rows[row] = job = waiting.pop(0)
                opens.append(constrained(row, jobs[job][0], new=9, sampling=jobs[job][1], output=out[job]))
        plan = planner.plan({r: int(rng.integers(1, 9)) for r in rows if rng.random() < 0.8}, opens, closes)
        planner.next_slot %= 3000
        result = executor.execute(plan)
        for row, tokens in appended(plan, result).items():
            out[rows[row]] += tokens
        for end in result.ends:
            del rows[end.row]
        if not waiting and not rows:
            break
    assert out == alone


def test_forced_text_needs_no_steps() -> None:
    word = tuple(range(10, 40))
    grammars = Grammars(g=grammar([word], eos_ids=(EOS,)))
    model = TableModel(VOCAB)
    jumped = Run(torch_executor(grammars, model=model), [constrained(0, new=50)], 8)
    assert jumped.out[0] == list(word)
    assert (jumped.steps, jumped.forced[0]) == (4, 30)
    assert model.head_sizes == []  # nothing was ever sampled
    plain = Run(torch_executor(grammars, jump=False, model=model), [constrained(0, new=50)], 8)
    assert (plain.out, plain.steps, plain.forced[0]) == (jumped.out, 30, 0)
    assert model.head_sizes == []  # one token is allowed: no draw either


def test_forced_text_follows_a_sampled_token_in_the_same_step() -> None:
    grammars = Grammars(g=grammar([(1, 10, 11, 12, 13, 14), (2, 20, 21, 22, 23, 24)]))
    run = Run(torch_executor(grammars), [constrained(0)], 4)
    assert run.steps == 2
    assert [unpack_ids(r.appended).tolist() for r in run.results] == [[4], [2]]
    assert [unpack_ids(r.forced).tolist() for r in run.results] == [[3], [2]]


def test_who_asks_for_no_jump_gets_none() -> None:
    grammars = Grammars(g=grammar([range(10, 20)]))
    wants_logprobs = constrained(0, logprobs=True, top_logprobs=3)
    refuses = constrained(1, sampling=SamplingParams(temperature=0, jump_forward=False))
    run = Run(torch_executor(grammars), [wants_logprobs, refuses], 8)
    assert run.out == {0: list(range(10, 20)), 1: list(range(10, 20))}
    assert run.forced == {0: 0, 1: 0}


def test_logprobs_are_the_models_own() -> None:
    model = TableModel(VOCAB)
    grammars = Grammars(g=grammar([(5, 6, 7), (5, 60, 61)], eos_ids=(EOS,)))
    run = Run(torch_executor(grammars, model=model), [constrained(0, logprobs=True, top_logprobs=4)], 8)
    tokens = [1, 2, 3]
    for result, token in zip(run.results, run.out[0], strict=True):
        (report,) = result.logprobs
        assert report.output is not None
        logits = torch.from_numpy(model.logits_after(tokens)).log_softmax(0)
        assert unpack_ids(report.output.ids).tolist() == [token]
        assert math.isclose(floats(report.output.values)[0], float(logits[token]), abs_tol=1e-5)
        assert np.allclose(floats(report.output.top_values), logits.topk(4).values, atol=1e-5)
        tokens.append(token)


def test_a_complete_grammar_may_go_on_or_end() -> None:
    """EOS is one of the tokens that may be drawn where the text is complete, and only there."""
    grammars = Grammars(g=grammar([(5,), (5, 6), (5, 6, 7)], eos_ids=(EOS,)))
    executor = torch_executor(grammars)
    found = set()
    for seed in range(40):
        sampling = SamplingParams(temperature=3, seed=seed)
        run = Run(executor, [constrained(0, sampling=sampling)])
        found.add((tuple(run.out[0]), run.reasons()[0]))
    assert found == {((5, EOS), END_EOS), ((5, 6, EOS), END_EOS), ((5, 6, 7), END_GRAMMAR)}


def test_min_new_tokens_never_takes_the_only_token() -> None:
    grammars = Grammars(
        long=grammar([(5,), (5, 6, 7, 8)], eos_ids=(EOS,)),
        stop=grammar([(5, 9, 7, 8)], eos_ids=(EOS,)),
    )
    sampling = SamplingParams(temperature=1, min_new_tokens=4)
    for seed in range(20):
        sampling = SamplingParams(temperature=3, min_new_tokens=4, seed=seed)
        run = Run(torch_executor(grammars), [constrained(0, "long", sampling=sampling)])
        assert run.out[0] == [5, 6, 7, 8]  # EOS behind 5 is not taken before four tokens are out
    run = Run(torch_executor(grammars), [constrained(0, "stop", sampling=sampling, stop_ids=(9,))])
    assert (run.out[0], run.reasons()[0]) == ([5, 9], END_STOP_ID)


def test_ignore_eos_ends_where_nothing_else_can_follow() -> None:
    grammars = Grammars(g=grammar([(5,), (5, 6), (5, 6, 7)], eos_ids=(EOS,)))
    for seed in range(10):
        sampling = SamplingParams(temperature=3, seed=seed, ignore_eos=True)
        run = Run(torch_executor(grammars), [constrained(0, sampling=sampling, eos_ids=())])
        assert (run.out[0], run.reasons()[0]) == ([5, 6, 7], END_GRAMMAR)


@pytest.mark.parametrize("jump", [True, False])
def test_lengths_and_stops_hold_for_forced_text(jump: bool) -> None:
    grammars = Grammars(g=grammar([range(10, 30)]))
    rows = [
        constrained(0, new=7),
        constrained(1, stop_ids=(14,)),
        constrained(2, new=20),
        constrained(3, new=19),
        constrained(4, new=7, output=[10, 11, 12], max_position=3 + 7),
    ]
    run = Run(torch_executor(grammars, jump=jump), rows, 8)
    assert run.reasons() == {0: END_LENGTH, 1: END_STOP_ID, 2: END_GRAMMAR, 3: END_LENGTH, 4: END_LENGTH}
    assert [len(run.out[r]) for r in range(5)] == [7, 5, 20, 19, 4]


@pytest.mark.parametrize("jump", [True, False])
def test_a_dead_end_ends_its_row_only(jump: bool) -> None:
    grammars = Grammars(
        dead=grammar([(8, 9)], dead=frozenset({(5, 6)})),
        start=grammar([]),
        good=grammar([(5, 6, 7)]),
    )
    bias = SamplingParams(temperature=0, logit_bias={5: 100.0})
    rows = [constrained(0, "dead", sampling=bias), constrained(1, "start"), constrained(2, "good"), constrained(3, "", new=4)]
    run = Run(torch_executor(grammars, jump=jump), rows, 8)
    assert run.reasons() == {0: END_ERROR, 1: END_ERROR, 2: END_GRAMMAR, 3: END_LENGTH}
    assert run.out[0] == [5, 6]
    assert run.out[2] == [5, 6, 7]
    for row in (0, 1):
        assert (run.error(row).code, run.error(row).status) == ("grammar_dead_end", 400)


def test_a_grammar_that_is_not_there() -> None:
    grammars = Grammars(good=grammar([(5, 6, 7)]))
    run = Run(torch_executor(grammars), [constrained(0, "gone"), constrained(1, "good")])
    assert run.out == {0: [], 1: [5, 6, 7]}
    assert run.error(0).code == GRAMMAR_MISSING


def test_output_that_does_not_match() -> None:
    grammars = Grammars(g=grammar([(5, 6, 7)]))
    run = Run(torch_executor(grammars), [constrained(0, output=[5, 9])])
    assert (run.out[0], run.reasons()[0], run.error(0).status) == ([], END_ERROR, 500)


def test_output_that_is_finished_already() -> None:
    grammars = Grammars(g=grammar([(5, 6, 7)]))
    run = Run(torch_executor(grammars), [constrained(0, output=[5, 6, 7])])
    assert (run.out[0], run.reasons()[0]) == ([], END_GRAMMAR)


def test_a_backend_that_panics_ends_its_row_only() -> None:
    grammars = Grammars(bad=grammar([(5, 6, 7), (5, 6, 8)], panics=frozenset({(5, 6)})), good=grammar([(5, 6, 7), (5, 6, 8)]))
    run = Run(torch_executor(grammars), [constrained(0, "bad"), constrained(1, "good")])
    assert run.out[0] == [5, 6]
    assert run.error(0).status == 500
    assert run.reasons()[1] == END_GRAMMAR


def test_a_backend_that_is_slow_ends_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "WINDOW_SECONDS", -1.0)
    grammars = Grammars(g=grammar([(5, 6, 7), (5, 6, 8)]))
    run = Run(torch_executor(grammars), [constrained(0), constrained(1, "", new=3)])
    assert run.reasons() == {0: END_ERROR, 1: END_LENGTH}
    assert run.error(0).code == "grammar_too_slow"


@pytest.mark.parametrize("logprobs", [False, True])
def test_nan_logits_end_one_row(logprobs: bool) -> None:
    model = TableModel(VOCAB)
    model.poison = {77}
    grammars = Grammars(g=grammar([(5, 6), (6, 7), (7, 8)]))
    for sampling in KINDS:
        bad = constrained(0, prompt=(1, 77), sampling=sampling, logprobs=logprobs)
        run = Run(torch_executor(grammars, model=model), [bad, constrained(1, sampling=sampling, logprobs=logprobs)])
        assert (run.out[0], run.reasons()) == ([], {0: END_ERROR, 1: END_GRAMMAR})
        assert run.error(0).status == 500


def test_a_failed_step_leaves_the_matcher_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails behind its sampling, when the matcher has taken in what the row has not."""
    words = [(5, 6, 7, 8, 9), (5, 6, 17, 18, 19), (15, 16, 17)]
    grammars = Grammars(g=grammar(words, eos_ids=(EOS,)))
    sampling = KINDS[1]
    expected = Run(torch_executor(grammars), [constrained(0, sampling=sampling)], 1).out[0]
    executor = torch_executor(grammars, jump=False)
    planner, tokens, opens, ended = Planner(), list[int](), [constrained(0, sampling=sampling)], False
    while not ended:
        plan = planner.plan({0: 4}, opens)
        if not opens:
            with monkeypatch.context() as patch:
                patch.setattr(executor.tables, "commit", lambda *_: 1 / 0)
                assert executor.execute(planner.plan({0: 1})).error is not None
        result = executor.execute(plan)
        opens = []
        assert result.error is None
        tokens += appended(plan, result)[0]
        ended = bool(result.ends)
    assert tokens == expected


def test_matchers_go_with_their_rows() -> None:
    grammars = Grammars(g=grammar([(5, 6, 7), (8, 9)]))
    executor = torch_executor(grammars)
    Run(executor, [constrained(0), constrained(1)])
    assert len(executor.constraints._rows) == 2
    executor.execute(Planner().plan({}, closes=[0]))
    assert list(executor.constraints._rows) == [1]
    executor.reset()
    assert not executor.constraints._rows


def test_rows_without_a_grammar_ask_for_nothing() -> None:
    executor = torch_executor(Grammars(g=grammar([(5, 6, 7)])))
    Run(executor, [constrained(0, "", new=5)])
    assert not executor.constraints._thread._started


def test_a_jump_of_the_first_token_counts_against_the_plan() -> None:
    """No row appends more than its plan allows, whatever is forced."""
    grammars = Grammars(g=grammar([range(10, 40)]))
    executor, planner = torch_executor(grammars), Planner()
    plan = planner.plan({0: 2}, [constrained(0, new=50)])
    assert appended(plan, executor.execute(plan))[0] == []  # the prompt has three tokens
    counts = []
    for most in (1, 5, 2, 8, 1, 1, 8):
        plan = planner.plan({0: most})
        new = appended(plan, executor.execute(plan))[0]
        assert len(new) <= most
        counts.append(len(new))
    assert counts == [1, 5, 0, 8, 0, 0, 8]
