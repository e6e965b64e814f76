"""The Llama family over paged KV: Llama 2 to 3.2, SmolLM2, Mistral (sliding window), Qwen2 and 2.5 (bias on q, k, v).

    x = embed(ids)
    for each layer:  x += o(attention(rope(qkv(norm(x)))))      x += down(silu(gate(norm(x))) · up(norm(x)))
    logits = head(norm(x))

q, k, v are one product, gate and up another. Sizes come from the weights that are there, not from the config, so that a
rank of a tensor-parallel group can hold its share of heads; a range of layers makes a pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixcast.actors.model_runner.batch import ForwardBatch
from radixcast.actors.model_runner.kv_pool import KVPool
from radixcast.actors.model_runner.models.base import DecoderModel
from radixcast.actors.model_runner.models.rotary import RotaryTable
from radixcast.actors.model_runner.weights import ROPE_FACTORS, WeightLoader
from radixcast.kernels import Ops, PackedLinear, RaggedRows
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one layer."""

    attention_norm_H: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm_H: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        linears = (self.qkv, self.output, self.gate_up, self.down)
        return self.attention_norm_H.nbytes + self.mlp_norm_H.nbytes + sum(linear.nbytes for linear in linears)


class LlamaModel(DecoderModel):
    """A Llama-family decoder, or a range of its layers."""

    def __init__(self, config: ModelConfig, loader: WeightLoader, ops: Ops, *, layers: range | None = None) -> None:
        """Takes all its tensors from `loader`. Raises StartupError when they don't fit the config."""
        if config.hidden_act != "silu":
            raise StartupError(f"activation {config.hidden_act} is not supported by {config.architecture}; silu is")
        self.config = config
        self.layers = range(config.num_layers) if layers is None else layers
        self._ops = ops
        self._scale = config.head_dim**-0.5
        self._embedding_VH: torch.Tensor | None = None
        self._head: PackedLinear | None = None
        self._load(loader)

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes logits."""
        return self.layers.stop == self.config.num_layers

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        assert self._embedding_VH is not None, "only the first stage embeds"
        return self._ops.embedding(token_ids_T, self._embedding_VH)

    def run_layers(self, hidden_TH: torch.Tensor, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        ops, config = self._ops, self.config
        if not len(hidden_TH):
            return hidden_TH
        eps, size = config.rms_norm_eps, config.head_dim
        rows = RaggedRows(batch.row_starts, batch.kv_lens_R, batch.page_table_RS, batch.max_kv)
        plan = ops.plan_attention(rows, config.sliding_window, hidden_TH.dtype)
        cos_TC, sin_TC = self._rotary.rows(batch.positions_T, batch.max_kv - 1)
        tokens = len(hidden_TH)
        residual_TH, pending_TH = hidden_TH, None
        for index, layer in enumerate(self._layers):
            if pending_TH is None:
                normed_TH = ops.rms_norm(residual_TH, layer.attention_norm_H, eps)
            else:
                normed_TH = ops.add_rms_norm_(pending_TH, residual_TH, layer.attention_norm_H, eps)
            k_SKD, v_SKD = kv.k[index], kv.v[index]
            qkv_TAD = ops.linear(normed_TH, layer.qkv).view(tokens, -1, size)
            ops.rope_(qkv_TAD, cos_TC, sin_TC, qkv_TAD.shape[1] - k_SKD.shape[1])
            ops.kv_write(qkv_TAD, k_SKD, v_SKD, batch.out_slots_T)
            mixed_TND = ops.attention(qkv_TAD, k_SKD, v_SKD, plan, self._scale)
            attended_TH = ops.linear(mixed_TND.view(tokens, -1), layer.output)
            normed_TH = ops.add_rms_norm_(attended_TH, residual_TH, layer.mlp_norm_H, eps)
            pending_TH = ops.linear(ops.gated_linear(normed_TH, layer.gate_up), layer.down)
        return residual_TH if pending_TH is None else residual_TH.add_(pending_TH)

    def logits(self, hidden_LH: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "only the last stage has a head"
        normed_LH = self._ops.rms_norm(hidden_LH, self._norm_H, self.config.rms_norm_eps)
        return self._ops.linear(normed_LH, self._head).float()

    # -- loading

    def _load(self, loader: WeightLoader) -> None:
        config = self.config
        vocabulary = (config.vocab_size, config.hidden_size)
        if self.is_first or (self.is_last and config.tie_word_embeddings):
            self._embedding_VH = loader.take("model.embed_tokens.weight", vocabulary)
        self._layers = [self._load_layer(loader, f"model.layers.{index}") for index in self.layers]
        if self.is_last:
            self._norm_H = loader.take("model.norm.weight", (config.hidden_size,))
            self._head = self._load_head(loader, vocabulary)
        factors = loader.take(ROPE_FACTORS, (config.head_dim // 2,), torch.float32) if loader.has(ROPE_FACTORS) else None
        self._rotary = RotaryTable(config, loader.device, factors)
        loader.ignore(r".*rotary_emb\.inv_freq")
        self._ignore_other_stages(loader)
        loader.finish()
        own = 0 if self._embedding_VH is None else self._embedding_VH.nbytes
        head = 0 if self._head is None or config.tie_word_embeddings else self._head.nbytes
        self.weight_bytes = own + head + sum(layer.nbytes for layer in self._layers)

    def _load_head(self, loader: WeightLoader, vocabulary: tuple[int, int]) -> PackedLinear:
        if not self.config.tie_word_embeddings:
            return self._ops.pack_linear(loader.take("lm_head.weight", vocabulary))
        # Some checkpoints of tied models store the shared matrix twice.
        loader.ignore(r"lm_head\.weight")
        assert self._embedding_VH is not None
        return self._ops.pack_linear(self._embedding_VH)

    def _load_layer(self, loader: WeightLoader, prefix: str) -> LlamaLayer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

        def linear(names: dict[str, int], inputs: int, bias: bool) -> PackedLinear:
            weight = loader.fuse([(f"{name}.weight", (rows, inputs)) for name, rows in names.items()])
            extra = loader.fuse([(f"{name}.bias", (rows,)) for name, rows in names.items()]) if bias else None
            return self._ops.pack_linear(weight, extra)

        qkv = {f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}
        return LlamaLayer(
            attention_norm_H=loader.take(f"{prefix}.input_layernorm.weight", (hidden,)),
            qkv=linear(qkv, hidden, config.attention_bias),
            output=linear({f"{attention}.o_proj": hidden}, q, config.output_bias),
            mlp_norm_H=loader.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            gate_up=linear({f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden, config.mlp_bias),
            down=linear({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
        )

    def _ignore_other_stages(self, loader: WeightLoader) -> None:
        """What the other stages of a pipeline hold is no surplus."""
        for index in range(self.config.num_layers):
            if index not in self.layers:
                loader.ignore(rf"model\.layers\.{index}\..*")
        if not self.is_first:
            loader.ignore(r"model\.embed_tokens\.weight")
        if not self.is_last:
            loader.ignore(r"model\.norm\.weight|lm_head\.weight")
