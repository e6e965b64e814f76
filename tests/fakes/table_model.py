"""TableModel: a stand-in for a decoder whose logits are a pure function of the tokens in a row's KV.

It keeps, in each KV slot, the token and the position written to it, and reads a row's past through the page table. So a
wrong page table, a slot shared wrongly or a token computed twice changes its logits, as with a real model.
"""

from __future__ import annotations

import numpy as np
import torch

from radixcast.actors.model_runner.batch import ForwardBatch
from radixcast.protocols.internal import Capacity

_MASK = 2**64 - 1


class TableModel:
    """A step.Model whose hidden states are the logits: standard normal times `scale`."""

    def __init__(self, vocab_size: int = 97, num_slots: int = 4096, scale: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self.scale = scale
        self.tokens = np.full(num_slots, -1, np.int64)
        self.positions = np.full(num_slots, -1, np.int64)
        self.batches: list[ForwardBatch] = []
        self.head_sizes: list[int] = []
        self.poison: set[int] = set()
        """Tokens behind which the logits are NaN."""
        self.fail_next = False

    def logits_after(self, tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """What the model says after these tokens."""
        digest = 7
        for token in tokens:
            digest = (digest * 6364136223846793005 + token + 1442695040888963407) & _MASK
        logits = np.random.Generator(np.random.PCG64(digest)).standard_normal(self.vocab_size).astype(np.float32) * self.scale
        return logits * np.float32(np.nan) if tokens[-1] in self.poison else logits

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's tokens to their slots, then answer from what the page tables lead to."""
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("told to fail")
        self.batches.append(batch)
        slots = batch.out_slots_T.numpy()
        self.tokens[slots] = batch.token_ids_T.numpy()
        self.positions[slots] = batch.positions_T.numpy()
        starts = batch.row_starts.numpy()
        row_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        rows = []
        for t in batch.logit_tokens_L.tolist():
            end = int(batch.positions_T[t]) + 1
            path = batch.page_table_RS[row_of[t], :end].numpy()
            assert (self.positions[path] == np.arange(end)).all(), "KV of another position"
            rows.append(self.logits_after(self.tokens[path].tolist()))
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, self.vocab_size)

    def logits(self, hidden_LH: torch.Tensor) -> torch.Tensor:
        """The hidden states are the logits; a copy, because the caller may overwrite it."""
        self.head_sizes.append(len(hidden_LH))
        return hidden_LH.clone()


def capacity(total_tokens: int = 4096, max_running: int = 16, context_length: int = 256) -> Capacity:
    """A small runner."""
    return Capacity(total_tokens=total_tokens, max_running=max_running, context_length=context_length)
