"""What every model offers to the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from radixcast.actors.model_runner.batch import ForwardBatch
from radixcast.actors.model_runner.kv_pool import KVPool
from radixcast.protocols.model import ModelConfig


class DecoderModel(ABC):
    """A decoder, or a range of its layers: embed, run layers, compute logits, each usable on its own by a pipeline stage.

    Knows nothing of requests, sampling or scheduling. Shape letters: T tokens, H hidden size, L logit rows, V vocabulary.
    """

    config: ModelConfig
    layers: range
    """Layers that this model holds; the first stage embeds, the last one has the head."""
    weight_bytes: int
    """Memory that the weights take."""

    @abstractmethod
    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]."""

    @abstractmethod
    def run_layers(self, hidden_TH: torch.Tensor, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """This model's layers, writing the tokens' keys and values into `kv`. May overwrite its input."""

    @abstractmethod
    def logits(self, hidden_LH: torch.Tensor) -> torch.Tensor:
        """Final norm and head -> fp32 [L, V]."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """The whole model: fp32 logits [L, V] of the tokens `batch.logit_tokens_L`."""
        hidden_TH = self.run_layers(self.embed(batch.token_ids_T), batch, kv)
        return self.logits(hidden_TH.index_select(0, batch.logit_tokens_L))
