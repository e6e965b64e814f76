"""A Hugging Face model folder -> Description: config.json, generation_config.json, weights, tokenizer files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from radixcast.models.description import SUPPORTED, Description, unsupported, usable_context
from radixcast.models.tokenizer_files import TokenizerFiles, read_json, read_tokenizer_files
from radixcast.protocols.errors import InvalidRequest, StartupError
from radixcast.protocols.model import ModelConfig, RopeScaling
from radixcast.protocols.sampling import parse

log = logging.getLogger(__name__)

_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_WEIGHTLESS = ("random", "free")
"""Values of config.json's `radixcast_weights`: tests and benchmarks need no weight files."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are SamplingParams' too, by the same names."""


def describe_folder(folder: Path, *, name: str) -> Description:
    """Describe a local model folder. Raises StartupError naming what is missing, malformed or unsupported."""
    if not (folder / "config.json").is_file():
        _refuse_gguf_folder(folder)
        raise StartupError(f"{folder} has no config.json: a model folder holds config.json, *.safetensors and tokenizer.json")
    document = read_json(folder / "config.json")
    config = read_config(document, str(folder / "config.json"))
    weights = document.get("radixcast_weights")
    files: tuple[str, ...] = ()
    if weights is None:
        files = _weight_files(folder)
        weights = "safetensors"
    elif weights not in _WEIGHTLESS:
        raise StartupError(
            f"{folder / 'config.json'}: radixcast_weights must be one of {', '.join(_WEIGHTLESS)}, got {weights!r}"
        )
    tokenizer = read_tokenizer_files(folder) if (folder / "tokenizer.json").is_file() else None
    problem = ""
    if tokenizer is None and (folder / "tokenizer.model").is_file():
        problem = f"{folder} has tokenizer.model but no tokenizer.json; convert it, or give --tokenizer-path"
    generation = read_json(folder / "generation_config.json")
    bos = _first_id(generation.get("bos_token_id"), document.get("bos_token_id"), tokenizer and tokenizer.bos_token_id)
    return Description(
        name=name,
        config=config,
        weight_files=files,
        weight_format=weights,
        tokenizer_file=tokenizer.tokenizer_file if tokenizer else None,
        chat_template=tokenizer.chat_template if tokenizer else None,
        bos_token_id=bos,
        add_bos=bool(tokenizer and tokenizer.add_bos),
        eos_token_ids=_end_ids(document, generation, tokenizer),
        bos_token=tokenizer.bos_token if tokenizer else "",
        eos_token=tokenizer.eos_token if tokenizer else "",
        pad_token=tokenizer.pad_token if tokenizer else "",
        context_length=usable_context(config),
        sampling_defaults=_sampling_defaults(generation),
        tokenizer_problem=problem,
    )


def read_config(document: dict[str, Any], where: str) -> ModelConfig:
    """config.json -> ModelConfig. `where` names the file in errors (StartupError)."""
    architecture = _architecture(document, where)

    def need(key: str) -> Any:
        value = document.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise StartupError(f"{where}: {key} must be a positive number, got {value!r}")
        return value

    if document.get("quantization_config"):
        method = document["quantization_config"].get("quant_method")
        raise StartupError(
            f"{where}: weights quantised by {method!r} are not supported; use the unquantised model or a .gguf file"
        )
    if document.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise unsupported(f"partial_rotary_factor {document['partial_rotary_factor']}", where)
    heads, hidden = need("num_attention_heads"), need("hidden_size")
    is_qwen = architecture == "Qwen2ForCausalLM"
    bias = bool(document.get("attention_bias", False))
    act = document.get("hidden_act") or "silu"
    if act not in ("silu", "swish"):
        raise unsupported(f"hidden_act {act!r}", where)
    return ModelConfig(
        architecture=architecture,
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=document.get("num_key_value_heads") or heads,
        head_dim=document.get("head_dim") or hidden // heads,
        max_position_embeddings=need("max_position_embeddings"),
        rms_norm_eps=need("rms_norm_eps"),
        rope_theta=float(_rope(document).get("rope_theta") or document.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(document, where),
        tie_word_embeddings=bool(document.get("tie_word_embeddings", False)),
        # Qwen2 always has a bias on q, k, v and never on o; Llama's flag sets both
        attention_bias=is_qwen or bias,
        output_bias=bias and not is_qwen,
        mlp_bias=bool(document.get("mlp_bias", False)),
        sliding_window=_sliding_window(document, architecture),
        hidden_act="silu",
        torch_dtype=_dtype(document),
    )


def _architecture(document: dict[str, Any], where: str) -> str:
    named = document.get("architectures") or []
    if not named:
        kind = document.get("model_type")
        if kind not in _BY_MODEL_TYPE:
            raise unsupported(f"model_type {kind!r}", where)
        return _BY_MODEL_TYPE[kind]
    for name in named:
        if name in SUPPORTED:
            return str(name)
    raise unsupported(f"architecture {named[0]!r}", where)


def _dtype(document: dict[str, Any]) -> str:
    value = str(document.get("dtype") or document.get("torch_dtype") or "float32").removeprefix("torch.")
    return value if value in ("float32", "float16", "bfloat16") else "float32"


def _sliding_window(document: dict[str, Any], architecture: str) -> int | None:
    # Qwen2 ships a window that is switched off; Mistral's is on when it is there
    used = document.get("use_sliding_window", architecture == "MistralForCausalLM")
    window = document.get("sliding_window") if used else None
    if window and architecture == "Qwen2ForCausalLM" and document.get("max_window_layers", 0) > 0:
        # the first max_window_layers look at everything: one window for all layers would be wrong
        if document["max_window_layers"] >= document.get("num_hidden_layers", 0):
            return None
        raise StartupError("Qwen2 with a sliding window on some layers only (max_window_layers) is not supported")
    return int(window) if window else None


def _rope(document: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before); {} when there is neither."""
    value = document.get("rope_parameters") or document.get("rope_scaling") or {}
    return value if isinstance(value, dict) else {}


def _rope_scaling(document: dict[str, Any], where: str) -> RopeScaling:
    rope = _rope(document)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise unsupported(f"rope scaling {kind!r}", where)
    plain = RopeScaling()

    def number(key: str, default: float) -> float:
        value = rope.get(key)
        return float(value) if isinstance(value, int | float) else default

    def optional(key: str) -> float | None:
        value = rope.get(key)
        return float(value) if isinstance(value, int | float) else None

    original = rope.get("original_max_position_embeddings") or document.get("original_max_position_embeddings") or 0
    return RopeScaling(
        kind=kind,
        factor=number("factor", 1.0),
        original_context=int(original),
        low_freq_factor=number("low_freq_factor", plain.low_freq_factor),
        high_freq_factor=number("high_freq_factor", plain.high_freq_factor),
        beta_fast=number("beta_fast", plain.beta_fast),
        beta_slow=number("beta_slow", plain.beta_slow),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


def _weight_files(folder: Path) -> tuple[str, ...]:
    index = read_json(folder / "model.safetensors.index.json")
    if index:
        names = sorted(set((index.get("weight_map") or {}).values()))
        for name in names:
            if Path(name).name != name:
                raise StartupError(f"{folder / 'model.safetensors.index.json'} names a file outside the folder: {name}")
            if not (folder / name).is_file():
                raise StartupError(f"{folder} is incomplete: {name} is missing (its index names it)")
        if names:
            return tuple(str((folder / name).resolve()) for name in names)
    # some repositories hold the same weights a second time, as consolidated.safetensors
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if files:
        return tuple(str(file.resolve()) for file in files)
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise StartupError(
            f"{folder} holds pickled weights only ({pickles[0]}), which can run code when read and are refused; "
            "convert them to safetensors"
        )
    _refuse_gguf_folder(folder)
    raise StartupError(f"{folder} has config.json but no *.safetensors")


def _refuse_gguf_folder(folder: Path) -> None:
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if files:
        raise StartupError(f"{folder} holds .gguf files: give --model-path the file itself, e.g. {folder / files[0]}")


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _first_id(*values: Any) -> int | None:
    return next((ids[0] for value in values if (ids := _as_ids(value))), None)


def _end_ids(document: dict[str, Any], generation: dict[str, Any], tokenizer: TokenizerFiles | None) -> tuple[int, ...]:
    """generation_config's list is the whole truth where there is one; the tokenizer's own EOS always ends too."""
    ids = _as_ids(generation.get("eos_token_id")) or _as_ids(document.get("eos_token_id"))
    if tokenizer is not None:
        ids += _as_ids(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    # of a model that is meant to be greedy only the penalty means something; the rest are leftovers
    keys = ("repetition_penalty",) if generation.get("do_sample") is False else _SAMPLING
    found = {key: generation[key] for key in keys if isinstance(generation.get(key), int | float)}
    if found.get("top_k") == 0:  # transformers: 0 switches it off; SamplingParams: -1
        found["top_k"] = -1
    try:
        parse(found, prefix="")
    except InvalidRequest as error:
        log.warning("generation_config.json is ignored as the source of sampling defaults: %s", error)
        return {}
    return found
