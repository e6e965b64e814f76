"""The GGUF directory and its block decoders against the `gguf` package's writer and decoders."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcast.actors.model_runner import gguf_file
from radixcast.actors.model_runner.gguf_file import GGUFFile, decode_into
from radixcast.protocols.errors import StartupError

Kind = GGMLQuantizationType
FAST = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0]


def random_blocks(kind: Kind, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Any bits but for the scales: fp16 numbers from tiny to large, infinities and NaN left out."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    scales = (generator.standard_normal((rows, blocks, 2)) * 10.0 ** generator.integers(-7, 4, (rows, blocks, 2))).astype(
        np.float16
    )
    count = 4 if kind is Kind.Q4_1 else 2
    data[..., :count] = scales.view(np.uint8)[..., :count]
    return data.reshape(rows, -1)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FAST), st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**31))
def test_fast_decoders_give_the_bits_of_gguf(kind: Kind, rows: int, blocks: int, seed: int) -> None:
    raw = random_blocks(kind, rows, blocks, seed)
    out = torch.empty(rows, blocks * 32)
    decode_into(raw, kind, out)
    wanted = dequantize(raw, kind)
    assert np.array_equal(out.numpy().view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("kind", FAST)
def test_decoding_in_pieces(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_PIECE", 7)
    raw = random_blocks(kind, 10, 3, 0)
    out = torch.empty(10, 96)
    decode_into(raw, kind, out)
    assert np.array_equal(out.numpy(), dequantize(raw, kind))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q5_0, Kind.Q5_1, Kind.IQ4_NL, *FAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_into_every_dtype(kind: Kind, dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    try:
        raw = quantize(values, kind).view(np.uint8).reshape(4, -1)
    except NotImplementedError:
        raw = random_blocks(kind, 4, 2, 0)
    out = torch.empty(4, 64, dtype=dtype)
    decode_into(raw, kind, out)
    typed = raw.view({Kind.F32: np.float32, Kind.F16: np.float16}.get(kind, np.uint8))
    assert torch.equal(out, torch.from_numpy(np.array(dequantize(typed, kind))).to(dtype))


def test_kinds_that_nobody_decodes() -> None:
    with pytest.raises(StartupError, match="type I8 can't be decoded"):
        decode_into(np.zeros((1, 32), np.uint8), Kind.I8, torch.empty(1, 32))


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind | None]], alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_string("a.string", "x" * 1000)
    writer.add_array("strings", ["", "ü", "long " * 50])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("flags", [True, False])
    writer.add_float64("a.double", 0.5)
    writer.add_uint8("a.byte", 7)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64, 256])
def test_directory(alignment: int | None, tmp_path: Path) -> None:
    plain = np.arange(15, dtype=np.float32).reshape(3, 5)
    vector = np.arange(6, dtype=np.float16)
    blocks = random_blocks(Kind.Q4_1, 6, 2, 0)
    path = write(tmp_path / "x.gguf", {"p": (plain, None), "v": (vector, None), "q": (blocks, Kind.Q4_1)}, alignment)
    file = GGUFFile(path)
    assert {name: (t.shape, t.kind) for name, t in file.tensors.items()} == {
        "p": ((3, 5), Kind.F32),
        "v": ((6,), Kind.F16),
        "q": ((6, 64), Kind.Q4_1),
    }
    out = torch.empty(3, 5)
    file.read_into(file.tensors["p"], out)
    assert torch.equal(out, torch.from_numpy(plain))
    order = torch.tensor([5, 0, 4, 1, 3, 2])
    for name, wanted in (("v", vector.astype(np.float32)), ("q", dequantize(blocks, Kind.Q4_1))):
        out = torch.empty(wanted.shape)
        file.read_into(file.tensors[name], out, order)
        assert torch.equal(out, torch.from_numpy(wanted)[order])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_are_startup_errors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut anywhere or with bytes changed in the header, a file is read as before or refused; nothing else."""
    folder = tmp_path_factory.getbasetemp()
    path = folder / "damaged.gguf"
    good = folder / "good.gguf"
    if not good.exists():
        write(good, {"p": (np.zeros((3, 5), np.float32), None)})
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        file = GGUFFile(path)
    except StartupError:
        return
    for tensor in file.tensors.values():
        file.raw(tensor)


def test_files_that_are_not_there_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="can't read"):
        GGUFFile(tmp_path / "none.gguf")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(StartupError, match="can't read"):
        GGUFFile(empty)
    empty.write_bytes(b"PK\x03\x04" * 20)
    with pytest.raises(StartupError, match="no valid GGUF file: the magic number is missing"):
        GGUFFile(empty)
