"""Small GGUF files, written by the `gguf` package: the real writer, so that our reader is tested against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's what we've seen; they'll say 1234 times: 3.14, 42! "
    "Straße, naïve café, здравствуй мир, 你好世界，今天天气很好。 日本語のテキスト 😀🎉 "
    "def f(x):\n    return x + 1\n\n\ttabs  and   spaces "
) * 4


def byte_level_vocabulary(size: int = 500) -> tuple[list[str], list[str]]:
    """(tokens, merges) of a byte-level BPE trained on CORPUS; three control tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return _vocabulary(tokenizer)


def sentencepiece_vocabulary(size: int = 500) -> tuple[list[str], list[float], list[int]]:
    """(tokens, scores, types) in SentencePiece's form: <unk>, <s>, </s>, 256 bytes, then pieces, best first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    pieces, _ = _vocabulary(tokenizer)
    pieces.sort(key=len)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return tokens, scores, types


def _vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    import json

    model = json.loads(tokenizer.to_str())["model"]
    ordered = sorted(model["vocab"].items(), key=lambda item: item[1])
    return [token for token, _ in ordered], [" ".join(merge) for merge in model["merges"]]


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    kind: str = "gpt2",
    pre: str = "smollm",
    fields: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    tied: bool = True,
) -> Path:
    """A decoder of two tiny layers with a tokenizer. `fields` adds or replaces metadata, `drop` leaves some out."""
    tokens: list[str]
    merges: list[str] = []
    scores: list[float] = []
    if kind == "gpt2":
        tokens, merges = byte_level_vocabulary()
        types = [3, 3, 3, *[1] * (len(tokens) - 3)]
    else:
        tokens, scores, types = sentencepiece_vocabulary()
    metadata: dict[str, Any] = {
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": 32,
        f"{arch}.feed_forward_length": 64,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }
    if merges:
        metadata["tokenizer.ggml.merges"] = merges
    if scores:
        metadata["tokenizer.ggml.scores"] = scores
    metadata |= fields or {}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if key not in drop:
            _add(writer, key, value)
    arrays: dict[str, np.ndarray[Any, Any]] = {"token_embd.weight": np.zeros((len(tokens), 32), np.float16)}
    if not tied:
        arrays["output.weight"] = np.zeros((len(tokens), 32), np.float16)
    for name, array in {**arrays, **(tensors or {})}.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
