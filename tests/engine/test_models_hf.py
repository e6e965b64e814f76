"""Hugging Face folders: both dialects of config.json, real folders that transformers wrote, tokenizer files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixcast.models.hf_config import describe_folder, read_config
from radixcast.models.tokenizer_files import read_tokenizer_files
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import RopeScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_SCALING = RopeScaling(kind="llama3", factor=8.0, original_context=8192)


def config(**changes: Any) -> Any:
    return read_config({**LLAMA, **changes}, "config.json")


# -- config.json


def test_defaults() -> None:
    found = config()
    assert (found.head_dim, found.num_kv_heads, found.rope_theta) == (8, 2, 10000.0)
    assert not found.rope_interleaved
    assert not found.tie_word_embeddings
    assert config(num_key_value_heads=None).num_kv_heads == 4
    assert config(head_dim=16).head_dim == 16


def test_rope_in_both_dialects() -> None:
    old = config(rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    new = config(rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == LLAMA3_SCALING
    assert config(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert config(rope_scaling=None).rope_scaling == RopeScaling()
    assert config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).rope_theta == 1e6
    yarn = config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "mscale": 0.7}).rope_scaling
    assert (yarn.kind, yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.mscale) == ("yarn", 4.0, 16.0, 1.0, 0.7)
    with pytest.raises(StartupError, match="longrope"):
        config(rope_scaling={"rope_type": "longrope", "factor": 2})


def test_biases_of_each_family() -> None:
    qwen = config(architectures=["Qwen2ForCausalLM"])
    assert (qwen.attention_bias, qwen.output_bias) == (True, False)
    llama = config(attention_bias=True, mlp_bias=True)
    assert (llama.attention_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


def test_sliding_windows() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert config(**mistral).sliding_window == 64
    assert config(**{**mistral, "sliding_window": None}).sliding_window is None
    assert config(**qwen, use_sliding_window=False).sliding_window is None
    assert config(**qwen, use_sliding_window=True, max_window_layers=0).sliding_window == 64
    assert config(**qwen, use_sliding_window=True, max_window_layers=2).sliding_window is None
    with pytest.raises(StartupError, match="max_window_layers"):
        config(**qwen, use_sliding_window=True, max_window_layers=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2.*supported architectures"),
        ({"vocab_size": None}, "vocab_size must be a positive number"),
        ({"hidden_size": "32"}, "hidden_size must be a positive number"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_is_not_supported_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        config(**changes)


def test_model_type_stands_in_for_architectures() -> None:
    assert config(architectures=None, model_type="qwen2").architecture == "Qwen2ForCausalLM"


# -- folders


def folder(path: Path, files: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": LLAMA, **files}.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def describe(path: Path) -> Any:
    return describe_folder(path, name=path.name)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, r"no \*\.safetensors"),
        ({"pytorch_model.bin": b"x"}, r"pickled weights only \(pytorch_model\.bin\)"),
        ({"consolidated.00.pth": b"x"}, "pickled weights only"),
        ({"m.gguf": b"x"}, "give --model-path the file itself"),
        ({"config.json": "{"}, "not valid JSON"),
        ({"config.json": "[]"}, "must hold a JSON object"),
        ({"config.json": {**LLAMA, "radixcast_weights": "magic"}}, "radixcast_weights must be one of random, free"),
        ({"model.safetensors.index.json": {"weight_map": {"a": "x.safetensors"}}}, "incomplete: x.safetensors is missing"),
        ({"model.safetensors.index.json": {"weight_map": {"a": "../x.safetensors"}}}, "outside the folder"),
    ],
)
def test_folders_that_cannot_be_served(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        describe(folder(tmp_path / "m", files))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json"):
        describe(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(StartupError, match=r"m\.gguf"):
        describe(tmp_path)


def test_a_tokenizer_in_the_wrong_form_is_told(tmp_path: Path) -> None:
    found = describe(folder(tmp_path / "m", {"model.safetensors": b"", "tokenizer.model": b""}))
    assert found.tokenizer_file is None
    assert "tokenizer.model but no tokenizer.json" in found.tokenizer_problem


def test_weights_that_are_there_twice_are_taken_once(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model.safetensors": b"", "consolidated.safetensors": b""})
    assert describe(path).weight_files == (str(path / "model.safetensors"),)


def test_weights_of_an_index_in_order(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "b.safetensors", "c": "a.safetensors", "d": "a.safetensors"}}
    files = {"model.safetensors.index.json": index, "a.safetensors": b"", "b.safetensors": b"", "other.safetensors": b""}
    path = folder(tmp_path / "m", files)
    assert describe(path).weight_files == (str(path / "a.safetensors"), str(path / "b.safetensors"))


@pytest.mark.parametrize("weights", ["random", "free"])
def test_models_without_weights(tmp_path: Path, weights: str) -> None:
    found = describe(folder(tmp_path / "m", {"config.json": {**LLAMA, "radixcast_weights": weights}}))
    assert (found.weight_format, found.weight_files) == (weights, ())


def test_generation_config(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5, 6], "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 0, "max_length": 9}
    files = {"model.safetensors": b"", "generation_config.json": generation, "config.json": {**LLAMA, "eos_token_id": 2}}
    found = describe(folder(tmp_path / "m", files))
    assert found.eos_token_ids == (5, 6)
    assert found.sampling_defaults == {"temperature": 0.7, "top_p": 0.8, "top_k": -1}
    files["generation_config.json"] = {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}
    found = describe(folder(tmp_path / "n", files))
    assert found.eos_token_ids == (2,)
    assert found.sampling_defaults == {"repetition_penalty": 1.1}
    files["generation_config.json"] = {"temperature": -1}
    assert describe(folder(tmp_path / "o", files)).sampling_defaults == {}


def test_context_of_stretched_models(tmp_path: Path) -> None:
    def context(name: str, **rope: Any) -> int:
        files = {"model.safetensors": b"", "config.json": {**LLAMA, "rope_scaling": rope}}
        return int(describe(folder(tmp_path / name, files)).context_length)

    assert context("yarn", rope_type="yarn", factor=4.0, original_max_position_embeddings=256) == 1024
    assert context("linear", rope_type="linear", factor=2.0) == 512
    assert context("llama3", **LLAMA3_ROPE) == 256


# -- tokenizer files


def tokenizer(path: Path, *, processor: Any = None, **config: Any) -> Path:
    added = [{"id": i, "content": token, "special": True} for token, i in (("<s>", 1), ("</s>", 2))]
    document = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": added, "post_processor": processor}
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(document))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_special_tokens_as_text_and_as_objects(tmp_path: Path) -> None:
    found = read_tokenizer_files(tokenizer(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, pad_token=None))
    assert (found.bos_token, found.eos_token, found.pad_token) == ("<s>", "</s>", "")
    assert (found.bos_token_id, found.eos_token_id) == (1, 2)


def test_bos_is_added_once(tmp_path: Path) -> None:
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}
    both = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    wanted = {"bos_token": "<s>", "add_bos_token": True}
    assert read_tokenizer_files(tokenizer(tmp_path / "a", **wanted)).add_bos
    assert not read_tokenizer_files(tokenizer(tmp_path / "b", processor=template, **wanted)).add_bos
    assert not read_tokenizer_files(tokenizer(tmp_path / "c", processor=both, **wanted)).add_bos
    assert read_tokenizer_files(tokenizer(tmp_path / "d", processor={"type": "ByteLevel"}, **wanted)).add_bos
    assert read_tokenizer_files(tokenizer(tmp_path / "e", bos_token="<s>")).add_bos is None


def test_chat_templates_in_all_spellings(tmp_path: Path) -> None:
    def template(path: Path) -> str | None:
        return read_tokenizer_files(path).chat_template

    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert template(tokenizer(tmp_path / "none")) is None
    assert template(tokenizer(tmp_path / "text", chat_template="T")) == "T"
    assert template(tokenizer(tmp_path / "list", chat_template=named)) == "plain"
    assert template(tokenizer(tmp_path / "first", chat_template=named[:1])) == "tools"
    path = tokenizer(tmp_path / "files", chat_template="T")
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert template(path) == "from json"
    (path / "chat_template.jinja").write_text("from jinja")
    assert template(path) == "from jinja"


# -- what transformers writes


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2"])
def test_folders_that_transformers_wrote(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {key: value for key, value in LLAMA.items() if key != "architectures"}
    written = getattr(transformers, f"{family}Config")(**shape, tie_word_embeddings=family == "Qwen2", eos_token_id=[7, 8])
    model = getattr(transformers, f"{family}ForCausalLM")(written)
    model.save_pretrained(tmp_path / "m")
    found = describe(tmp_path / "m")
    assert found.config.architecture == f"{family}ForCausalLM"
    assert (found.config.hidden_size, found.config.num_layers, found.config.head_dim) == (32, 2, 8)
    assert found.config.rope_theta == 10000.0
    assert found.config.rope_scaling == RopeScaling()
    assert found.config.tie_word_embeddings == (family == "Qwen2")
    assert found.config.attention_bias == (family == "Qwen2")
    assert found.config.sliding_window == (4096 if family == "Mistral" else None)
    assert found.eos_token_ids == (7, 8)
    assert found.weight_format == "safetensors"
    assert [Path(file).name for file in found.weight_files] == ["model.safetensors"]
    assert found.tokenizer_file is None


def test_llama3_scaling_that_transformers_wrote(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {key: value for key, value in LLAMA.items() if key not in ("architectures", "max_position_embeddings")}
    written = transformers.LlamaConfig(**shape, max_position_embeddings=131072, rope_scaling=dict(LLAMA3_ROPE), rope_theta=5e5)
    written.architectures = ["LlamaForCausalLM"]
    written.save_pretrained(tmp_path)
    found = read_config(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert found.rope_scaling == LLAMA3_SCALING
    assert found.rope_theta == 5e5
