"""FreeRunner: an executor that costs nothing, for benchmarks and tests of the control plane. Needs no torch.

It follows the same tables and rules as the real one; only the tokens come from a hash instead of a model: a pure function
of (all tokens of the row, seed, choice, output position). So a request gets the same text alone, batched, after a
retraction or a restart, exactly when the control plane has kept its tokens straight.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from radixcast.actors.model_runner.constraints import Allowed, GrammarOptions
from radixcast.actors.model_runner.executor import Outcome, TableExecutor
from radixcast.actors.model_runner.limits import make_capacity
from radixcast.actors.model_runner.rows import Row
from radixcast.actors.model_runner.tables import IntArray, RowTables, StepLayout
from radixcast.protocols.buffers import pack_floats, pack_ids
from radixcast.protocols.internal import Capacity, RowLogprobs
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.public import Logprobs
from radixcast.protocols.server_args import ServerArgs

UInt64Array = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15
"""Odd, so multiplication by it loses nothing modulo 2**64."""


FREE_TOKENS = 1 << 18
"""KV slots of a free runner, unless --max-total-tokens says otherwise."""


def free_capacity(args: ServerArgs, spec: ModelSpec) -> Capacity:
    """What a free runner offers."""
    return make_capacity(args, spec, args.max_total_tokens or FREE_TOKENS)


class FreeRunner(TableExecutor):
    """Deterministic tokens at no cost. `step_seconds` makes a step last that long (asleep)."""

    def __init__(
        self, capacity: Capacity, *, vocab_size: int, step_seconds: float = 0.0, grammars: GrammarOptions | None = None
    ) -> None:
        tables = RowTables(
            max_running=capacity.max_running,
            context_length=capacity.context_length,
            total_tokens=capacity.total_tokens,
            vocab_size=vocab_size,
        )
        super().__init__(tables, capacity, grammars)
        self._step_seconds = step_seconds
        self._hash = np.zeros(capacity.max_running, np.uint64)
        self._hashed = np.zeros(capacity.max_running, np.int64)
        self._hashed_row: list[Row | None] = [None] * capacity.max_running
        self._powers: UInt64Array = np.zeros(0, np.uint64)

    def compute(self, step: StepLayout) -> Outcome:
        """See TableExecutor."""
        wait = self.constraints.begin(step)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        t, rows_S = self.tables, step.rows_R[step.samples_R]
        allowed = wait() if wait else None
        if allowed is not None:
            rows_S = rows_S[allowed.drawn_S]
        self._bring_up_to_date(rows_S)
        position_S = t.num_tokens[rows_S]
        mixed_S = self._hash[rows_S] ^ _mix(t.seed[rows_S] + t.choice[rows_S].astype(np.uint64) * np.uint64(_BASE))
        mixed_S = _mix(mixed_S + (position_S - t.prompt_length[rows_S]).astype(np.uint64))
        tokens_S = (mixed_S % np.uint64(t.vocab_size)).astype(np.int64)
        for s in np.flatnonzero((position_S < t.min_position[rows_S]) & ~t.constrained[rows_S]).tolist():
            while int(tokens_S[s]) in t.row(int(rows_S[s])).end_reasons:
                tokens_S[s] = (tokens_S[s] + 1) % t.vocab_size
        if allowed is not None:
            _obey(allowed, mixed_S, tokens_S)
        return self.offer(step, allowed, tokens_S, self._logprobs(step, rows_S, tokens_S))

    def _bring_up_to_date(self, rows_S: IntArray) -> None:
        """hash = sum of (token + 1) * BASE ** (position + 1), modulo 2**64, over all tokens of the row."""
        t = self.tables
        life = [t.rows[r] for r in rows_S.tolist()]
        for s, r in enumerate(rows_S.tolist()):
            if self._hashed_row[r] is not life[s]:
                self._hash[r], self._hashed[r], self._hashed_row[r] = 0, 0, life[s]
        end_S = t.num_tokens[rows_S]
        if len(end_S) and end_S.max() > len(self._powers):
            self._powers = np.cumprod(np.full(2 * int(end_S.max()), _BASE, np.uint64), dtype=np.uint64)
        behind_S = end_S - self._hashed[rows_S]
        last = end_S - 1
        single_S = behind_S == 1
        rows = rows_S[single_S]
        ids = t.token_ids[rows, last[single_S]].astype(np.uint64) + np.uint64(1)
        self._hash[rows] += ids * self._powers[last[single_S]]
        for r in rows_S[behind_S > 1].tolist():
            part = slice(int(self._hashed[r]), int(t.num_tokens[r]))
            ids = t.token_ids[r, part].astype(np.uint64) + np.uint64(1)
            self._hash[r : r + 1] += (ids * self._powers[part]).sum(dtype=np.uint64)
        self._hashed[rows_S] = end_S

    def _logprobs(self, step: StepLayout, rows_S: IntArray, tokens_S: IntArray) -> list[RowLogprobs]:
        """Made up, but of the right shape at the right positions: the logprob of token t is -(1 + t % 7)."""
        t = self.tables
        prompts: dict[int, Logprobs] = {}
        first_R, prompt_R = t.next_logprob[step.rows_R], t.prompt_length[step.rows_R]
        for r in np.flatnonzero(first_R < prompt_R).tolist():
            row, first = int(step.rows_R[r]), int(first_R[r])
            last = min(int(step.kv_lens_R[r]), int(prompt_R[r]) - 1)
            if last >= first:
                prompts[row] = self._made_up(t.row(row), t.token_ids[row, first : last + 1], missing=first == 0)
        outputs = {
            r: self._made_up(t.row(r), tokens_S[s : s + 1], missing=False)
            for s, r in enumerate(rows_S.tolist())
            if t.wants_logprobs[r]
        }
        rows = dict.fromkeys([*prompts, *outputs])
        return [RowLogprobs(row=r, prompt=prompts.get(r), output=outputs.get(r)) for r in rows]

    def _made_up(self, row: Row, ids: npt.NDArray[np.integer], *, missing: bool) -> Logprobs:
        values = _value(ids)
        top_ids = (ids.astype(np.int64)[:, None] + np.arange(row.top_logprobs)) % self.tables.vocab_size
        top_values = -(1.0 + np.arange(row.top_logprobs, dtype=np.float32)) + np.zeros((len(ids), 1), np.float32)
        asked = np.tile(_value(row.asked_ids), (len(ids), 1))
        if missing:
            values[0] = top_values[:1] = asked[:1] = np.nan
        return Logprobs(
            values=pack_floats(values),
            ids=pack_ids(ids),
            top_n=row.top_logprobs,
            top_values=pack_floats(top_values),
            top_ids=pack_ids(top_ids),
            asked_values=pack_floats(asked),
        )


def _obey(allowed: Allowed, mixed_S: UInt64Array, tokens_S: IntArray) -> None:
    """Replace the tokens of masked rows by allowed ones."""
    for s, mask_W in zip(allowed.masks.at_N.tolist(), allowed.masks.mask_NW, strict=True):
        ids = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        tokens_S[s] = ids[int(mixed_S[s] % np.uint64(len(ids)))]


def _value(ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    return -(1.0 + ids % 7).astype(np.float32)


def _mix(x: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
