"""Which logits a step needs, and the logprobs it reports from them.

The logits at position p are the distribution of position p + 1. So a chunk that computes positions a … b-1 reports prompt
positions a+1 … b, the first token of the next chunk included: it is known already.

Shape letters: L positions with logits, R rows, N reported positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixcast.actors.model_runner.tables import IntArray, RowTables, StepLayout
from radixcast.kernels.reference.logprobs import PositionLogprobs, join, logprobs_of
from radixcast.protocols.buffers import pack_floats, pack_ids
from radixcast.protocols.internal import RowLogprobs
from radixcast.protocols.public import Logprobs

SLICE = 128
"""Prompt positions whose logits exist at a time: those of a whole chunk (8192 x 152 000 floats) would be 5 GB."""


@dataclass(frozen=True)
class PromptPart:
    """Prompt positions first … last of one row are reported in this step; logits exist from position `known` - 1 on."""

    row: int
    first: int
    last: int
    known: int
    logits_at: int
    """Index into L of the logits for position `known`."""


@dataclass(frozen=True)
class LogitPlan:
    """Which of the step's tokens get logits, and what each is for."""

    tokens_L: IntArray
    """Indices into T, ascending."""
    sampled_S: IntArray
    """Indices into L of the rows that sample, in the layout's order."""
    prompts: list[PromptPart]


def plan_logits(tables: RowTables, step: StepLayout) -> LogitPlan:
    """Logits for the last token of each row that samples, and for the prompt positions to report."""
    last_S = step.row_starts[1:][step.samples_R] - 1
    reporting_R = np.flatnonzero(tables.next_logprob[step.rows_R] < tables.prompt_length[step.rows_R])
    if not len(reporting_R):
        return LogitPlan(last_S, np.arange(len(last_S)), [])
    parts: list[tuple[int, int, int, int]] = []
    first_token: list[int] = []
    wanted_T = np.zeros(step.row_starts[-1], np.bool_)
    wanted_T[last_S] = True
    for r in reporting_R.tolist():
        row, start, at = int(step.rows_R[r]), int(step.starts_R[r]), int(step.row_starts[r])
        first = int(tables.next_logprob[row])
        last = min(start + int(step.counts_R[r]), int(tables.prompt_length[row]) - 1)
        known = max(first, start + 1)
        if last >= first:
            parts.append((row, first, last, known))
            first_token.append(at + known - 1 - start)
            wanted_T[first_token[-1] : at + last - start] = True
    place_T = np.cumsum(wanted_T) - 1
    prompts = [PromptPart(*part, logits_at=int(place_T[t])) for part, t in zip(parts, first_token, strict=True)]
    return LogitPlan(np.flatnonzero(wanted_T), place_T[last_S], prompts)


def prompt_logprobs(
    tables: RowTables, prompts: list[PromptPart], hidden_LH: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, Logprobs]:
    """Logprobs of prompt positions, by row. NaN where the logits are not there: position 0, and inside a prefix hit.

    `head` turns hidden states into logits; never for more than SLICE positions at once.
    """
    reports: dict[int, Logprobs] = {}
    for part in prompts:
        row = tables.row(part.row)
        ids = tables.token_ids[part.row, part.first : part.last + 1]
        count = max(part.last + 1 - part.known, 0)
        missing = len(ids) - count
        targets = torch.from_numpy(ids[missing:].astype(np.int64)).to(hidden_LH.device)
        asked = torch.from_numpy(row.asked_ids).to(hidden_LH.device)
        hidden = hidden_LH[part.logits_at : part.logits_at + count]
        found = [
            logprobs_of(head(hidden[at : at + SLICE]), targets[at : at + SLICE], row.top_logprobs, asked)
            for at in range(0, count, SLICE)
        ]
        joined = join(found, row.top_logprobs, len(row.asked_ids))
        reports[part.row] = _pack(joined, ids, slice(None), row.top_logprobs, range(len(row.asked_ids)), missing)
    return reports


def output_logprobs(tables: RowTables, rows_S: IntArray, logits_SV: torch.Tensor, tokens_S: IntArray) -> dict[int, Logprobs]:
    """Logprobs of sampled tokens, by row. logits_SV are the model's own; positions whose token is invalid are left out."""
    rows = [tables.row(r) for r in rows_S.tolist()]
    asked = np.concatenate([row.asked_ids for row in rows])
    targets_S = torch.from_numpy(np.maximum(tokens_S, 0)).to(logits_SV.device)
    found = logprobs_of(
        logits_SV, targets_S, max(row.top_logprobs for row in rows), torch.from_numpy(asked).to(logits_SV.device)
    )
    reports: dict[int, Logprobs] = {}
    asked_from = 0
    for s, (r, row) in enumerate(zip(rows_S.tolist(), rows, strict=True)):
        columns = range(asked_from, asked_from + len(row.asked_ids))
        asked_from = columns.stop
        if tokens_S[s] >= 0:
            reports[r] = _pack(found, tokens_S[s : s + 1], slice(s, s + 1), row.top_logprobs, columns, 0)
    return reports


def merge(prompts: dict[int, Logprobs], outputs: dict[int, Logprobs]) -> list[RowLogprobs]:
    """One RowLogprobs for each row that has any."""
    rows = list(dict.fromkeys([*prompts, *outputs]))
    return [RowLogprobs(row=r, prompt=prompts.get(r), output=outputs.get(r)) for r in rows]


def _pack(found: PositionLogprobs, ids: npt.NDArray[np.integer], at: slice, top: int, asked: range, missing: int) -> Logprobs:
    """Positions `at` of what was found, behind `missing` positions that have none (NaN, ids 0)."""

    def padded(values: torch.Tensor, fill: float) -> npt.NDArray[np.float32 | np.int64]:
        array = values.numpy()
        gap = np.full((missing, *array.shape[1:]), fill, array.dtype)
        return np.concatenate((gap, array)) if missing else array

    return Logprobs(
        values=pack_floats(padded(found.values_N[at], np.nan)),
        ids=pack_ids(ids),
        top_n=top,
        top_values=pack_floats(padded(found.top_values_NK[at, :top], np.nan)),
        top_ids=pack_ids(padded(found.top_ids_NK[at, :top], 0)),
        asked_values=pack_floats(padded(found.asked_values_NA[at, asked.start : asked.stop], np.nan)),
    )
