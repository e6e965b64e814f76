"""Tiny random models of transformers, saved where ours can load them, and the ModelSpec that describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from radixcast.protocols.model import ModelConfig, ModelSpec, RopeScaling

_CLASSES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
}
_ROPE_KEYS = {
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """A model of some 30 000 weights: 3 layers, 4 heads on 2 key/value heads."""
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "attention_bias": architecture == "Qwen2ForCausalLM",
    }
    return ModelConfig(architecture=architecture, **{**values, **changes})


def tiny_spec(config: ModelConfig, files: tuple[str, ...] = (), weight_format: str = "random") -> ModelSpec:
    """A spec without a tokenizer."""
    return ModelSpec(
        name="tiny", path="tiny", config=config, weight_files=files, weight_format=weight_format, tokenizer_file=None
    )


def build_hf(config: ModelConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """transformers' own model of this shape, random weights large enough that attention matters."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {}
    if config.architecture == "LlamaForCausalLM":
        options = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    if config.architecture == "MistralForCausalLM":
        options = {"sliding_window": config.sliding_window}
    if config.architecture == "Qwen2ForCausalLM" and config.sliding_window is not None:
        options = {"sliding_window": config.sliding_window, "use_sliding_window": True, "max_window_layers": 0}
    hf_config = _CLASSES[config.architecture](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=_rope_parameters(config),
        tie_word_embeddings=config.tie_word_embeddings,
        attn_implementation="eager",
        **options,
    )
    model: transformers.PreTrainedModel = getattr(transformers, config.architecture)(hf_config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def save_hf(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> tuple[str, ...]:
    """Save as safetensors; the files, sorted."""
    model.save_pretrained(folder, **options)
    return tuple(sorted(map(str, folder.glob("*.safetensors"))))


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    scaling: RopeScaling = config.rope_scaling
    if scaling.kind == "none":
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    values = {theirs: getattr(scaling, ours) for ours, theirs in _ROPE_KEYS.items()}
    if not scaling.original_context:
        values["original_max_position_embeddings"] = config.max_position_embeddings
    kept = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": scaling.kind, "rope_theta": config.rope_theta, **kept}
