"""The Llama family against transformers' own code: same weights, same logits, however the tokens are cut and batched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as replace_struct

from fakes.paged import PagedModel, forward_batch
from fakes.tiny_hf import build_hf, save_hf, tiny_config, tiny_spec
from radixcast.actors.model_runner.models.registry import load_model
from radixcast.actors.model_runner.models.rotary import attention_scale, inverse_frequencies
from radixcast.kernels import select
from radixcast.models.hf_config import read_config
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig, RopeScaling

CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (61,), generator=torch.Generator().manual_seed(0)).tolist()

VARIANTS = {
    "llama": tiny_config(),
    "llama-tied": tiny_config(tie_word_embeddings=True),
    "llama-biases": tiny_config(attention_bias=True, output_bias=True, mlp_bias=True),
    "llama-wide-heads": tiny_config(head_dim=12, num_kv_heads=4),
    "llama-one-kv-head": tiny_config(num_kv_heads=1, rope_theta=100000.0, rms_norm_eps=1e-3),
    "linear": tiny_config(rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    "dynamic": tiny_config(rope_scaling=RopeScaling(kind="dynamic", factor=2.0)),
    "llama3": tiny_config(rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context=32)),
    "yarn": tiny_config(rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_context=32)),
    "yarn-mscale": tiny_config(
        head_dim=16, rope_scaling=RopeScaling(kind="yarn", factor=8.0, original_context=16, mscale=1.0, mscale_all_dim=0.5)
    ),
    "yarn-factor": tiny_config(
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_context=32, attention_factor=1.3, beta_fast=16.0)
    ),
    "mistral": tiny_config("MistralForCausalLM"),
    "mistral-sliding": tiny_config("MistralForCausalLM", sliding_window=11),
    "qwen2": tiny_config("Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2-sliding": tiny_config("Qwen2ForCausalLM", sliding_window=5),
}


def both(config: ModelConfig, folder: Path, ids: list[int] = IDS) -> tuple[PagedModel, torch.Tensor]:
    """Ours, loaded from what transformers saved, and transformers' logits of the ids."""
    theirs = build_hf(config)
    spec = tiny_spec(config, save_hf(theirs, folder), "safetensors")
    model = load_model(spec, device=CPU, dtype=torch.float32, quantization="none")
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    return PagedModel(model, config, 1000), wanted


def check_logits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ours, wanted = both(VARIANTS[name], tmp_path)
    check_logits(ours.prompt(IDS), wanted)
    check_logits(ours.prompt(IDS, chunk=16), wanted)
    check_logits(ours.prompt(IDS, chunk=1), wanted)


@pytest.mark.parametrize("name", VARIANTS)
def test_config_json_says_the_same(name: str, tmp_path: Path) -> None:
    """What `engine` reads from the file that transformers writes is what the weights were loaded with above."""
    config = VARIANTS[name]
    document = build_hf(config).config.to_dict()
    found = read_config({**document, "architectures": [config.architecture]}, "config.json")
    same = replace_struct(found, torch_dtype=config.torch_dtype, rope_scaling=config.rope_scaling)
    assert same == config
    assert torch.equal(inverse_frequencies(found), inverse_frequencies(config))
    assert attention_scale(found.rope_scaling) == attention_scale(config.rope_scaling)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen2"])
def test_a_ragged_batch_equals_its_rows_alone(name: str, tmp_path: Path) -> None:
    """Rows at different points, decodes beside chunks, the last token's logits only."""
    ours, wanted = both(VARIANTS[name], tmp_path)
    rows = [ours.row(IDS, len(IDS)) for _ in range(5)]
    ours.step(rows[1:4], [5, 30, 59])
    counts = [20, 1, 16, 1, 2]
    check_logits(ours.step(rows, counts), wanted[[19, 5, 45, 59, 1]])
    check_logits(ours.step(rows, [1] * 5), wanted[[20, 6, 46, 60, 2]])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_dynamic_scaling_beyond_the_trained_context(tmp_path: Path) -> None:
    """Token by token transformers stretches as the text grows; ours gives that, in chunks as well."""
    config = tiny_config(max_position_embeddings=32, rope_scaling=RopeScaling(kind="dynamic", factor=3.0))
    ours, _ = both(config, tmp_path, IDS[:8])
    theirs, cache, parts = build_hf(config), None, []
    with torch.inference_mode():
        for token in IDS:
            out = theirs(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits[0])
    check_logits(ours.prompt(IDS, chunk=1), torch.cat(parts))
    check_logits(ours.prompt(IDS, chunk=7), torch.cat(parts))


@pytest.mark.parametrize("name", ["llama-biases", "mistral-sliding"])
def test_plain_torch_ops_compute_the_same(name: str) -> None:
    """The op table that other devices start from."""
    spec = tiny_spec(VARIANTS[name])
    found, wanted = (
        PagedModel(
            load_model(spec, device=CPU, dtype=torch.float32, quantization="none", ops=select(CPU, reference=plain)),
            spec.config,
            100,
        ).prompt(IDS, chunk=9)
        for plain in (False, True)
    )
    check_logits(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype: torch.dtype, tmp_path: Path) -> None:
    config = VARIANTS["llama"]
    _, wanted = both(config, tmp_path)
    spec = tiny_spec(config, tuple(map(str, tmp_path.glob("*.safetensors"))), "safetensors")
    model = load_model(spec, device=CPU, dtype=dtype, quantization="none")
    found = PagedModel(model, config, 1000, dtype).prompt(IDS, chunk=13)
    assert found.dtype is torch.float32
    error = (found - wanted).norm() / wanted.norm()
    assert error < {torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]


def test_stages_of_a_pipeline_make_the_whole(tmp_path: Path) -> None:
    config = VARIANTS["llama"]
    whole, wanted = both(config, tmp_path)
    spec = tiny_spec(config, tuple(map(str, tmp_path.glob("*.safetensors"))), "safetensors")
    stages = [
        PagedModel(load_model(spec, device=CPU, dtype=torch.float32, quantization="none", layers=layers), config, 1000)
        for layers in (range(1), range(1, 3))
    ]
    batch = forward_batch([whole.row(IDS, len(IDS))], [len(IDS)], every=True)
    with torch.inference_mode():
        hidden = stages[0].model.embed(batch.token_ids_T)
        for stage in stages:
            hidden = stage.model.run_layers(hidden, batch, stage.pool)
        check_logits(stages[1].model.logits(hidden), wanted)
    assert sum(stage.model.weight_bytes for stage in stages) <= whole.model.weight_bytes + config.vocab_size * 32 * 4


def test_no_logits_wanted(tmp_path: Path) -> None:
    """A chunk in the middle of a prompt asks for none."""
    ours, _ = both(VARIANTS["llama"], tmp_path)
    row = ours.row(IDS, len(IDS))
    batch = replace(forward_batch([row], [10]), logit_tokens_L=torch.empty(0, dtype=torch.int64))
    assert ours.model.forward(batch, ours.pool).shape == (0, 97)


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(StartupError, match="GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, Mistral"):
        load_model(tiny_spec(tiny_config("GPT2LMHeadModel")), device=CPU, dtype=torch.float32, quantization="auto")
    with pytest.raises(StartupError, match="activation gelu"):
        load_model(tiny_spec(tiny_config(hidden_act="gelu")), device=CPU, dtype=torch.float32, quantization="auto")
    spec = tiny_spec(tiny_config(rope_scaling=RopeScaling(kind="spiral")))
    with pytest.raises(StartupError, match="rope scaling spiral"):
        load_model(spec, device=CPU, dtype=torch.float32, quantization="auto")
    with pytest.raises(StartupError, match="--quantization"):
        load_model(tiny_spec(tiny_config()), device=CPU, dtype=torch.float32, quantization="int3")
