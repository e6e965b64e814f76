"""What a model's files say about it, before the operator's choices are laid over it.

Both dialects (Hugging Face folders, GGUF headers) are read into a `Description`; `resolve` turns it into a ModelSpec.
A GGUF's description is cached as JSON, so everything here is plain data.
"""

from __future__ import annotations

from typing import Any

import msgspec

from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Architectures that the model runner has code for (Hugging Face class names)."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """One model as its files describe it. Paths are absolute."""

    name: str
    config: ModelConfig
    weight_files: tuple[str, ...]
    weight_format: str
    tokenizer_file: str | None
    chat_template: str | None = None
    bos_token_id: int | None = None
    add_bos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    context_length: int
    sampling_defaults: dict[str, Any] = {}
    tokenizer_problem: str = ""
    """Why there is no tokenizer_file; an error unless --tokenizer-path names one."""


def unsupported(what: str, where: str) -> StartupError:
    """The error for a model that the engine has no code for."""
    return StartupError(f"{where}: {what} is not supported; supported architectures: {', '.join(SUPPORTED)}")


def usable_context(config: ModelConfig) -> int:
    """Positions the model can use once its rope scaling is applied.

    yarn stretches its original context by `factor`. linear and dynamic do so too, unless the file tells the original
    context apart from the stretched one. llama3's max_position_embeddings is the stretched one already.
    """
    scaling, limit = config.rope_scaling, config.max_position_embeddings
    if scaling.kind == "yarn":
        return max(limit, int((scaling.original_context or limit) * scaling.factor))
    if scaling.kind in ("linear", "dynamic") and not scaling.original_context:
        return int(limit * scaling.factor)
    return limit
