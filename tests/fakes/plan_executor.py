"""PlanExecutor: a runner without a model, which knows whose KV is in every slot and objects when a row reads another's.

Every KV slot remembers a rolling hash of (namespace, tokens up to and including its position). Before a row computes, its
whole page table is compared with the hashes of its own tokens: a prefix shared wrongly, a slot freed too early or used
twice shows as a difference. The namespace of a row is its `choice` (a StepPlan doesn't tell it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.grammar import GRAMMAR_MISSING
from radixcast.protocols.internal import END_EOS, END_ERROR, END_LENGTH, RowEnd, RowOpen, StepPlan, StepResult

EOS = 0
SPOILT = -2
VOCAB = 50
_MASK = (1 << 62) - 1


def roll(previous: int, token: int) -> int:
    """Hash of a prefix that is one token longer."""
    mixed = ((previous ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return mixed ^ (mixed >> 29)


def sample(prefix_hash: int, seed: int, position: int, *, eos_allowed: bool = True) -> int:
    """The token at `position`: a pure function of the prefix, the seed and the position; EOS about once in 23."""
    value = roll(roll(prefix_hash, seed & 0xFFFF), position)
    token = 1 + value % (VOCAB - 1)
    return EOS if eos_allowed and value % 23 == 0 else token


def expected_output(prompt: list[int], namespace: int, seed: int, max_new: int, min_new: int = 0) -> list[int]:
    """What an unbatched, uncached, never interrupted run of the executor would generate."""
    h = namespace
    for token in prompt:
        h = roll(h, token)
    out: list[int] = []
    while len(out) < max_new:
        out.append(sample(h, seed, len(prompt) + len(out), eos_allowed=len(out) >= min_new))
        if out[-1] == EOS:
            break
        h = roll(h, out[-1])
    return out


@dataclass
class Row:
    """One row of the runner's tables."""

    open: RowOpen
    tokens: list[int]
    hashes: list[int]
    table: list[int]
    computed: int
    ended: bool = False
    lost: bool = False
    """Its grammar was not there when it was opened."""
    told: bool = False
    tainted: bool = False
    """It has read KV that a failed step left behind: its tokens are wrong, and must not count."""


@dataclass
class PlanExecutor:
    """Executes plans strictly in order. `drafts(row, position)` says how many tokens a decode appends, 1 by default.

    A row with a grammar also gets what that forces: `jumps(row, position)` more tokens, whose KV is not there yet. A row
    whose grammar is not among those `prepared` breaks.
    """

    total_tokens: int
    drafts: Callable[[int, int], int] = lambda row, position: 1
    page_size: int = 1
    jumps: Callable[[int, int], int] = lambda row, position: 0
    prepared: set[str] = field(default_factory=set)
    rows: dict[int, Row] = field(default_factory=dict)
    queue: deque[StepPlan] = field(default_factory=deque)
    computed_tokens: int = 0
    """Known tokens computed, all rows and plans together."""
    last_number: int = 0

    def __post_init__(self) -> None:
        self.memory = np.full(self.total_tokens, -1, dtype=np.int64)

    def send(self, plan: StepPlan) -> None:
        """Queue a plan."""
        assert plan.number > self.last_number, "plans must be numbered upwards"
        self.last_number = plan.number
        self.queue.append(plan)

    def step(self, *, fail: bool = False, poisoned: Callable[[RowOpen], bool] | None = None) -> StepResult:
        """Execute the oldest plan; `fail` makes all of it fail, `poisoned` makes it fail when such a row is in it."""
        plan = self.queue.popleft()
        if fail:
            return self._fail(plan)
        for row in unpack_ids(plan.closes).tolist():
            self.rows.pop(row, None)
        for opened in plan.opens:
            self._open(opened)
        rows = unpack_ids(plan.rows).tolist()
        assert len(set(rows)) == len(rows), "a row is in a plan at most once"
        if poisoned is not None and any(poisoned(self.rows[r].open) for r in rows if r in self.rows):
            return self._fail(plan)
        return self._run(plan, rows)

    def _run(self, plan: StepPlan, rows: list[int]) -> StepResult:
        appended: list[int] = []
        tokens: list[int] = []
        ends: list[RowEnd] = []
        forced: list[int] = []
        slots = unpack_ids(plan.slots).tolist()
        at = 0
        counts, slot_counts = unpack_ids(plan.counts).tolist(), unpack_ids(plan.slot_counts).tolist()
        assert len(slots) == sum(slot_counts)
        for number, count, got in zip(rows, counts, slot_counts, strict=True):
            row = self.rows.get(number)
            new_slots, at = slots[at : at + got], at + got
            if row is None or row.ended:
                appended.append(0)
                forced.append(0)
                if row is not None and row.lost:
                    self.memory[new_slots] = SPOILT  # published by the scheduler, and never written
                if row is not None and row.lost and not row.told:
                    row.told = True
                    missing = ErrorInfo("the grammar is gone", status=500, code=GRAMMAR_MISSING)
                    ends.append(RowEnd(row=number, reason=END_ERROR, error=missing))
                continue
            row.table.extend(new_slots)
            out, jumped, end = self._compute(number, row, count)
            assert len(out) <= count
            forced.append(jumped)
            appended.append(len(out))
            tokens.extend(out)
            if end is not None:
                ends.append(end)
        return StepResult(
            number=plan.number,
            appended=pack_ids(appended),
            tokens=pack_ids(tokens),
            ends=ends,
            forced=pack_ids(forced) if any(forced) else b"",
        )

    def _open(self, opened: RowOpen) -> None:
        tokens = unpack_ids(opened.prompt_ids).tolist() + unpack_ids(opened.output_ids).tolist()
        hashes: list[int] = []
        h = opened.choice
        for token in tokens:
            h = roll(h, token)
            hashes.append(h)
        table = unpack_ids(opened.kv_slots).tolist()
        assert len(table) < len(tokens), "at least one token must be computed"
        if opened.logprob_start >= 0:
            assert len(table) <= max(0, opened.logprob_start - 1), "prompt logprobs need the logits before their start"
        lost = bool(opened.grammar) and opened.grammar not in self.prepared
        self.rows[opened.row] = Row(opened, tokens, hashes, table, len(table), ended=lost, lost=lost)

    def _compute(self, number: int, row: Row, count: int) -> tuple[list[int], int, RowEnd | None]:
        """(tokens appended, how many of them were forced, the end)."""
        chunk = min(count, len(row.tokens) - row.computed)
        assert chunk >= 1
        self._check(row, row.computed)
        self._write(row, row.computed, row.computed + chunk)
        self.computed_tokens += chunk
        row.computed += chunk
        if row.computed < len(row.tokens):
            return [], 0, None
        if len(row.tokens) >= row.open.max_position:
            row.ended = True
            return [], 0, RowEnd(row=number, reason=END_LENGTH)
        if row.open.sampling.temperature == 77.0 and len(row.tokens) % 5 == 0:  # a row that breaks
            row.ended = True
            return [], 0, RowEnd(row=number, reason=END_ERROR, error=ErrorInfo("NaN", status=500))
        drafts = max(1, min(count - chunk + 1, self.drafts(number, len(row.tokens))))
        out, end = self._sample(number, row, drafts)
        sampled = len(out)
        if row.open.grammar and end is None:
            wanted = min(count, sampled + self.jumps(number, len(row.tokens)))
            while end is None and len(out) < wanted:
                token, end = self._append(number, row)
                out.append(token)
        return out, len(out) - sampled, end

    def _sample(self, number: int, row: Row, wanted: int) -> tuple[list[int], RowEnd | None]:
        out: list[int] = []
        end = None
        while end is None and len(out) < wanted:
            if out:  # accepted draft: the KV of the token before it is there
                self._write(row, row.computed, row.computed + 1)
                row.computed += 1
            token, end = self._append(number, row)
            out.append(token)
        return out, end

    def _append(self, number: int, row: Row) -> tuple[int, RowEnd | None]:
        """The row's next token, and whether it is the last."""
        position = len(row.tokens)
        allowed = position >= row.open.min_position and EOS in row.open.eos_ids
        token = sample(row.hashes[-1] ^ row.tainted, row.open.sampling.seed or 0, position, eos_allowed=allowed)
        row.tokens.append(token)
        row.hashes.append(roll(row.hashes[-1], token))
        if token == EOS and allowed:
            row.ended = True
            return token, RowEnd(row=number, reason=END_EOS, token=EOS)
        if len(row.tokens) >= row.open.max_position:
            row.ended = True
            return token, RowEnd(row=number, reason=END_LENGTH)
        return token, None

    def _check(self, row: Row, upto: int) -> None:
        have = self.memory[np.array(row.table[:upto], dtype=np.int64)]
        spoilt = have == SPOILT
        row.tainted |= bool(spoilt.any())
        own = have == np.array(row.hashes[:upto], dtype=np.int64)
        assert (own | spoilt).all(), "a row reads KV that is not its own prefix's"

    def _write(self, row: Row, start: int, stop: int) -> None:
        assert stop <= len(row.table), "the page table is too short"
        for position in range(start, stop):
            slot = row.table[position]
            assert slot % self.page_size == position % self.page_size, "slots are not page-aligned"
            self.memory[slot] = SPOILT if row.tainted else row.hashes[position]

    def _fail(self, plan: StepPlan) -> StepResult:
        """A failed step: what it would have written is garbage, and its rows do nothing until they are opened again."""
        self.memory[unpack_ids(plan.slots)] = SPOILT
        opened = {o.row for o in plan.opens}
        for row in unpack_ids(plan.rows).tolist():
            if row in self.rows:
                self.rows[row].ended = True
                if row in opened:  # what is there may still be the row's last tenant
                    continue
                for slot in self.rows[row].table[self.rows[row].computed :]:
                    self.memory[slot] = SPOILT
        return StepResult(number=plan.number, appended=b"", tokens=b"", ends=[], error=ErrorInfo("boom", status=500))
