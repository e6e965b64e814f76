"""GGUF metadata -> Description: shape of the model, special tokens, chat template."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from radixcast.models.cache import FileKey, cache_root, locked, os_errors, write_atomic
from radixcast.models.description import Description, unsupported, usable_context
from radixcast.models.gguf_metadata import GGUFHeader, read_header
from radixcast.models.gguf_tokenizer import tokenizer_json
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig, RopeScaling

CONVERSION = 3
"""Version of what is derived from a GGUF file and cached; raise it when the derivation changes."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer, whatever the file's one eos id is (instruct models have two ends)."""
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class _Cached(msgspec.Struct, frozen=True):
    """description.json: valid while version and key are those of the file."""

    version: int
    key: FileKey
    description: Description


def describe_gguf(path: Path, *, name: str, folder: Path | None = None) -> Description:
    """Describe a .gguf file; its tokenizer.json is written into `folder` (default: one in the cache).

    The work is done once per file and conversion version; afterwards only a small JSON file is read.
    Raises StartupError for an unreadable file, an unsupported architecture or a cache that can't be written.
    """
    with os_errors("read the model", path):
        key = FileKey.of(path)
    folder = folder or cache_root() / "gguf" / f"{path.stem[:64]}-{key.digest(CONVERSION)}"
    cached = _load(folder, key)
    if cached is None:
        with os_errors("cache the converted tokenizer", folder), locked(folder):
            cached = _load(folder, key) or _convert(path, key, folder)
    return msgspec.structs.replace(cached, name=name)


def _load(folder: Path, key: FileKey) -> Description | None:
    try:
        cached = msgspec.json.decode((folder / "description.json").read_bytes(), type=_Cached)
    except (OSError, msgspec.MsgspecError):
        return None
    if cached.version != CONVERSION or cached.key != key:
        return None
    if cached.description.tokenizer_file is None:
        return cached.description
    if not (folder / "tokenizer.json").is_file():
        return None
    # the folder may have been moved, unlike the file that the key names
    return msgspec.structs.replace(cached.description, tokenizer_file=str(folder / "tokenizer.json"))


def _convert(path: Path, key: FileKey, folder: Path) -> Description:
    header = read_header(path)
    description = from_header(header, path, tokenizer_file=folder / "tokenizer.json")
    try:
        write_atomic(folder / "tokenizer.json", tokenizer_json(header.metadata))
    except StartupError as error:
        description = msgspec.structs.replace(description, tokenizer_file=None, tokenizer_problem=f"{path}: {error}")
    write_atomic(folder / "description.json", msgspec.json.encode(_Cached(CONVERSION, key, description)))
    return description


def from_header(header: GGUFHeader, path: Path, *, tokenizer_file: Path) -> Description:
    """Description of the model in `header`; writes nothing."""
    metadata = header.metadata
    config = config_from_header(header, path)
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []

    def special(key: str) -> tuple[int | None, str]:
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return (index, tokens[index]) if isinstance(index, int) and 0 <= index < len(tokens) else (None, "")

    bos_id, bos = special("bos")
    _, eos = special("eos")
    _, pad = special("padding")
    template = metadata.get("tokenizer.chat_template")
    return Description(
        name=path.stem,
        config=config,
        weight_files=_shards(path, metadata),
        weight_format="gguf",
        tokenizer_file=str(tokenizer_file),
        chat_template=template if isinstance(template, str) and template else None,
        bos_token_id=bos_id,
        add_bos=bos_id is not None and _adds_bos(metadata),
        eos_token_ids=_end_ids(metadata, tokens),
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        context_length=usable_context(config),
    )


def _adds_bos(metadata: dict[str, Any]) -> bool:
    flag = metadata.get("tokenizer.ggml.add_bos_token")
    if flag is not None:
        return bool(flag)
    # files older than the flag: SentencePiece and Llama 3 vocabularies were trained with BOS
    llama3 = metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
    return metadata.get("tokenizer.ggml.model") == "llama" or llama3


def _end_ids(metadata: dict[str, Any], tokens: list[str]) -> tuple[int, ...]:
    """Ids that end an answer: the file's eos, eot and eom, and known end-of-turn control tokens of the vocabulary."""
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type") or []
    control = {tokens[i]: i for i, kind in enumerate(types[: len(tokens)]) if kind == 3}
    ids += [control.get(text) for text in _END_OF_TURN]
    # Qwen's instruct models pad with it and end raw completions with it; elsewhere it only separates documents
    if metadata.get("tokenizer.ggml.padding_token_id") == control.get("<|endoftext|>"):
        ids.append(control.get("<|endoftext|>"))
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < len(tokens)))


def _shards(path: Path, metadata: dict[str, Any]) -> tuple[str, ...]:
    """All files of a split model, in order; usually the one."""
    count = metadata.get("split.count") or 1
    if count <= 1:
        return (str(path.resolve()),)
    match = _SHARD.search(path.name)
    if match is None:
        raise StartupError(f"{path} is one of {count} parts, but its name does not end in -00001-of-{count:05d}.gguf")
    if int(match[1]) != 1:
        raise StartupError(f"{path} is part {int(match[1])} of {count}: give the first part")
    stem = path.name[: match.start()]
    files = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise StartupError(f"{path} is split into {count} files; {file.name} is missing")
    return tuple(str(file.resolve()) for file in files)


def config_from_header(header: GGUFHeader, path: Path) -> ModelConfig:
    """Shape of the decoder in `header`. Raises StartupError for what the engine has no code for."""
    metadata, tensors = header.metadata, header.tensors
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise unsupported(f"GGUF architecture {arch!r}", str(path))
    if metadata.get(f"{arch}.expert_count"):
        raise unsupported("a mixture of experts", str(path))

    def need(key: str) -> Any:
        value = metadata.get(f"{arch}.{key}")
        if not isinstance(value, int | float) or value <= 0:
            raise StartupError(f"{path}: {arch}.{key} must be a positive number, got {value!r}")
        return value

    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = metadata.get(f"{arch}.attention.key_length") or hidden // heads
    rotary = metadata.get(f"{arch}.rope.dimension_count") or head_dim
    if rotary != head_dim:
        raise unsupported(f"partial rotary embedding ({rotary} of {head_dim} dimensions)", str(path))
    embedding = tensors.get("token_embd.weight")
    rows = embedding.shape[-1] if embedding else metadata.get(f"{arch}.vocab_size")
    return ModelConfig(
        architecture=_ARCHITECTURES[arch],
        vocab_size=rows or len(metadata.get("tokenizer.ggml.tokens") or ()),
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=metadata.get(f"{arch}.attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_position_embeddings=need("context_length"),
        rms_norm_eps=_single(need("attention.layer_norm_rms_epsilon")),
        rope_theta=_single(metadata.get(f"{arch}.rope.freq_base") or 10000.0),
        rope_scaling=_rope_scaling(header, arch, path),
        # llama.cpp's converter permutes q and k of these models so that rotary pairs are neighbours
        rope_interleaved=arch in ("llama", "mistral"),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
        torch_dtype=_dtype(header),
    )


def _single(value: float) -> float:
    """The decimal that a float32 of the file was written from: 9.999999747378752e-06 -> 1e-05."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def _dtype(header: GGUFHeader) -> str:
    """Of the matrices; quantised ones count as bfloat16, which holds their range."""
    kinds = {info.ggml_type for info in header.tensors.values() if len(info.shape) > 1}
    return _FLOATS.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope_scaling(header: GGUFHeader, arch: str, path: Path) -> RopeScaling:
    metadata = header.metadata
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, arch, path)
    kind = metadata.get(f"{arch}.rope.scaling.type") or "none"
    factor = metadata.get(f"{arch}.rope.scaling.factor") or metadata.get(f"{arch}.rope.scale_linear") or 1.0
    if kind == "none" and metadata.get(f"{arch}.rope.scale_linear", 1.0) not in (0, 1.0):
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise unsupported(f"rope scaling {kind!r}", str(path))
    return RopeScaling(
        kind=kind,
        factor=_single(factor),
        original_context=metadata.get(f"{arch}.rope.scaling.original_context_length") or 0,
        beta_fast=_single(metadata.get(f"{arch}.rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=_single(metadata.get(f"{arch}.rope.scaling.yarn_beta_slow") or 1.0),
    )


def _llama3_scaling(header: GGUFHeader, arch: str, path: Path) -> RopeScaling:
    """Llama 3.1's scaling is stored as a tensor of divisors; find the parameters that they were made from.

    The published models differ in `factor` alone (8 or 32), which is the largest divisor.
    """
    info = header.tensors["rope_freqs.weight"]
    if info.ggml_type != 0 or not info.shape:
        raise unsupported("rope_freqs.weight that is not float32", str(path))
    stored = np.fromfile(path, "<f4", math.prod(info.shape), offset=header.data_start + info.offset)
    scaling = RopeScaling(kind="llama3", factor=float(stored.max(initial=1.0)), original_context=8192)
    theta = float(header.metadata.get(f"{arch}.rope.freq_base") or 10000.0)
    expected = llama3_divisors(scaling, theta, 2 * len(stored))
    if not np.allclose(stored, expected, rtol=1e-3):
        raise unsupported("rope_freqs.weight other than Llama 3.1's", str(path))
    return scaling


def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[head_dim / 2] divisors of the rotary frequencies (Llama 3.1: long waves by `factor`, short ones not, a ramp between)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ramp = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    ramp = np.clip(ramp, 0.0, 1.0)
    return 1.0 / ((1 - ramp) / scaling.factor + ramp)
