"""Sampler: from the logits of rows to their next tokens, with what each row's request asks for.

Shape letters: S sampled positions (one for each row today; several of one row when drafts are verified), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixcast.actors.model_runner.rows import Row
from radixcast.actors.model_runner.tables import BoolArray, IntArray, RowTables
from radixcast.kernels.reference import sampling
from radixcast.kernels.reference.uniform import uniforms


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
        self._occurrences: dict[int, _Occurrences] = {}

    def sample(self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray) -> IntArray:
        """Token for position `positions_S[s]` of row `rows_S[s]`, int64 [S]; INVALID_TOKEN where the logits are none.

        logits_SV: float32, may be overwritten.
        """
        t = self._tables
        early_S = positions_S < t.min_position[rows_S]
        if early_S.any() or t.adjusted[rows_S].any():
            logits_SV = self._adjust(logits_SV, rows_S, early_S)
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

    def _pairs(self, which: list[int], ids: list[IntArray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Index pairs (s, id) for the ids of each sampled position in `which`."""
        at = np.repeat(np.array(which, np.int64), [len(i) for i in ids])
        return torch.from_numpy(at).to(self._device), torch.from_numpy(np.concatenate(ids)).to(self._device)
