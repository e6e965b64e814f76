"""Sampler: from the logits of rows to their next tokens, with what each row's request asks for.

Shape letters: S sampled positions (one for each row today; several of one row when drafts are verified), V vocabulary,
N positions under a grammar's mask, K tokens gathered from one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixcast.actors.model_runner.constraints import Masks
from radixcast.actors.model_runner.rows import Row
from radixcast.actors.model_runner.tables import BoolArray, IntArray, RowTables
from radixcast.kernels import select
from radixcast.kernels.reference import sampling
from radixcast.kernels.reference.uniform import uniforms

GATHER_WIDTHS = (32, 1024)
"""On a CPU a row that may draw few tokens draws from these alone, in an array of the first of these widths that holds them
(which one must not depend on other rows). Unfiltered and at 49k tokens: 32 rows 0.3 ms instead of 3 to 40."""


@dataclass
class _Occurrences:
    """Which tokens a penalised row has, up to position `counted`."""

    row: Row
    seen_V: torch.Tensor
    """bool: in prompt or output."""
    outputs_V: torch.Tensor
    """float32: how often in the output."""
    counted: int = 0


class Sampler:
    """Draws tokens. Its only memory are the occurrence counts of penalised rows, brought up to date from the tables when
    such a row is sampled; so a step that fails or a row that is opened again needs no care here."""

    def __init__(self, tables: RowTables, device: torch.device) -> None:
        self._tables = tables
        self._device = device
        self._ops = select(device)
        self._occurrences: dict[int, _Occurrences] = {}

    def sample(self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray, masks: Masks | None = None) -> IntArray:
        """Token for position `positions_S[s]` of row `rows_S[s]`, int64 [S]; INVALID_TOKEN where the logits are none.

        logits_SV: float32, may be overwritten. `masks`: of positions whose tokens a grammar limits.
        """
        t = self._tables
        # A mask knows of ends before min_position itself: it must not lose its only token.
        early_S = (positions_S < t.min_position[rows_S]) & ~t.constrained[rows_S]
        if early_S.any() or t.adjusted[rows_S].any():
            logits_SV = self._adjust(logits_SV, rows_S, early_S)
        if masks is None or not len(masks.at_N):
            return self._draw(logits_SV, rows_S, positions_S)
        return self._draw_masked(logits_SV, rows_S, positions_S, masks)

    def _draw(self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray) -> IntArray:
        """Of the tokens that these logits stand for; indices into their columns."""
        t = self._tables
        greedy_S = t.greedy[rows_S]
        if greedy_S.all():
            tokens_S: IntArray = sampling.greedy(logits_SV).cpu().numpy()
            return tokens_S
        parameters = sampling.RowSampling(
            greedy_R=greedy_S,
            filtered_R=t.filtered[rows_S],
            temperature_R=t.temperature[rows_S],
            top_k_R=t.top_k[rows_S],
            top_p_R=t.top_p[rows_S],
            min_p_R=t.min_p[rows_S],
            uniform_R=uniforms(t.seed[rows_S], t.choice[rows_S], positions_S - t.prompt_length[rows_S]),
        )
        drawn_S: IntArray = sampling.sample(logits_SV, parameters).cpu().numpy()
        return drawn_S

    def _draw_masked(self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray, masks: Masks) -> IntArray:
        """Rows with few tokens from these alone, all others with the rest at -inf."""
        tokens_S = np.zeros(len(rows_S), np.int64)
        whole_S = np.ones(len(rows_S), np.bool_)
        width_N = self._widths(rows_S[masks.at_N], masks.counts_N)
        for width in GATHER_WIDTHS:
            which = width_N == width
            if which.any():
                at_N = masks.at_N[which]
                values_NK, ids_NK = self._ops.gather_allowed(logits_SV, *self._places(masks, which), width)
                drawn_N = self._draw(values_NK, rows_S[at_N], positions_S[at_N])
                ids_N = ids_NK.numpy()[np.arange(len(at_N)), drawn_N]
                tokens_S[at_N] = np.where(drawn_N >= 0, ids_N, drawn_N)
                whole_S[at_N] = False
        rest = width_N == 0
        if rest.any():
            self._ops.apply_bitmask_(logits_SV, *self._places(masks, rest))
        if whole_S.all():
            return self._draw(logits_SV, rows_S, positions_S)
        if whole_S.any():
            at = np.flatnonzero(whole_S)
            whole_logits = logits_SV.index_select(0, torch.from_numpy(at).to(self._device))
            tokens_S[at] = self._draw(whole_logits, rows_S[at], positions_S[at])
        return tokens_S

    def _widths(self, rows_N: IntArray, counts_N: IntArray) -> IntArray:
        """Which of GATHER_WIDTHS each row draws from; 0: from all of its logits (argmax is as fast there)."""
        width_N = np.zeros(len(rows_N), np.int64)
        if self._device.type == "cpu":
            for width in reversed(GATHER_WIDTHS):
                width_N[(counts_N <= width) & ~self._tables.greedy[rows_N]] = width
        return width_N

    # -- what changes logits

    def _adjust(self, logits_SV: torch.Tensor, rows_S: IntArray, early_S: BoolArray) -> torch.Tensor:
        """Penalties, bias and the ban on ends before min_position, in this order."""
        rows = [self._tables.row(r) for r in rows_S.tolist()]
        penalised = [s for s, row in enumerate(rows) if row.penalised]
        if penalised:
            logits_SV = self._penalise(logits_SV, penalised, rows_S, rows)
        biased = [s for s, row in enumerate(rows) if len(row.bias_ids)]
        if biased:
            at_N, ids_N = self._pairs(biased, [rows[s].bias_ids for s in biased])
            values_N = torch.from_numpy(np.concatenate([rows[s].bias_values for s in biased])).to(self._device)
            sampling.add_bias(logits_SV, at_N, ids_N, values_N)
        early = np.flatnonzero(early_S).tolist()
        if early:
            sampling.ban_tokens(logits_SV, *self._pairs(early, [rows[s].end_ids for s in early]))
        return logits_SV

    def _penalise(self, logits_SV: torch.Tensor, which: list[int], rows_S: IntArray, rows: list[Row]) -> torch.Tensor:
        counts = [self._count(int(rows_S[s]), rows[s], logits_SV.shape[1]) for s in which]
        params = np.array(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (rows[s].sampling for s in which)],
            np.float32,
        )
        at = torch.tensor(which, device=self._device)
        penalised = sampling.apply_penalties(
            logits_SV[at],
            torch.stack([c.seen_V for c in counts]),
            torch.stack([c.outputs_V for c in counts]),
            *torch.from_numpy(params).to(self._device).unbind(dim=1),
        )
        return logits_SV.index_copy_(0, at, penalised)

    def _count(self, r: int, row: Row, vocab: int) -> _Occurrences:
        """The occurrences of row slot r, brought up to date."""
        known = self._occurrences.get(r)
        if known is None or known.row is not row:
            seen = torch.zeros(vocab, dtype=torch.bool, device=self._device)
            outputs = torch.zeros(vocab, dtype=torch.float32, device=self._device)
            known = self._occurrences[r] = _Occurrences(row, seen, outputs)
        end = int(self._tables.num_tokens[r])
        if known.counted < end:
            ids = torch.from_numpy(self._tables.token_ids[r, known.counted : end].astype(np.int64)).to(self._device)
            known.seen_V[ids] = True
            new_outputs = ids[max(row.prompt_length - known.counted, 0) :]
            known.outputs_V.index_add_(0, new_outputs, torch.ones_like(new_outputs, dtype=torch.float32))
            known.counted = end
        return known

    def _places(self, masks: Masks, which: BoolArray) -> tuple[torch.Tensor, torch.Tensor]:
        at_N, mask_NW = torch.from_numpy(masks.at_N[which]), torch.from_numpy(masks.mask_NW[which])
        return at_N.to(self._device), mask_NW.to(self._device)

    def _pairs(self, which: list[int], ids: list[IntArray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Index pairs (s, id) for the ids of each sampled position in `which`."""
        at = np.repeat(np.array(which, np.int64), [len(i) for i in ids])
        return torch.from_numpy(at).to(self._device), torch.from_numpy(np.concatenate(ids)).to(self._device)
