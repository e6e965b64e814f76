"""GGUF files: the header reader against the real writer, the description, and the tokenizer against transformers'."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fakes.gguf_file import CORPUS, write_gguf
from radixcast.models.gguf_config import CONVERSION, describe_gguf, llama3_divisors
from radixcast.models.gguf_metadata import read_header
from radixcast.models.gguf_tokenizer import byte_alphabet
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec, RopeScaling

GREEDY = Path(__file__).resolve().parents[1] / "data" / "smollm2_greedy.jsonl"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("RADIXCAST_CACHE", str(folder))
    return folder


# -- header


def test_header_holds_what_the_writer_wrote(tmp_path: Path) -> None:
    fields = {"x.flag": True, "x.float": 0.5, "x.text": "héllo", "x.list": [1, -2, 3], "x.words": ["a", "", "你好"]}
    header = read_header(write_gguf(tmp_path / "m.gguf", fields=fields))
    assert {key: header.metadata[key] for key in fields} == fields
    assert header.metadata["general.architecture"] == "llama"
    info = header.tensors["token_embd.weight"]
    assert info.shape[0] == 32
    assert info.ggml_type == 1


def test_tensor_data_is_where_the_header_says(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors={"some.weight": values})
    header = read_header(path)
    info = header.tensors["some.weight"]
    assert np.array_equal(np.fromfile(path, "<f4", 8, offset=header.data_start + info.offset), values)


def test_a_file_cut_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    end = read_header(path).data_start
    broken = tmp_path / "broken.gguf"
    for size in [1, 4, 11, 23, 24, 30, *range(40, end - 40, max(1, end // 60))]:
        broken.write_bytes(data[:size])
        with pytest.raises(StartupError, match=r"broken\.gguf is not a readable GGUF file"):
            read_header(broken)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_corrupt_bytes_never_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp()
    base = folder / "base.gguf"
    if not base.exists():
        write_gguf(base, kind="llama")
    content = bytearray(base.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, 2000))
        content[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    broken = folder / "corrupt.gguf"
    broken.write_bytes(content)
    with contextlib.suppress(StartupError):
        read_header(broken)


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04", b"GGUF" + struct.pack("<IQQ", 1, 0, 0), b"GGUF" + struct.pack(">IQQ", 3, 0, 0)]
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(StartupError, match="not a readable GGUF"):
        read_header(path)


# -- description


def describe(path: Path) -> Any:
    return describe_gguf(path, name=path.stem)


def test_llama_description(tmp_path: Path) -> None:
    found = describe(write_gguf(tmp_path / "m.gguf"))
    config = found.config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 2, 4, 2, 8)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_interleaved
    assert config.tie_word_embeddings
    assert not config.attention_bias
    assert config.torch_dtype == "float16"
    assert found.context_length == 256
    assert found.eos_token_ids == (2,)
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert not found.add_bos
    assert found.weight_files == (str(tmp_path / "m.gguf"),)


def test_qwen2_description(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    fields = {"tokenizer.ggml.padding_token_id": 0}
    path = write_gguf(tmp_path / "m.gguf", arch="qwen2", pre="qwen2", tensors=bias, tied=False, fields=fields)
    found = describe(path)
    assert found.config.architecture == "Qwen2ForCausalLM"
    assert found.config.attention_bias
    assert not found.config.output_bias
    assert not found.config.rope_interleaved
    assert not found.config.tie_word_embeddings
    assert found.eos_token_ids == (2, 0), "Qwen's pad token <|endoftext|> ends an answer too"


def test_end_of_turn_tokens_end_answers(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5}
    found = describe(write_gguf(tmp_path / "m.gguf", fields=fields))
    assert found.eos_token_ids == (0, 5, 2)


def test_add_bos_follows_the_flag_and_else_the_vocabulary(tmp_path: Path) -> None:
    def adds(name: str, **options: Any) -> bool:
        return bool(describe(write_gguf(tmp_path / f"{name}.gguf", **options)).add_bos)

    assert adds("spm", kind="llama")
    assert adds("llama3", pre="llama-bpe")
    assert not adds("gpt2")
    assert adds("told", fields={"tokenizer.ggml.add_bos_token": True})
    assert not adds("told-not", kind="llama", fields={"tokenizer.ggml.add_bos_token": False})


def test_rope_scaling_keys(tmp_path: Path) -> None:
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    found = describe(write_gguf(tmp_path / "yarn.gguf", fields=yarn))
    assert found.config.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_context=128)
    assert found.context_length == 512
    linear = describe(write_gguf(tmp_path / "linear.gguf", fields={"llama.rope.scale_linear": 2.0}))
    assert linear.config.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert linear.context_length == 512
    none = describe(write_gguf(tmp_path / "none.gguf", fields={"llama.rope.scaling.type": "none"}))
    assert none.config.rope_scaling == RopeScaling()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_divisors_are_recognised(tmp_path: Path, factor: float) -> None:
    scaling = RopeScaling(kind="llama3", factor=factor, original_context=8192)
    divisors = llama3_divisors(scaling, 500000.0, 128).astype(np.float32)
    assert divisors[0] == 1
    fields = {"llama.rope.freq_base": 500000.0, "llama.rope.dimension_count": 128, "llama.attention.key_length": 128}
    path = write_gguf(tmp_path / "m.gguf", fields=fields, tensors={"rope_freqs.weight": divisors})
    assert describe(path).config.rope_scaling == scaling
    other = write_gguf(tmp_path / "o.gguf", fields=fields, tensors={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(StartupError, match="rope_freqs"):
        describe(other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arch": "gemma3"}, "gemma3.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
        ({"fields": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"fields": {"llama.rope.dimension_count": 4}}, "partial rotary"),
        ({"fields": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
        ({"drop": ["llama.block_count"]}, "block_count"),
        ({"fields": {"split.count": 2}}, "one of 2 parts"),
    ],
)
def test_what_is_not_supported_is_told(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        describe(write_gguf(tmp_path / "m.gguf", **options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fields": {"tokenizer.ggml.model": "bert"}}, r"bert.*--tokenizer-path"),
        ({"drop": ["tokenizer.ggml.tokens"]}, "no vocabulary"),
        ({"drop": ["tokenizer.ggml.merges"]}, "without merges"),
    ],
)
def test_a_vocabulary_that_is_no_use_is_told(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    found = describe(write_gguf(tmp_path / "m.gguf", **options))
    assert found.tokenizer_file is None
    assert re.search(said, found.tokenizer_problem)


def test_split_files(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", fields={"split.count": 2})
    with pytest.raises(StartupError, match=r"m-00002-of-00002\.gguf is missing"):
        describe(first)
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", fields={"split.count": 2})
    assert describe(first).weight_files == (str(first), str(second))
    with pytest.raises(StartupError, match="give the first part"):
        describe(second)


# -- cache


def test_a_conversion_is_reused_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    found = describe(path)
    assert Path(found.tokenizer_file).is_relative_to(cache)
    stamp = Path(found.tokenizer_file).stat().st_mtime_ns
    assert describe(path) == found
    assert Path(found.tokenizer_file).stat().st_mtime_ns == stamp
    write_gguf(path, fields={"llama.context_length": 1024})
    assert describe(path).context_length == 1024


def test_a_warm_start_does_not_read_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    found = describe(path)
    stamp = path.stat().st_mtime_ns
    path.write_bytes(b"\xff" * path.stat().st_size)
    os.utime(path, ns=(stamp, stamp))
    assert describe(path) == found


def test_a_damaged_or_older_cache_is_made_anew(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    found = describe(path)
    record = Path(found.tokenizer_file).with_name("description.json")
    for damage in (b"{", b"{}", record.read_bytes().replace(b'"version":%d' % CONVERSION, b'"version":0')):
        record.write_bytes(damage)
        assert describe(path) == found
        assert json.loads(record.read_bytes())["version"] == CONVERSION
    Path(found.tokenizer_file).unlink()
    assert describe(path) == found
    assert Path(found.tokenizer_file).exists()


def test_a_cache_that_cannot_be_made_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RADIXCAST_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StartupError, match=r"can't cache the converted tokenizer: .*RADIXCAST_CACHE"):
        describe(write_gguf(tmp_path / "m.gguf"))


# -- tokenizer

TEXTS = [
    CORPUS,
    "",
    "a",
    " a",
    "  a\n\n b",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>x</s> y <unk>",
    "12345 67  8",
    "Ünïcödé ½ ² ١٢",
    "'ll 'LL I'm DON'T",
    "\t\t x \r\n\r\n",
    "e\u0301 é ﬁ",
    "🎉🎉👩‍👩‍👧",
    "▁x",
    "\x00\x7f\ufeff",
    "x" * 200,
]


def tokens(path: Path) -> Tokenizer:
    return Tokenizer.from_file(describe(path).tokenizer_file)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("kind", "pre"), [("gpt2", "smollm"), ("gpt2", "qwen2"), ("llama", "default")])
def test_text_survives_the_round_trip(tmp_path: Path, kind: str, pre: str, text: str) -> None:
    tokenizer = tokens(write_gguf(tmp_path / "m.gguf", kind=kind, pre=pre))
    expected = text.replace("▁", " ") if kind == "llama" else text
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False).strip() == expected.strip()


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.token_type": [3, 3, 4, *[1] * 497]}
    tokenizer = tokens(write_gguf(tmp_path / "m.gguf", fields=fields))
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>").ids
    assert ids.count(1) == ids.count(2) == 1
    assert tokenizer.decode(ids) == "ab<|im_end|>"


def test_byte_alphabet_is_one_to_one() -> None:
    table = byte_alphabet()
    assert len(set(table.values())) == len(table) == 256
    assert table[ord("a")] == "a"
    assert table[ord(" ")] == "Ġ"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pre"),
    [("llama", "default"), *(("gpt2", pre) for pre in ("smollm", "default", "llama-bpe", "qwen2", "tekken", "megrez"))],
)
def test_encodes_as_transformers_does(tmp_path: Path, kind: str, pre: str) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "m.gguf", kind=kind, pre=pre)
    reference = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    _compare(tokens(path), reference, [*TEXTS, *_many_texts()])


@pytest.mark.slow
def test_the_embedded_model_encodes_as_transformers_does(smollm2_spec: ModelSpec) -> None:
    from transformers import AutoTokenizer

    path = Path(smollm2_spec.weight_files[0])
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    assert smollm2_spec.tokenizer_file is not None
    _compare(Tokenizer.from_file(smollm2_spec.tokenizer_file), reference, [*TEXTS, *_many_texts()])


def _many_texts() -> list[str]:
    """Every assigned character of the first two planes, in three surroundings, a hundred to a text."""
    characters = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    groups = [characters[i : i + 100] for i in range(0, len(characters), 100)]
    return [joint.join(group) for group in groups for joint in ("", " ", "a")]


def _compare(ours: Tokenizer, reference: Any, texts: list[str]) -> None:
    backend = reference.backend_tokenizer
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text, add_special_tokens=False), text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


# -- the real file


def test_the_embedded_model_is_described_in_full(smollm2_spec: ModelSpec) -> None:
    config = smollm2_spec.config
    assert smollm2_spec.name == smollm2_spec.path == "smollm2"
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (49152, 576, 1536, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 100000.0)
    assert config.rope_interleaved
    assert config.tie_word_embeddings
    assert smollm2_spec.context_length == 8192
    assert smollm2_spec.eos_token_ids == (2,)
    assert (smollm2_spec.bos_token_id, smollm2_spec.bos_token, smollm2_spec.eos_token) == (1, "<|im_start|>", "<|im_end|>")
    assert not smollm2_spec.add_bos
    assert smollm2_spec.chat_template is not None
    assert "add_generation_prompt" in smollm2_spec.chat_template


def test_the_embedded_tokenizer_gives_the_reference_ids(smollm2_spec: ModelSpec) -> None:
    assert smollm2_spec.tokenizer_file is not None
    tokenizer = Tokenizer.from_file(smollm2_spec.tokenizer_file)
    rows = [json.loads(line) for line in GREEDY.read_text().splitlines()]
    assert len(rows) == 20
    for row in rows:
        assert tokenizer.encode(row["prompt_text"]).ids == row["prompt_ids"], row["id"]
