"""The rules of StepPlan on rows, without any model."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.plans import Planner, opening
from radixcast.actors.model_runner.tables import INVALID_TOKEN, RowTables
from radixcast.protocols.buffers import pack_ids
from radixcast.protocols.errors import ProtocolError
from radixcast.protocols.internal import END_EOS, END_ERROR, END_LENGTH, END_STOP_ID, StepPlan
from radixcast.protocols.sampling import SamplingParams


@pytest.fixture
def tables() -> RowTables:
    return RowTables(max_running=4, context_length=32, total_tokens=1000, vocab_size=50, spare=4)


def offer(*tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens offered to each row of a layout."""
    flat = [t for row in tokens for t in row]
    return np.array([len(row) for row in tokens], np.int64), np.array(flat, np.int64)


def test_chunks_then_decode(tables: RowTables) -> None:
    planner = Planner(next_slot=100)
    step = tables.lay_out(planner.plan({2: 3}, [opening(2, [5, 6, 7, 8, 9])]))
    assert step.token_ids_T.tolist() == [5, 6, 7]
    assert step.positions_T.tolist() == [0, 1, 2]
    assert step.out_slots_T.tolist() == [100, 101, 102]
    assert not step.samples_R.any()
    tables.commit(step, *offer([]))
    step = tables.lay_out(planner.plan({2: 9}))  # more than is left
    assert step.token_ids_T.tolist() == [8, 9]
    assert step.out_slots_T.tolist() == [103, 104]
    assert step.samples_R.tolist() == [True]
    taken, tokens, ends = tables.commit(step, *offer([11]))
    assert (taken.tolist(), tokens.tolist(), ends) == ([1], [11], [])
    step = tables.lay_out(planner.plan({2: 1}))
    assert step.token_ids_T.tolist() == [11]
    assert step.positions_T.tolist() == [5]
    assert step.out_slots_T.tolist() == [105]  # slots given before and not used come first
    assert step.kv_lens_R.tolist() == [6]


def test_rows_of_a_mixed_batch_are_ragged(tables: RowTables) -> None:
    planner = Planner()
    step = tables.lay_out(
        planner.plan(
            {3: 2, 0: 1, 1: 4}, [opening(0, [1], [2, 3], slots=[900, 901]), opening(1, [4, 5, 6, 7]), opening(3, [8, 9])]
        )
    )
    assert step.rows_R.tolist() == [3, 0, 1]
    assert step.row_starts.tolist() == [0, 2, 3, 7]
    assert step.token_ids_T.tolist() == [8, 9, 3, 4, 5, 6, 7]
    assert step.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert step.out_slots_T.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert tables.page_table[0, :3].tolist() == [900, 901, 2]


def test_a_hit_on_everything_still_computes_the_last_token(tables: RowTables) -> None:
    step = tables.lay_out(Planner().plan({0: 1}, [opening(0, [1, 2, 3], slots=[7, 8, 9])]))
    assert step.token_ids_T.tolist() == [3]
    assert step.out_slots_T.tolist() == [9]


@pytest.mark.parametrize(
    ("tokens", "taken", "reason", "token"),
    [
        ([3], 1, END_EOS, 3),
        ([4], 1, END_STOP_ID, 4),
        ([9], 1, None, -1),
        ([INVALID_TOKEN], 0, END_ERROR, -1),
        ([9, 9, 9, 9], 3, END_LENGTH, -1),
        ([9, 3, 9], 2, END_EOS, 3),
        ([9, 9, 3], 3, END_EOS, 3),  # the end that says more wins over the length
        ([9, INVALID_TOKEN, 3], 1, END_ERROR, -1),
    ],
)
def test_ends(tables: RowTables, tokens: list[int], taken: int, reason: int | None, token: int) -> None:
    """Several tokens may be offered at once (drafts): what is behind the end is dropped."""
    planner = Planner()
    first, second = opening(0, [1, 2], new=3, eos_ids=(3,), stop_ids=(4,)), opening(1, [1, 2], new=9)
    step = tables.lay_out(planner.plan({0: 2, 1: 2}, [first, second]))
    taken_R, kept, ends = tables.commit(step, *offer(tokens, [7]))
    assert taken_R.tolist() == [taken, 1]
    assert kept.tolist() == [*tokens[:taken], 7]
    assert [(e.row, e.reason, e.token) for e in ends] == ([(0, reason, token)] if reason else [])
    assert tables.num_tokens[:2].tolist() == [2 + taken, 3]
    assert tables.token_ids[0, : 2 + taken].tolist() == [1, 2, *tokens[:taken]]
    later = tables.lay_out(planner.plan({0: 1, 1: 1}))
    assert later.rows_R.tolist() == ([1] if reason else [0, 1])
    assert later.index_R.tolist() == ([1] if reason else [0, 1])


def test_no_new_tokens_ends_when_the_prompt_is_computed(tables: RowTables) -> None:
    planner = Planner()
    step = tables.lay_out(planner.plan({0: 2}, [opening(0, [1, 2, 3], new=0)]))
    assert tables.commit(step, *offer([]))[2] == []
    step = tables.lay_out(planner.plan({0: 2}))
    assert not step.samples_R.any()
    taken, _, ends = tables.commit(step, *offer([]))
    assert taken.tolist() == [0]
    assert [(e.row, e.reason) for e in ends] == [(0, END_LENGTH)]


def test_slots_of_ended_and_unknown_rows_are_ignored(tables: RowTables) -> None:
    planner = Planner()
    step = tables.lay_out(planner.plan({0: 1, 1: 1}, [opening(0, [1], new=1), opening(1, [1])]))
    tables.commit(step, *offer([9], [9]))
    step = tables.lay_out(planner.plan({0: 1, 3: 2, 1: 1}))
    assert step.rows_R.tolist() == [1]
    assert step.out_slots_T.tolist() == [5]
    assert tables.num_slots.tolist() == [1, 2, 0, 0]


def test_close_and_open_in_one_plan(tables: RowTables) -> None:
    planner = Planner()
    tables.commit(tables.lay_out(planner.plan({0: 2}, [opening(0, [1, 2])])), *offer([9]))
    first = tables.row(0)
    step = tables.lay_out(planner.plan({0: 3}, [opening(0, [4, 5, 6])], closes=[0]))
    assert step.token_ids_T.tolist() == [4, 5, 6]
    assert step.out_slots_T.tolist() == [2, 3, 4]
    assert tables.row(0) is not first


def test_undo_leaves_other_rows_as_they_were(tables: RowTables) -> None:
    planner = Planner()
    tables.commit(tables.lay_out(planner.plan({0: 2, 2: 2}, [opening(0, [1, 2]), opening(2, [1, 2])])), *offer([9], [9]))
    before = tables.num_slots.copy(), tables.num_tokens.copy(), tables.num_computed.copy()
    tables.lay_out(planner.plan({0: 1, 1: 2}, [opening(1, [3, 4])], closes=[2]))
    tables.undo()
    assert tables.alive.tolist() == [True, False, False, False]
    assert tables.num_slots[0] == before[0][0]
    assert (tables.num_tokens[0], tables.num_computed[0]) == (3, 2)
    step = tables.lay_out(planner.plan({0: 1, 1: 1}))
    assert step.rows_R.tolist() == [0]
    assert step.out_slots_T.tolist() == [planner.held[0][-1]]


def test_a_row_without_slots_ends_alone(tables: RowTables) -> None:
    planner = Planner()
    plan = planner.plan({0: 2, 1: 2}, [opening(0, [1, 2]), opening(1, [1, 2])])
    plan = StepPlan(
        number=1, opens=plan.opens, rows=plan.rows, counts=plan.counts, slot_counts=pack_ids([0, 2]), slots=pack_ids([5, 6])
    )
    step = tables.lay_out(plan)
    assert [(e.row, e.reason) for e in step.ends] == [(0, END_ERROR)]
    assert step.rows_R.tolist() == [1]
    tables.undo()
    assert not tables.alive.any()


def test_fewer_slots_than_wanted_computes_fewer(tables: RowTables) -> None:
    plan = StepPlan(
        number=1,
        opens=[opening(0, [1, 2, 3])],
        rows=pack_ids([0]),
        counts=pack_ids([3]),
        slot_counts=pack_ids([2]),
        slots=pack_ids([5, 6]),
    )
    assert tables.lay_out(plan).counts_R.tolist() == [2]


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([], {}),
        ([50], {}),
        ([-1], {}),
        ([1] * 33, {}),
        ([1], {"slots": [1, 2]}),
        ([1, 2], {"slots": [1000]}),
        ([1], {"logprob_token_ids": (50,)}),
    ],
)
def test_a_bad_row_ends_alone(tables: RowTables, prompt: list[int], fields: dict[str, object]) -> None:
    bad = opening(0, prompt, **fields)  # type: ignore[arg-type]
    step = tables.lay_out(Planner().plan({0: 1, 1: 1}, [bad, opening(1, [1])]))
    assert [(e.row, e.reason) for e in step.ends] == [(0, END_ERROR)]
    assert step.ends[0].error is not None
    assert step.rows_R.tolist() == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": pack_ids([0, 0])},
        {"rows": pack_ids([0, 4])},
        {"rows": pack_ids([0, -1])},
        {"rows": pack_ids([0])},
        {"slots": pack_ids([1, 2, 3])},
        {"slots": pack_ids([1, 1000])},
        {"slots": pack_ids([1, -1])},
        {"slot_counts": pack_ids([3, -1])},
        {"closes": pack_ids([4])},
        {"opens": [opening(4, [1])]},
        {"opens": [opening(-1, [1])]},
    ],
)
def test_plans_that_make_no_sense(tables: RowTables, change: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "number": 1,
        "opens": [opening(0, [1]), opening(1, [1])],
        "rows": pack_ids([0, 1]),
        "counts": pack_ids([1, 1]),
        "slot_counts": pack_ids([1, 1]),
        "slots": pack_ids([1, 2]),
    }
    with pytest.raises(ProtocolError):
        tables.lay_out(StepPlan(**(fields | change)))  # type: ignore[arg-type]
    tables.undo()
    assert not tables.alive.any()


def test_more_slots_than_a_row_can_hold(tables: RowTables) -> None:
    planner = Planner()
    with pytest.raises(ProtocolError):
        tables.lay_out(planner.plan({0: 37}, [opening(0, [1])]))


def test_parameters_that_choose_the_path(tables: RowTables) -> None:
    kinds = [
        SamplingParams(temperature=1, top_k=50, seed=-1),  # 50 = the whole vocabulary
        SamplingParams(temperature=1, top_k=49),
        SamplingParams(temperature=1, top_k=1),
        SamplingParams(temperature=1, logit_bias={3: 1.0, 77: 1.0}),
    ]
    tables.lay_out(Planner().plan({}, [opening(r, [1], sampling=p) for r, p in enumerate(kinds)]))
    assert tables.filtered[:2].tolist() == [False, True]
    assert tables.greedy.tolist() == [False, False, True, False]
    assert tables.adjusted.tolist() == [False, False, False, True]
    assert tables.row(3).bias_ids.tolist() == [3]
    assert tables.seed[0] == 2**64 - 1


def test_reset(tables: RowTables) -> None:
    planner = Planner()
    tables.lay_out(planner.plan({0: 1}, [opening(0, [1])]))
    tables.reset()
    assert tables.lay_out(planner.plan({0: 1})).rows_R.tolist() == []
    with pytest.raises(ProtocolError):
        tables.row(0)
