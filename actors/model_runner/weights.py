"""Where weights come from: safetensors, GGUF or a seed; under Hugging Face's names, read straight into their destination.

    source_of(spec) ─► WeightSource ─► WeightLoader ─► tensors of a model, on its device, in its dtype
                       names, shapes    checks, fuses, reports progress

No pickle is ever opened.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from radixcast.actors.model_runner.gguf_file import GGUFFile, GGUFTensor
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig, ModelSpec

ROPE_FACTORS = "rope_freqs"
"""Divisors of the rotary frequencies, [head_dim / 2]: Llama 3.1's scaling as GGUF files carry it."""

Progress = Callable[[float], None]
Shape = tuple[int, ...]


class WeightSource(ABC):
    """Named tensors somewhere on disk. Names are those of Hugging Face's Llama (model.layers.0.self_attn.q_proj.weight)."""

    shapes: dict[str, Shape]
    origin: str
    """What to call it in an error."""

    @abstractmethod
    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (CPU, contiguous, of the tensor's shape, any float dtype), converting."""


class SafetensorsSource(WeightSource):
    """One or several .safetensors files, or an index file that names them."""

    def __init__(self, files: Sequence[str]) -> None:
        self.shapes = {}
        self.origin = Path(files[0]).parent.name or files[0]
        self._files: dict[str, Any] = {}
        for path in _shards(files):
            try:
                opened: Any = safe_open(path, framework="pt")
                names = list(opened.keys())
            except (OSError, SafetensorError) as error:
                raise StartupError(f"can't read {path}: {error}") from None
            for name in names:
                if name in self.shapes:
                    raise StartupError(f"tensor {name} is in two files, {path} is one of them")
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                self._files[name] = opened

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._files[name].get_tensor(name))


class GGUFSource(WeightSource):
    """A GGUF file of the llama, mistral or qwen2 kind. Rows of q and k are put into the half layout of rotary pairs."""

    def __init__(self, path: str, config: ModelConfig) -> None:
        self.origin = Path(path).name
        self._file = GGUFFile(path)
        self._config = config
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in self._file.tensors.values():
            self._tensors[hugging_face_name(tensor.name)] = tensor
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self._file.read_into(self._tensors[name], out, self._row_order(name))

    def _row_order(self, name: str) -> torch.Tensor | None:
        """Within a head, the file's rows are pairs (0, D/2), (1, D/2 + 1), …; row i of the half layout is file row order[i]."""
        if not self._config.rope_interleaved or "_proj." not in name:
            return None
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}.get(name.split(".")[-2])
        if heads is None:
            return None
        order = torch.arange(heads * self._config.head_dim)
        return order.view(heads, self._config.head_dim // 2, 2).transpose(1, 2).reshape(-1)


class RandomSource(WeightSource):
    """Weights drawn from a seed, for tests and benchmarks: the same for the same names and shapes, whatever is read first."""

    def __init__(self, seed: int = 0) -> None:
        self.shapes = {}
        self.origin = "random weights"
        self._seed = seed

    def read_into(self, name: str, out: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(self._seed << 32 | zlib.crc32(name.encode()))
        values = torch.randn(out.shape, generator=generator) * 0.02
        out.copy_(values + 1 if name.endswith("norm.weight") else values)


def source_of(spec: ModelSpec) -> WeightSource:
    """The source that a spec's weight_format and weight_files name. Raises StartupError for pickles and unknown formats."""
    for file in spec.weight_files:
        if file.endswith((".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")):
            raise StartupError(f"{file} is a pickle and could run code when loaded; convert the model to safetensors")
    if spec.weight_format == "random":
        return RandomSource()
    if not spec.weight_files:
        raise StartupError(f"model {spec.name} has no weight files")
    if spec.weight_format == "safetensors":
        return SafetensorsSource(spec.weight_files)
    if spec.weight_format == "gguf":
        if len(spec.weight_files) > 1:
            raise StartupError(
                "GGUF models split over several files are not supported; join them with llama-gguf-split --merge"
            )
        return GGUFSource(spec.weight_files[0], spec.config)
    raise StartupError(f"unknown weight format {spec.weight_format}; known are safetensors, gguf and random")


class WeightLoader:
    """Hands out a model's tensors, on its device and in its dtype, and checks that they are what the config promises."""

    def __init__(
        self, source: WeightSource, *, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
    ) -> None:
        self.source = source
        self.device = device
        self.dtype = dtype
        self._random = isinstance(source, RandomSource)
        self._unread = set(source.shapes)
        self._total = max(sum(map(torch.Size.numel, map(torch.Size, source.shapes.values()))), 1)
        self._read = 0
        self._progress = progress

    def has(self, name: str) -> bool:
        """Whether the source has this tensor (random sources have whatever is taken, but nothing optional)."""
        return name in self.source.shapes

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor. Raises StartupError when it is missing or has another shape."""
        return self.fuse([(name, shape)], dtype)

    def fuse(self, parts: Sequence[tuple[str, Shape]], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Several tensors stacked along their first axis, in one piece of memory."""
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=dtype or self.dtype)
        at = 0
        for name, shape in parts:
            self._check(name, shape)
            self.source.read_into(name, out[at : at + shape[0]])
            at += shape[0]
            self._done(name, shape)
        return out.to(self.device)

    def ignore(self, pattern: str) -> None:
        """Tensors whose whole name matches this regular expression are known and not needed."""
        self._unread = {name for name in self._unread if not re.fullmatch(pattern, name)}

    def finish(self) -> None:
        """Raises StartupError when tensors are left that nobody took: the model is not what its config says."""
        if self._unread:
            shown = ", ".join(sorted(self._unread)[:3])
            raise StartupError(f"{self.source.origin} has {len(self._unread)} tensors that the model has no place for: {shown}")
        if self._progress is not None:
            self._progress(1.0)

    def _check(self, name: str, shape: Shape) -> None:
        if self._random:
            return
        found = self.source.shapes.get(name)
        if found is None:
            raise StartupError(f"{self.source.origin} lacks tensor {name}")
        if found != shape:
            raise StartupError(f"tensor {name} of {self.source.origin} has shape {list(found)}, the config wants {list(shape)}")

    def _done(self, name: str, shape: Shape) -> None:
        self._unread.discard(name)
        self._read += torch.Size(shape).numel()
        if self._progress is not None and not self._random:
            self._progress(min(self._read / self._total, 1.0))


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": ROPE_FACTORS,
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """GGUF's name of a tensor -> Hugging Face's; names that we don't know stay as they are."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


class _Index(msgspec.Struct):
    """model.safetensors.index.json, as far as it matters."""

    weight_map: dict[str, str]


def _shards(files: Sequence[str]) -> list[Path]:
    """The .safetensors files that `files` names, index files replaced by what they list."""
    shards: dict[Path, None] = {}
    for file in map(Path, files):
        if file.suffix != ".json":
            shards[file] = None
            continue
        try:
            index = msgspec.json.decode(file.read_bytes(), type=_Index)
        except (OSError, msgspec.MsgspecError) as error:
            raise StartupError(f"can't read {file}: {error}") from None
        for name in index.weight_map.values():
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise StartupError(f"{file} names {name}, which is no safetensors file beside it")
            shards[file.parent / name] = None
    return list(shards)
