"""Weights from safetensors (one file, shards, an index), GGUF and a seed; and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from fakes.paged import PagedModel
from fakes.tiny_hf import build_hf, save_hf, tiny_config, tiny_spec
from radixcast.actors.model_runner.models.base import DecoderModel
from radixcast.actors.model_runner.models.registry import load_model
from radixcast.actors.model_runner.models.rotary import inverse_frequencies
from radixcast.actors.model_runner.weights import GGUFSource, hugging_face_name, source_of
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig, ModelSpec, RopeScaling

CPU = torch.device("cpu")
IDS = list(range(3, 40))


def load(spec: ModelSpec, **options: object) -> DecoderModel:
    return load_model(spec, device=CPU, dtype=torch.float32, quantization="auto", **options)  # type: ignore[arg-type]


def logits(spec: ModelSpec) -> torch.Tensor:
    return PagedModel(load(spec), spec.config, 64).prompt(IDS)


def test_shards_and_index_files(tmp_path: Path) -> None:
    config = tiny_config()
    theirs = build_hf(config)
    whole = tiny_spec(config, save_hf(theirs, tmp_path / "whole"), "safetensors")
    shards = save_hf(theirs, tmp_path / "shards", max_shard_size="20KB")
    assert len(shards) > 2
    index = str(tmp_path / "shards" / "model.safetensors.index.json")
    wanted = logits(whole)
    assert torch.equal(logits(tiny_spec(config, shards, "safetensors")), wanted)
    assert torch.equal(logits(tiny_spec(config, (index,), "safetensors")), wanted)
    with pytest.raises(StartupError, match=r"lacks tensor model\."):
        load(tiny_spec(config, shards[1:], "safetensors"))
    with pytest.raises(StartupError, match="is in two files"):
        load(tiny_spec(config, (*shards, *whole.weight_files), "safetensors"))


@pytest.mark.parametrize(
    "content", ["{}", "[1]", '{"weight_map": {"a": "../../etc/passwd"}}', '{"weight_map": {"a": "x.bin"}}']
)
def test_bad_index_files(content: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(StartupError, match="index"):
        load(tiny_spec(tiny_config(), (str(index),), "safetensors"))


def changed(tmp_path: Path, config: ModelConfig, **changes: torch.Tensor | None) -> ModelSpec:
    """A saved model with tensors replaced, added or (None) left out; '__' in a key stands for a dot."""
    (file,) = save_hf(build_hf(config), tmp_path)
    tensors = load_file(file)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, file)
    return tiny_spec(config, (file,), "safetensors")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = tiny_config()
    with pytest.raises(StartupError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(changed(tmp_path, config, model__layers__1__mlp__up_proj__weight=None))
    wrong = changed(tmp_path, config, model__layers__2__self_attn__k_proj__weight=torch.zeros(8, 32))
    with pytest.raises(
        StartupError, match=r"model\.layers\.2\.self_attn\.k_proj\.weight .* \[8, 32\], the config wants \[16, 32\]"
    ):
        load(wrong)
    with pytest.raises(StartupError, match=r"1 tensors that the model has no place for: model\.layers\.0\.self_attn\.q_norm"):
        load(changed(tmp_path, config, model__layers__0__self_attn__q_norm__weight=torch.ones(8)))
    with pytest.raises(StartupError, match=r"no place for: model\.layers\.2"):
        load(replace(changed(tmp_path, config), config=tiny_config(num_layers=2)))


def test_harmless_surplus(tmp_path: Path) -> None:
    """Old checkpoints hold rotary tables, and tied ones a second copy of the embedding."""
    tied = tiny_config(tie_word_embeddings=True)
    extra = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4), "lm_head__weight": torch.zeros(97, 32)}
    wanted = logits(changed(tmp_path, tied))
    assert torch.equal(logits(changed(tmp_path, tied, **extra)), wanted)


def test_pickles_are_refused(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "x.pkl"):
        with pytest.raises(StartupError, match="pickle"):
            source_of(tiny_spec(tiny_config(), (str(tmp_path / name),), "safetensors"))


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "model.safetensors"
    for path in (tmp_path / "none.safetensors", broken):
        with pytest.raises(StartupError, match="can't read"):
            load(tiny_spec(tiny_config(), (str(path),), "safetensors"))
        broken.write_bytes(b"\xff" * 100)
    with pytest.raises(StartupError, match="no weight files"):
        load(tiny_spec(tiny_config(), (), "safetensors"))
    with pytest.raises(StartupError, match="unknown weight format onnx"):
        load(tiny_spec(tiny_config(), ("x",), "onnx"))
    with pytest.raises(StartupError, match="split over several files"):
        load(tiny_spec(tiny_config(), ("a.gguf", "b.gguf"), "gguf"))


def test_random_weights_depend_on_names_only() -> None:
    spec = tiny_spec(tiny_config())
    assert torch.equal(logits(spec), logits(spec))
    assert logits(spec).std() > 0


def test_progress_rises_to_one(tmp_path: Path) -> None:
    config = tiny_config()
    for spec in (tiny_spec(config), tiny_spec(config, save_hf(build_hf(config), tmp_path), "safetensors")):
        heard: list[float] = []
        load(spec, progress=heard.append)
        assert heard == sorted(heard)
        assert heard[-1] == 1.0


# ------------------------------------------------------------------ GGUF

_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.": "blk.",
}


def gguf_name(name: str) -> str:
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation of q and k rows."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def save_gguf(
    path: Path, state: dict[str, torch.Tensor], config: ModelConfig, kind: GGMLQuantizationType
) -> dict[str, torch.Tensor]:
    """Write a model as llama.cpp's converter does -> the values that a reader gets, under Hugging Face's names."""
    writer = gguf.GGUFWriter(path, "llama")
    stored = {}
    for name, tensor in state.items():
        array = tensor.numpy()
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        used = kind if array.ndim == 2 else GGMLQuantizationType.F32
        stored[name] = torch.from_numpy(np.array(dequantize(quantize(array, used), used)))
        if heads and config.rope_interleaved:
            array = interleaved(array, heads)
        writer.add_tensor(gguf_name(name), quantize(array, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("permuted", [True, False])
def test_gguf_gives_the_bits_of_gguf_dequantize(kind: str, permuted: bool, tmp_path: Path) -> None:
    config = tiny_config(rope_interleaved=permuted, attention_bias=True, intermediate_size=64, hidden_size=32)
    path = tmp_path / "model.gguf"
    stored = save_gguf(path, build_hf(config).state_dict(), config, GGMLQuantizationType[kind])
    source = GGUFSource(str(path), config)
    for name, wanted in stored.items():
        assert source.shapes[name] == tuple(wanted.shape)
        found = torch.empty(wanted.shape)
        source.read_into(name, found)
        assert torch.equal(found, wanted), name


def test_a_gguf_model_computes_what_its_values_say(tmp_path: Path) -> None:
    config = tiny_config(rope_interleaved=True, tie_word_embeddings=True, intermediate_size=64)
    theirs = build_hf(config)
    state = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    path = tmp_path / "model.gguf"
    theirs.load_state_dict(save_gguf(path, state, config, GGMLQuantizationType.Q4_1), strict=False)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(tiny_spec(config, (str(path),), "gguf")), wanted, rtol=1e-4, atol=1e-4)


def test_rope_factors_of_a_gguf_are_llama3_scaling(tmp_path: Path) -> None:
    """Llama 3.1's converter writes the divisors of the frequencies as a tensor, and no scaling into the metadata."""
    scaled = tiny_config(rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context=32))
    plain = tiny_config()
    theirs = build_hf(scaled)
    divisors = inverse_frequencies(plain) / inverse_frequencies(scaled)
    path = tmp_path / "model.gguf"
    state = {**theirs.state_dict(), "rope_freqs.weight": divisors}
    save_gguf(path, state, plain, GGMLQuantizationType.F32)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(tiny_spec(plain, (str(path),), "gguf")), wanted, rtol=1e-4, atol=1e-4)


def test_names_of_gguf_tensors() -> None:
    assert hugging_face_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hugging_face_name("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert hugging_face_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
