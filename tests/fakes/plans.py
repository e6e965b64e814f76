"""Planner: the least that a scheduler must do, for tests of the runner. It hands out slots one after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixcast.protocols.buffers import EMPTY, pack_ids, unpack_ids
from radixcast.protocols.internal import RowOpen, StepPlan, StepResult
from radixcast.protocols.sampling import SamplingParams


def opening(
    row: int,
    prompt: list[int],
    output: list[int] | None = None,
    *,
    slots: list[int] | None = None,
    sampling: SamplingParams | None = None,
    new: int = 8,
    **fields: Any,
) -> RowOpen:
    """A RowOpen with lists instead of buffers; `new` is max_new_tokens."""
    sampling = sampling or SamplingParams(temperature=0, max_new_tokens=new)
    values: dict[str, Any] = {
        "choice": 0,
        "eos_ids": (),
        "stop_ids": (),
        "max_position": len(prompt) + new,
        "min_position": len(prompt) + sampling.min_new_tokens,
    }
    return RowOpen(
        row=row,
        prompt_ids=pack_ids(prompt),
        output_ids=pack_ids(output or []),
        kv_slots=pack_ids(slots or []),
        sampling=sampling,
        **(values | fields),
    )


@dataclass
class Planner:
    """Builds plans with fresh slots for every token."""

    number: int = 0
    next_slot: int = 0
    held: dict[int, list[int]] = field(default_factory=dict)

    def plan(self, rows: dict[int, int], opens: list[RowOpen] | None = None, closes: list[int] | None = None) -> StepPlan:
        """`rows`: row -> count; each gets as many slots."""
        self.number += 1
        for o in opens or []:
            self.held[o.row] = unpack_ids(o.kv_slots).tolist()
        slots: list[int] = []
        for row, count in rows.items():
            new = list(range(self.next_slot, self.next_slot + count))
            self.next_slot += count
            self.held.setdefault(row, []).extend(new)
            slots += new
        counts = list(rows.values())
        return StepPlan(
            number=self.number,
            opens=opens or [],
            rows=pack_ids(list(rows)),
            counts=pack_ids(counts),
            slot_counts=pack_ids(counts),
            slots=pack_ids(slots),
            closes=pack_ids(closes) if closes else EMPTY,
        )


def appended(plan: StepPlan, result: StepResult) -> dict[int, list[int]]:
    """Row -> tokens that it appended."""
    tokens, at, out = unpack_ids(result.tokens).tolist(), 0, {}
    for row, count in zip(unpack_ids(plan.rows).tolist(), unpack_ids(result.appended).tolist(), strict=True):
        out[row] = tokens[at : at + count]
        at += count
    assert at == len(tokens)
    return out


def generate(
    executor: Any, planner: Planner, openings: list[RowOpen], chunk: int = 1000, steps: int = 200
) -> dict[int, list[int]]:
    """Open these rows and run them to their ends, prompts in chunks. Row -> output tokens of this life."""
    out: dict[int, list[int]] = {o.row: [] for o in openings}
    todo = {o.row: (len(o.prompt_ids) + len(o.output_ids) - len(o.kv_slots)) // 4 for o in openings}
    opens: list[RowOpen] = openings
    for _ in range(steps):
        rows = {row: min(chunk, max(missing, 1)) for row, missing in todo.items()}
        plan = planner.plan(rows, opens)
        opens = []
        result = executor.execute(plan)
        assert result.error is None
        for row, tokens in appended(plan, result).items():
            out[row] += tokens
            todo[row] -= rows[row]
        for end in result.ends:
            del todo[end.row]
        if not todo:
            executor.execute(planner.plan({}, closes=list(out)))
            return out
    raise AssertionError(f"rows {sorted(todo)} did not end in {steps} steps")


def floats(data: bytes) -> list[float]:
    """float32 buffer -> list."""
    return np.frombuffer(data, "<f4").tolist()  # type: ignore[no-any-return]
