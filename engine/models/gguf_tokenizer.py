"""GGUF vocabulary -> tokenizer.json, without transformers (which needs seconds for it).

Two kinds exist for the supported models: `gpt2` (byte-level BPE; merges in the file; the split pattern is named by
`tokenizer.ggml.pre`) and `llama` (SentencePiece BPE; merges follow from the scores). The result encodes as the one that
transformers builds from the same file does: a test compares them over many texts.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from radixcast.protocols.errors import StartupError

log = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type that are matched whole in text."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}
"""`tokenizer.ggml.pre` -> split pattern (the models' published ones)."""
_GPT2_SPLIT = {"default", "gpt-2", "gpt2", "smollm", "mpt", "olmo", "phi-2", ""}
"""Names that get GPT-2's own pattern. (`smollm` was trained with digits split off first; like transformers, this lets
the vocabulary, which has no token of two digits, do that.)"""


def tokenizer_json(metadata: dict[str, Any]) -> bytes:
    """The contents of tokenizer.json for the vocabulary in a GGUF header. Raises StartupError for an unknown kind.

    No post-processor is written: whether BOS goes in front is `ModelSpec.add_bos`.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise StartupError("the GGUF file has no vocabulary; give --tokenizer-path")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise StartupError(
            f"tokenizer kind {kind!r} of the GGUF file is not supported (known: gpt2, llama); give --tokenizer-path"
        )
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
    }
    document |= builders[kind](metadata)
    document["added_tokens"] = _added_tokens(metadata, byte_level=kind == "gpt2")
    return msgspec.json.encode(document)


def byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that byte-level BPE spells it with (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(plain))
    return table


def _byte_level(metadata: dict[str, Any]) -> dict[str, Any]:
    spelling = byte_alphabet()
    alphabet = set(spelling.values())
    vocab = {}
    for index, token in enumerate(metadata["tokenizer.ggml.tokens"]):
        text = token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode())
        vocab[text] = index
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    if not merges:
        raise StartupError("the GGUF file has a byte-level vocabulary without merges; give --tokenizer-path")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre = metadata.get("tokenizer.ggml.pre", "")
    split = _SPLITS.get(pre)
    if split is None and pre not in _GPT2_SPLIT:
        log.warning("unknown pre-tokenizer %r in the GGUF file: GPT-2's split pattern is used; --tokenizer-path overrides", pre)
    before: dict[str, Any] = byte_level | {"use_regex": True}
    if split is not None:
        regex = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [regex, byte_level | {"use_regex": False}]}
    return {
        "pre_tokenizer": before,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": _bpe(vocab, merges, fuse_unk=False, byte_fallback=False, continuing_subword_prefix="", end_of_word_suffix=""),
    }


def _sentencepiece(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    if not merges:
        merges = _merges_from_scores(vocab, dict(zip(tokens, metadata.get("tokenizer.ggml.scores") or (), strict=False)))
    # transformers' Llama tokenizer always prepends a space; llama.cpp's files say when not to
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    scheme = "first" if prefix else "never"
    return {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            vocab, merges, fuse_unk=True, byte_fallback=True, continuing_subword_prefix=None, end_of_word_suffix=None
        ),
    }


def _bpe(vocab: dict[str, int], merges: list[list[str]], **rest: Any) -> dict[str, Any]:
    return {"type": "BPE", "dropout": None, "unk_token": None, "ignore_merges": False, "vocab": vocab, "merges": merges, **rest}


def _merges_from_scores(vocab: dict[str, int], scores: dict[str, float]) -> list[list[str]]:
    """SentencePiece BPE merges: every way to split a token into two others, best score first.

    Ties go to longer left parts, then longer right parts, then vocabulary order (a stable sort).
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        local = [(vocab[a], vocab[b], a, b) for a, b in pairs if a in vocab and b in vocab]
        merges += [(score, len(a), len(b), a, b) for _, _, a, b in sorted(local)]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[a, b] for *_, a, b in merges]


def _added_tokens(metadata: dict[str, Any], *, byte_level: bool) -> list[dict[str, Any]]:
    """Control and unknown tokens (special) and user-defined ones, matched whole in text; in id order."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or ()
    alphabet = set(byte_alphabet().values())
    added = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        # one outside the byte alphabet is a mislabelled ordinary token: the vocabulary does not hold it in this spelling
        if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED) or (byte_level and not alphabet.issuperset(token)):
            continue
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": kind != _USER_DEFINED}
        added.append({"id": index, "content": token, **flags})
    return added
