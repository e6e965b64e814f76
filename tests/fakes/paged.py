"""Rows over a paged KV pool with shuffled slots: what a scheduler would hand to a model, without one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixcast.actors.model_runner.batch import ForwardBatch
from radixcast.actors.model_runner.kv_pool import KVPool
from radixcast.actors.model_runner.models.base import DecoderModel
from radixcast.protocols.model import ModelConfig


class PagedRow:
    """One sequence: its tokens, how many have KV, and its slots."""

    def __init__(self, ids: Sequence[int], slots: torch.Tensor) -> None:
        self.ids = list(ids)
        self.computed = 0
        self.slots = slots


class PagedModel:
    """A model with a pool, whose slots it deals out in random order. Fills the pool with NaN, so that a stray read shows."""

    def __init__(self, model: DecoderModel, config: ModelConfig, num_slots: int, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.pool = KVPool(config, num_slots, dtype, torch.device("cpu"))
        for tensor in (*self.pool.k, *self.pool.v):
            tensor.fill_(float("nan"))
        self._free = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1))

    def row(self, ids: Sequence[int], length: int) -> PagedRow:
        """A row with slots for `length` tokens."""
        slots, self._free = self._free[:length], self._free[length:]
        assert len(slots) == length, "the pool is too small for this test"
        return PagedRow(ids, slots)

    def step(self, rows: Sequence[PagedRow], counts: Sequence[int], every: bool = False) -> torch.Tensor:
        """Compute counts[r] more tokens of each row -> logits of each row's last token, or of every token."""
        batch = forward_batch(rows, counts, every)
        for row, count in zip(rows, counts, strict=True):
            row.computed += count
        return self.model.forward(batch, self.pool)

    def prompt(self, ids: Sequence[int], chunk: int = 1 << 30) -> torch.Tensor:
        """Logits of every token of a prompt, computed `chunk` tokens at a time."""
        row = self.row(ids, len(ids))
        parts = []
        while row.computed < len(ids):
            parts.append(self.step([row], [min(chunk, len(ids) - row.computed)], every=True))
        return torch.cat(parts)

    def greedy(self, prompts: Sequence[Sequence[int]], eos: int, limits: Sequence[int]) -> list[list[int]]:
        """Greedy outputs (EOS included) of all prompts, in one ragged batch that shrinks as rows end."""
        rows = [self.row(ids, len(ids) + limit) for ids, limit in zip(prompts, limits, strict=True)]
        live = list(range(len(rows)))
        while live:
            stepped = [rows[i] for i in live]
            best = self.step(stepped, [len(row.ids) - row.computed for row in stepped]).argmax(-1).tolist()
            for index, token in zip(list(live), best, strict=True):
                rows[index].ids.append(token)
                if token == eos or len(rows[index].ids) == len(prompts[index]) + limits[index]:
                    live.remove(index)
        return [row.ids[len(ids) :] for row, ids in zip(rows, prompts, strict=True)]


def forward_batch(rows: Sequence[PagedRow], counts: Sequence[int], every: bool = False) -> ForwardBatch:
    """The next counts[r] tokens of each row. Page-table entries beyond a row's length are wild, as they are in real life."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    lens = [row.computed + count for row, count in zip(rows, counts, strict=True)]
    table = torch.full((len(rows), max(lens)), 2**31 - 1, dtype=torch.int32)
    ids: list[int] = []
    positions: list[int] = []
    slots = []
    for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
        table[index, :length] = row.slots[:length]
        ids += row.ids[row.computed : length]
        positions += range(row.computed, length)
        slots.append(row.slots[row.computed : length])
    return ForwardBatch(
        token_ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens_R=torch.tensor(lens, dtype=torch.int32),
        page_table_RS=table,
        out_slots_T=torch.cat(slots),
        logit_tokens_L=torch.arange(len(ids)) if every else torch.tensor(starts[1:]) - 1,
        max_query=max(counts),
        max_kv=max(lens),
    )
