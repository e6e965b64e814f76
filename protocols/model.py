"""What a model *is*, resolved once at start-up and then handed to every actor as data.

`engine` finds the files, reads `config.json` or GGUF metadata and writes one `ModelSpec` into the run folder; actors
read it and never look at a hub, a config file's dialect or a chat template's origin again.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How rotary frequencies are stretched beyond the trained context.

    `kind`: none | linear | dynamic (NTK-aware) | llama3 (Llama 3.1) | yarn (Peng 2023). Unused fields are ignored.
    """

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    """Positions the model was trained on; 0: max_position_embeddings."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Shape of a Llama-family decoder. Sizes in elements, not bytes."""

    architecture: str
    """Hugging Face class name, e.g. LlamaForCausalLM; the runner's registry maps it to code."""
    vocab_size: int
    """Rows of the embedding (may exceed the tokenizer's size)."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    rope_interleaved: bool = False
    """True when q/k rows pair (2i, 2i+1) instead of (i, i + d/2): llama GGUF files are stored so."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on q, k, v (Qwen2); Llama's own `attention_bias` also has one on o (`output_bias`)."""
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Tokens a query may look back, itself included; None: all."""
    hidden_act: str = "silu"
    torch_dtype: str = "float32"
    """What the weights were saved in; `--dtype auto` follows it where the device computes it well."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One resolved model: where its files are and everything about it that is not a tensor."""

    name: str
    """Served when no --served-model-name is given; never an absolute path."""
    path: str
    """What --model-path said."""
    config: ModelConfig
    weight_files: tuple[str, ...]
    weight_format: str
    """gguf | safetensors | random (tests: weights drawn from seed 0)."""
    tokenizer_file: str | None
    """Path of tokenizer.json; None: ids in, ids out."""
    chat_template: str | None = None
    """Jinja source; None: chat requests are refused."""
    bos_token_id: int | None = None
    add_bos: bool = False
    """Whether plain prompts get BOS in front (when the tokenizer's own post-processor doesn't do it)."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    context_length: int = 2048
    """Prompt plus output tokens a request may have."""
    sampling_defaults: dict[str, Any] = {}
    """From generation_config.json, in SamplingParams' names; used for fields a request leaves out."""
    weight_version: str = "default"
