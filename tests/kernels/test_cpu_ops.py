"""Every op of the CPU table against plain torch, on random shapes, dtypes and page tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcast.kernels import Ops, RaggedRows, select
from radixcast.kernels.cpu.attention import MAX_LOOP_QUERIES
from radixcast.kernels.cpu.ops import CpuOps

CPU = torch.device("cpu")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
dtypes = st.sampled_from([FP32, FP32, BF16, FP16])
tokens = st.sampled_from([1, 2, 3, 4, 5, 8, 17, 40])
seeds = st.integers(0, 2**31)
fast = settings(max_examples=40, deadline=None)

reference, cpu = select(CPU, reference=True), select(CPU)


def drawn(seed: int, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    tolerance = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_tables_of_devices() -> None:
    assert type(cpu) is CpuOps
    assert type(reference) is Ops
    assert type(select(torch.device("cuda"))) is Ops


@fast
@given(tokens, st.sampled_from([8, 36, 576]), dtypes, seeds)
def test_rms_norm(count: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = drawn(seed, count, size, dtype=dtype, scale=3), drawn(seed + 1, size, dtype=dtype)
    check_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residuals = [drawn(seed + 2, count, size, dtype=dtype) for _ in range(2)]
    found = cpu.add_rms_norm_(x, residuals[0], weight, 1e-5)
    check_close(found, reference.add_rms_norm_(x, residuals[1], weight, 1e-5))
    check_close(residuals[0], residuals[1])


def test_rms_norm_of_zeros_and_of_nothing() -> None:
    weight = torch.ones(8)
    assert not cpu.rms_norm(torch.zeros(2, 8), weight, 1e-5).any()
    assert cpu.rms_norm(torch.zeros(0, 8), weight, 1e-5).shape == (0, 8)


@fast
@given(tokens, st.integers(1, 4), st.integers(1, 3), st.sampled_from([4, 16, 64]), dtypes, seeds)
def test_rope_and_kv_write(count: int, group: int, kv_heads: int, size: int, dtype: torch.dtype, seed: int) -> None:
    heads = kv_heads * group
    angle = drawn(seed, count, size // 2, scale=10)
    slots = torch.randperm(count + 5, generator=torch.Generator().manual_seed(seed))[:count]
    results = []
    for ops in (cpu, reference):
        qkv = drawn(seed + 1, count, heads + 2 * kv_heads, size, dtype=dtype)
        pools = [torch.zeros(count + 5, kv_heads, size, dtype=dtype) for _ in range(2)]
        ops.rope_(qkv, angle.cos(), angle.sin(), heads + kv_heads)
        ops.kv_write(qkv, pools[0], pools[1], slots)
        results.append((qkv, *pools))
    for found, wanted in zip(*results, strict=True):
        check_close(found, wanted)
    assert torch.equal(
        results[0][2][slots], drawn(seed + 1, count, heads + 2 * kv_heads, size, dtype=dtype)[:, heads + kv_heads :]
    )


@fast
@given(tokens, st.sampled_from([(6, 8), (7, 8), (32, 24), (33, 100), (576, 192)]), st.booleans(), dtypes, seeds)
def test_linear(count: int, shape: tuple[int, int], bias: bool, dtype: torch.dtype, seed: int) -> None:
    outputs, inputs = shape
    x, weight = drawn(seed, count, inputs, dtype=dtype), drawn(seed + 1, outputs, inputs, dtype=dtype, scale=0.1)
    extra = drawn(seed + 2, outputs, dtype=dtype) if bias else None
    packed = [ops.pack_linear(weight, extra) for ops in (cpu, reference)]
    assert packed[0].nbytes == weight.nbytes + (extra.nbytes if extra is not None else 0)
    check_close(cpu.linear(x, packed[0]), reference.linear(x, packed[1]))
    if outputs % 2 == 0:
        check_close(cpu.gated_linear(x, packed[0]), reference.gated_linear(x, packed[1]))


def test_linear_of_no_rows() -> None:
    for ops in (cpu, reference):
        packed = ops.pack_linear(torch.ones(6, 8), torch.ones(6))
        assert ops.linear(torch.zeros(0, 8), packed).shape == (0, 6)
        assert ops.gated_linear(torch.zeros(0, 8), packed).shape == (0, 3)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_linear_with_any_number_of_threads(threads: int) -> None:
    """The weight is cut by the number of threads, which must not change what it means."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        weight, x = drawn(0, 24, 10), drawn(1, 9, 10)
        packed = cpu.pack_linear(weight)
        check_close(cpu.linear(x, packed), x @ weight.T)
        check_close(cpu.gated_linear(x, packed), reference.silu_mul(x @ weight.T))
    finally:
        torch.set_num_threads(before)


@fast
@given(tokens, st.sampled_from([1, 8, 100]), dtypes, seeds)
def test_silu_mul(count: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x = drawn(seed, count, 2 * size, dtype=dtype, scale=4)
    check_close(cpu.silu_mul(x), reference.silu_mul(x))


def test_silu_mul_far_out() -> None:
    x = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 88.0, 200.0, 1e30, 1.0] + [1.0] * 8])
    check_close(cpu.silu_mul(x), reference.silu_mul(x))


def test_embedding_is_memory_of_its_own() -> None:
    table = drawn(0, 10, 4)
    found = cpu.embedding(torch.tensor([3, 3, 0]), table)
    assert torch.equal(found, table[[3, 3, 0]])
    found.zero_()
    assert table[3].any()


def ragged(shape: list[tuple[int, int]], seed: int) -> tuple[RaggedRows, int]:
    """Rows of (queries, earlier keys), with shuffled slots and wild page-table entries beyond each length."""
    generator = torch.Generator().manual_seed(seed)
    lens = [queries + earlier if queries else 0 for queries, earlier in shape]
    total = sum(lens) + 3
    slots = torch.randperm(total, generator=generator)
    table = torch.full((len(shape), max(*lens, 1) + 2), 2**31 - 1, dtype=torch.int32)
    used = 0
    for row, length in enumerate(lens):
        table[row, :length] = slots[used : used + length]
        used += length
    starts = torch.tensor([0, *(queries for queries, _ in shape)]).cumsum(0).int()
    return RaggedRows(starts, torch.tensor(lens, dtype=torch.int32), table, max(lens)), total


rows_of = st.lists(st.tuples(st.sampled_from([0, 1, 1, 1, 2, 3, 16, 33]), st.integers(0, 70)), min_size=1, max_size=6)


@settings(max_examples=120, deadline=None)
@given(
    rows_of,
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([8, 20, 64]),
    st.sampled_from([None, 1, 5, 32, 500]),
    dtypes,
    seeds,
)
def test_attention(
    shape: list[tuple[int, int]], kv_heads: int, group: int, size: int, window: int | None, dtype: torch.dtype, seed: int
) -> None:
    rows, total = ragged(shape, seed)
    count, heads = int(rows.row_starts[-1]), kv_heads * group
    qkv = drawn(seed + 1, count, heads + 2 * kv_heads, size, dtype=dtype)
    pools = [drawn(seed + i, total, kv_heads, size, dtype=dtype) for i in (2, 3)]
    used = {slot for row, length in enumerate(rows.kv_lens_R.tolist()) for slot in rows.page_table_RL[row, :length].tolist()}
    for pool in pools:  # what no row owns must not matter, whatever it is
        pool[[slot for slot in range(total) if slot not in used]] = float("nan")
    found, wanted = (
        ops.attention(qkv, pools[0], pools[1], ops.plan_attention(rows, window, dtype), size**-0.5) for ops in (cpu, reference)
    )
    check_close(found, wanted)


@pytest.mark.parametrize("count", [MAX_LOOP_QUERIES, MAX_LOOP_QUERIES + 1])
def test_attention_with_huge_scores(count: int) -> None:
    rows, total = ragged([(count, 40)], 0)
    qkv = drawn(0, count, 3, 8, scale=1e3)
    pools = [drawn(i, total, 1, 8, scale=1e3) for i in (1, 2)]
    found, wanted = (
        ops.attention(qkv, pools[0], pools[1], ops.plan_attention(rows, None, FP32), 1.0) for ops in (cpu, reference)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_reference_attention_against_torch() -> None:
    """The definition of right, once against somebody else's."""
    rows, total = ragged([(7, 0)], 0)
    qkv = drawn(0, 7, 6 + 2 * 2, 16)
    pools = [torch.zeros(total, 2, 16) for _ in range(2)]
    reference.kv_write(qkv, pools[0], pools[1], rows.page_table_RL[0, :7].long())
    found = reference.attention(qkv, pools[0], pools[1], reference.plan_attention(rows, None, FP32), 0.25)
    q, k, v = (qkv[:, heads].transpose(0, 1)[None] for heads in (slice(6), slice(6, 8), slice(8, 10)))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(found, wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_warm_up(dtype: torch.dtype) -> None:
    for ops in (cpu, reference):
        ops.warm_up(dtype, 9, 3, 64)
