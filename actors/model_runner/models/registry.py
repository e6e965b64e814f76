"""From a ModelSpec to a loaded model."""

from __future__ import annotations

import torch

from radixcast.actors.model_runner.models.base import DecoderModel
from radixcast.actors.model_runner.models.llama import LlamaModel
from radixcast.actors.model_runner.weights import Progress, WeightLoader, source_of
from radixcast.kernels import Ops, select
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec

ARCHITECTURES: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
}
"""Hugging Face's class name -> our code."""

QUANTIZATIONS = ("auto", "none")


def load_model(
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "auto",
    progress: Progress | None = None,
    layers: range | None = None,
    ops: Ops | None = None,
) -> DecoderModel:
    """Read a model's weights and compile its kernels; when this returns, the first forward runs at full speed.

    `dtype`: fp32, bf16 or fp16, what weights, activations and KV are computed in. `quantization`: auto and none both compute
    in `dtype` whatever the file holds. `progress` hears fractions from 0 to 1. `layers`: those of this pipeline stage (all).
    `ops`: the op table (that of the device). Raises StartupError for an architecture, a file or a tensor that does not fit.
    """
    model_class = ARCHITECTURES.get(spec.config.architecture)
    if model_class is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise StartupError(f"architecture {spec.config.architecture} is not supported; supported are {known}")
    if quantization not in QUANTIZATIONS:
        raise StartupError(f"--quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization}")
    config = spec.config
    if ops is None:
        ops = select(device)
    with torch.inference_mode():
        loader = WeightLoader(source_of(spec), device=device, dtype=dtype, progress=progress)
        model = model_class(config, loader, ops, layers=layers)
    ops.warm_up(dtype, config.num_heads, config.num_kv_heads, config.head_dim)
    return model
