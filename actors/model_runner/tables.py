"""RowTables: the runner's rows, one for each running request, and the rules that a StepPlan follows on them.

    token_ids   |  prompt  |  output  |                    num_tokens known
    page_table  |  KV slot of every position  |            num_slots given, num_computed of them written

A step lays out the tokens whose KV is missing (`lay_out`), and when they are computed takes over what was sampled
(`commit`), or takes everything back (`undo`). Knows nothing of tensors or models; plain numpy, no Python per token.

Shape letters: P rows of the plan, R rows that compute something, T their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixcast.actors.model_runner.rows import Row, make_row
from radixcast.protocols.buffers import unpack_ids
from radixcast.protocols.errors import InternalError, ProtocolError, RequestError
from radixcast.protocols.internal import END_ERROR, END_GRAMMAR, END_LENGTH, RowEnd, RowOpen, StepPlan

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

INVALID_TOKEN = -1
"""Offered to `commit` for a row whose logits were no distribution."""

_INVALID_LOGITS = InternalError("The model produced invalid numbers (NaN or infinity) for this request.").info
_NO_ENDS: Mapping[int, RowEnd] = {}
_NO_SLOTS = InternalError("This request was planned without room in the KV cache.").info


@dataclass(frozen=True)
class StepLayout:
    """One step as arrays. A row computes positions start … start + count - 1."""

    plan_rows: int
    """P."""
    index_R: IntArray
    """Place of each row in the plan."""
    rows_R: IntArray
    most_R: IntArray
    """What the plan says of each row: most tokens to compute, and most to append."""
    counts_R: IntArray
    """>= 1."""
    starts_R: IntArray
    row_starts: IntArray
    """int64 [R + 1]: row r's tokens are row_starts[r] … row_starts[r + 1] - 1 of T."""
    token_ids_T: IntArray
    positions_T: IntArray
    out_slots_T: IntArray
    samples_R: BoolArray
    """The row's last known token is computed and it may append another."""
    ends: list[RowEnd] = field(default_factory=list)
    """Rows that ended before anything was computed."""

    @property
    def kv_lens_R(self) -> IntArray:
        """Tokens with KV after the step."""
        return self.starts_R + self.counts_R


@dataclass
class _Undo:
    """What `lay_out` did to the tables, so that a failed step leaves no trace."""

    opened: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_slots: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


class RowTables:
    """Fixed arrays for `max_running` rows; memory of rows and positions never used is never touched (zero pages)."""

    def __init__(self, *, max_running: int, context_length: int, total_tokens: int, vocab_size: int, spare: int = 64) -> None:
        """`spare`: KV slots that a row may hold beyond the context (those given for steps after its end)."""
        self.max_running = max_running
        self.context_length = context_length
        self.total_tokens = total_tokens
        self.vocab_size = vocab_size
        width = context_length + spare
        self.token_ids = np.zeros((max_running, width), np.int32)
        self.page_table = np.zeros((max_running, width), np.int32)
        self.num_tokens = np.zeros(max_running, np.int64)
        self.num_computed = np.zeros(max_running, np.int64)
        self.num_slots = np.zeros(max_running, np.int64)
        self.prompt_length = np.zeros(max_running, np.int64)
        self.min_position = np.zeros(max_running, np.int64)
        self.max_position = np.zeros(max_running, np.int64)
        self.next_logprob = np.zeros(max_running, np.int64)
        """Next prompt position to report; prompt_length when none is wanted."""
        self.alive = np.zeros(max_running, np.bool_)
        """Open and not ended."""
        self.temperature = np.ones(max_running, np.float32)
        self.top_k = np.zeros(max_running, np.int64)
        self.top_p = np.ones(max_running, np.float64)
        self.min_p = np.zeros(max_running, np.float64)
        self.seed = np.zeros(max_running, np.uint64)
        self.choice = np.zeros(max_running, np.int64)
        self.greedy = np.zeros(max_running, np.bool_)
        self.filtered = np.zeros(max_running, np.bool_)
        """Any of top_k, top_p, min_p is set."""
        self.adjusted = np.zeros(max_running, np.bool_)
        """Logits change before masks and the draw (penalties, bias)."""
        self.constrained = np.zeros(max_running, np.bool_)
        """The output must match a grammar."""
        self.wants_logprobs = np.zeros(max_running, np.bool_)
        self.rows: list[Row | None] = [None] * max_running
        self.on_open: Callable[[int, Row], None] | None = None
        """Called with each row that is opened; a RequestError that it raises ends the row."""
        self._undo = _Undo()

    # -- one step

    def lay_out(self, plan: StepPlan) -> StepLayout:
        """Do the plan's closes, opens and new slots, and lay out what it computes.

        Raises ProtocolError when the plan makes no sense; call `undo` then, and whenever the step fails later.
        """
        self._undo = _Undo()
        rows_P, counts_P, slot_counts_P, slots = (
            unpack_ids(b).astype(np.int64) for b in (plan.rows, plan.counts, plan.slot_counts, plan.slots)
        )
        closes = unpack_ids(plan.closes)
        self._check_plan(rows_P, counts_P, slot_counts_P, slots, closes)
        self.alive[closes] = False
        for row in closes.tolist():
            self.rows[row] = None
        ends = [end for opening in plan.opens if (end := self._open(opening))]
        self._give_slots(rows_P, slot_counts_P, slots)

        start_P, known_P = self.num_computed[rows_P], self.num_tokens[rows_P]
        wanted_P = np.where(self.alive[rows_P], np.minimum(counts_P, known_P - start_P), 0)
        count_P = np.minimum(wanted_P, self.num_slots[rows_P] - start_P)
        starved_P = (wanted_P > 0) & (count_P <= 0)
        for row in rows_P[starved_P].tolist():
            ends.append(RowEnd(row=row, reason=END_ERROR, error=_NO_SLOTS))
            self.alive[row] = False
            self._undo.ended.append(row)
        index_R = np.flatnonzero(count_P > 0)
        return self._layout(counts_P, index_R, rows_P[index_R], count_P[index_R], ends)

    def _layout(
        self, counts_P: IntArray, index_R: IntArray, rows_R: IntArray, counts_R: IntArray, ends: list[RowEnd]
    ) -> StepLayout:
        starts_R = self.num_computed[rows_R]
        row_starts = np.zeros(len(rows_R) + 1, np.int64)
        np.cumsum(counts_R, out=row_starts[1:])
        if row_starts[-1] == len(rows_R):  # decodes only
            rows_T, positions_T = rows_R, starts_R
        else:
            rows_T = np.repeat(rows_R, counts_R)
            positions_T = np.arange(row_starts[-1]) + np.repeat(starts_R - row_starts[:-1], counts_R)
        known_R = self.num_tokens[rows_R]
        return StepLayout(
            plan_rows=len(counts_P),
            index_R=index_R,
            rows_R=rows_R,
            most_R=counts_P[index_R],
            counts_R=counts_R,
            starts_R=starts_R,
            row_starts=row_starts,
            token_ids_T=self.token_ids[rows_T, positions_T].astype(np.int64),
            positions_T=positions_T,
            out_slots_T=self.page_table[rows_T, positions_T].astype(np.int64),
            samples_R=(starts_R + counts_R == known_R) & (known_R < self.max_position[rows_R]),
            ends=ends,
        )

    def commit(
        self, step: StepLayout, offered_R: IntArray, tokens: IntArray, behind: Mapping[int, RowEnd] = _NO_ENDS
    ) -> tuple[IntArray, IntArray, list[RowEnd]]:
        """Append the offered tokens (row after row), each row up to its end.

        `behind`: how rows end behind all that is offered to them, unless something ends them earlier (END_GRAMMAR wins over
        the length at the same token). Returns how many each row took (int64 [R]), those tokens, and the rows that ended.
        """
        rows_R = step.rows_R
        taken_R, ends = self._find_ends(step, offered_R, tokens, behind)
        if (taken_R != offered_R).any():
            within = np.arange(len(tokens)) - np.repeat(np.cumsum(offered_R) - offered_R, offered_R)
            tokens = tokens[within < np.repeat(taken_R, offered_R)]
        self._undo = _Undo()
        self.num_computed[rows_R] += step.counts_R
        reported_R = np.minimum(step.kv_lens_R + 1, self.prompt_length[rows_R])
        self.next_logprob[rows_R] = np.maximum(self.next_logprob[rows_R], reported_R)
        if len(tokens):
            first_R = self.num_tokens[rows_R]
            at = np.arange(len(tokens)) + np.repeat(first_R - (np.cumsum(taken_R) - taken_R), taken_R)
            self.token_ids[np.repeat(rows_R, taken_R), at] = tokens
            self.num_tokens[rows_R] = first_R + taken_R
        self.alive[[end.row for end in ends]] = False
        return taken_R, tokens, ends

    def _find_ends(
        self, step: StepLayout, offered_R: IntArray, tokens: IntArray, behind: Mapping[int, RowEnd]
    ) -> tuple[IntArray, list[RowEnd]]:
        taken = offered_R.copy()
        ends: list[RowEnd] = []
        known_R = self.num_tokens[step.rows_R]
        rows, room = step.rows_R.tolist(), (self.max_position[step.rows_R] - known_R).tolist()
        # A row that may append nothing (max_new_tokens = 0) ends when all that it has is computed.
        full = ((step.kv_lens_R == known_R) & ~step.samples_R).tolist()
        values, at = tokens.tolist(), 0
        for r, count in enumerate(offered_R.tolist()):
            end = RowEnd(row=rows[r], reason=END_LENGTH) if full[r] else None
            last = behind.get(rows[r])
            for used, token in enumerate(values[at : at + count]):
                end, kept = self._end_at(rows[r], token, room[r] - used)
                if end:
                    taken[r] = used + kept
                    if end.reason == END_LENGTH and used + 1 == count and last and last.reason == END_GRAMMAR:
                        end = last
                    break
            end = end or last
            at += count
            if end:
                ends.append(end)
        return taken, ends

    def _end_at(self, row: int, token: int, room: int) -> tuple[RowEnd | None, int]:
        """Whether a row with `room` positions left ends with this token, and whether the token counts (1 or 0)."""
        if token == INVALID_TOKEN:
            return RowEnd(row=row, reason=END_ERROR, error=_INVALID_LOGITS), 0
        reason = self.row(row).end_reasons.get(token)
        if reason:
            return RowEnd(row=row, reason=reason, token=token), 1
        return (RowEnd(row=row, reason=END_LENGTH), 1) if room <= 1 else (None, 1)

    def row(self, row: int) -> Row:
        """The open row in this slot. Raises ProtocolError when there is none."""
        opened = self.rows[row]
        if opened is None:
            raise ProtocolError(f"row {row} is not open")
        return opened

    def undo(self) -> None:
        """Take back what the last `lay_out` did. Rows it opened are closed; rows it closed stay closed."""
        undo, self._undo = self._undo, _Undo()
        self.num_slots[undo.rows] = undo.num_slots
        self.alive[undo.ended] = True
        self.alive[undo.opened] = False
        for row in undo.opened:
            self.rows[row] = None

    def reset(self) -> None:
        """Forget all rows."""
        self.alive[:] = False
        self.rows = [None] * self.max_running
        self._undo = _Undo()

    # -- parts

    def _check_plan(
        self, rows_P: IntArray, counts_P: IntArray, slot_counts_P: IntArray, slots: IntArray, closes: npt.NDArray[np.int32]
    ) -> None:
        if not len(rows_P) == len(counts_P) == len(slot_counts_P):
            raise ProtocolError(f"plan with {len(rows_P)} rows, {len(counts_P)} counts, {len(slot_counts_P)} slot counts")
        if (slot_counts_P < 0).any() or slot_counts_P.sum() != len(slots):
            raise ProtocolError(f"plan with {len(slots)} slots for {slot_counts_P.sum()}")
        for what, ids, limit in (("row", rows_P, self.max_running), ("row to close", closes, self.max_running)):
            if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
                raise ProtocolError(f"{what} out of range [0, {limit})")
        # A slot id beyond the pool would make a kernel write into foreign memory.
        if len(slots) and not (slots.min() >= 0 and slots.max() < self.total_tokens):
            raise ProtocolError(f"KV slot out of range [0, {self.total_tokens})")
        if len(np.unique(rows_P)) != len(rows_P):
            raise ProtocolError("a row appears twice in a plan")

    def _open(self, opening: RowOpen) -> RowEnd | None:
        """Fill one row. A row that can't be served ends at once; the others of the plan go on."""
        if not 0 <= opening.row < self.max_running:
            raise ProtocolError(f"row {opening.row} to open is out of range [0, {self.max_running})")
        self._undo.opened.append(opening.row)
        try:
            row = make_row(
                opening,
                vocab_size=self.vocab_size,
                context_length=self.context_length,
                total_tokens=self.total_tokens,
            )
            if self.on_open is not None:
                self.on_open(opening.row, row)
        except RequestError as error:
            self.alive[opening.row] = False
            return RowEnd(row=opening.row, reason=END_ERROR, error=error.info)
        self._fill(opening.row, row, opening)
        return None

    def _fill(self, r: int, row: Row, opening: RowOpen) -> None:
        known, computed, p = len(row.token_ids), len(row.kv_slots), row.sampling
        self.rows[r] = row
        self.token_ids[r, :known] = row.token_ids
        self.page_table[r, :computed] = row.kv_slots
        self.num_tokens[r] = known
        # The last token is computed in any case: the next one is drawn from its logits.
        self.num_computed[r] = min(computed, known - 1)
        self.num_slots[r] = computed
        self.prompt_length[r] = row.prompt_length
        self.min_position[r] = opening.min_position
        self.max_position[r] = min(opening.max_position, self.context_length)
        self.next_logprob[r] = opening.logprob_start if opening.logprob_start >= 0 else row.prompt_length
        self.temperature[r], self.top_k[r], self.top_p[r], self.min_p[r] = p.temperature, p.top_k, p.top_p, p.min_p
        self.seed[r], self.choice[r] = (p.seed or 0) % 2**64, opening.choice
        self.greedy[r] = p.greedy
        self.filtered[r] = 1 <= p.top_k < self.vocab_size or p.top_p < 1 or p.min_p > 0
        self.adjusted[r], self.constrained[r] = row.adjusted, bool(row.grammar)
        self.wants_logprobs[r] = opening.logprobs
        self.alive[r] = True

    def _give_slots(self, rows_P: IntArray, counts_P: IntArray, slots: IntArray) -> None:
        """Append new KV slots to the page tables of rows that live; an ended row has no use for them."""
        alive_P = self.alive[rows_P]
        if not alive_P.all():
            slots = slots[np.repeat(alive_P, counts_P)]
            counts_P = np.where(alive_P, counts_P, 0)
        if not len(slots):
            return
        before_P = self.num_slots[rows_P]
        if (before_P + counts_P > self.page_table.shape[1]).any():
            raise ProtocolError(f"a row was given more than {self.page_table.shape[1]} KV slots")
        self._undo.rows, self._undo.num_slots = rows_P, before_P
        at = np.arange(len(slots)) + np.repeat(before_P - (np.cumsum(counts_P) - counts_P), counts_P)
        self.page_table[np.repeat(rows_P, counts_P), at] = slots
        self.num_slots[rows_P] = before_P + counts_P
