"""The KV pool's size: from flags, from memory, from a container's limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes.tiny_hf import tiny_config
from radixcast.actors.model_runner import kv_pool
from radixcast.actors.model_runner.kv_pool import CPU_POOL_LIMIT, HostMemory, KVPool, host_memory, size_pool
from radixcast.actors.model_runner.placement import resolve_device, resolve_dtype
from radixcast.protocols.errors import StartupError
from radixcast.protocols.server_args import ServerArgs

CPU = torch.device("cpu")
CONFIG = tiny_config()
PER_TOKEN = 2 * 3 * 2 * 8 * 4
GIB = 1 << 30


def test_bytes_per_token_are_what_a_pool_takes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pool = KVPool(CONFIG, 10, dtype, CPU)
        assert sum(t.nbytes for t in (*pool.k, *pool.v)) == 10 * KVPool.bytes_per_token(CONFIG, dtype)
        assert {tuple(t.shape) for t in (*pool.k, *pool.v)} == {(10, 2, 8)}
    assert KVPool.bytes_per_token(CONFIG, torch.float32) == PER_TOKEN
    assert len(KVPool(CONFIG, 10, torch.float32, CPU, layers=range(1, 3)).k) == 2


def test_max_total_tokens_are_cut_to_whole_pages() -> None:
    assert size_pool(ServerArgs(max_total_tokens=1000), CONFIG, CPU, 0) == 1000
    assert size_pool(ServerArgs(max_total_tokens=1000, page_size=64), CONFIG, CPU, 0) == 960
    with pytest.raises(StartupError, match="less than one page"):
        size_pool(ServerArgs(max_total_tokens=10, page_size=16), CONFIG, CPU, 0)


def memory(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    monkeypatch.setattr(kv_pool, "host_memory", lambda: HostMemory(total, available))


def test_half_of_what_is_free_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 16 * GIB, 2 * GIB)
    assert size_pool(ServerArgs(), CONFIG, CPU, 123) == GIB // PER_TOKEN
    assert size_pool(ServerArgs(page_size=1000), CONFIG, CPU, 123) == GIB // PER_TOKEN // 1000 * 1000
    assert size_pool(ServerArgs(dtype="bfloat16"), CONFIG, CPU, 123) == 2 * GIB // PER_TOKEN
    memory(monkeypatch, 64 * GIB, 60 * GIB)
    assert size_pool(ServerArgs(), CONFIG, CPU, 0) == CPU_POOL_LIMIT // PER_TOKEN


def test_a_fraction_covers_weights_and_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 16 * GIB, 12 * GIB)
    assert size_pool(ServerArgs(mem_fraction_static=0.5), CONFIG, CPU, GIB) == 7 * GIB // PER_TOKEN
    assert size_pool(ServerArgs(mem_fraction_static=1.0), CONFIG, CPU, GIB) == 12 * GIB // PER_TOKEN
    with pytest.raises(StartupError, match=r"0 MiB are left .* set --max-total-tokens"):
        size_pool(ServerArgs(mem_fraction_static=0.05), CONFIG, CPU, GIB)


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, GIB, 0)
    with pytest.raises(StartupError, match="left for the KV pool"):
        size_pool(ServerArgs(), CONFIG, CPU, 0)


def system(root: Path, **files: str) -> Path:
    """A fake root folder; '__' in a key stands for a slash, '_dot_' for a dot."""
    defaults = {
        "proc__meminfo": "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:   600 kB\n",
        "proc__self__cgroup": "0::/a/b\n",
    }
    for key, text in {**defaults, **files}.items():
        path = root / key.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_host_memory(tmp_path: Path) -> None:
    found = host_memory(system(tmp_path))
    assert (found.total, found.available) == (1000 << 10, 600 << 10)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    limits = {
        "sys__fs__cgroup__a__b__memory_dot_max": "max\n",
        "sys__fs__cgroup__a__memory_dot_max": f"{400 << 10}\n",
        "sys__fs__cgroup__a__memory_dot_current": f"{100 << 10}\n",
    }
    found = host_memory(system(tmp_path, **limits))
    assert (found.total, found.available) == (400 << 10, 300 << 10)


def test_a_limit_of_the_first_cgroups(tmp_path: Path) -> None:
    limits = {
        "proc__self__cgroup": "4:cpu:/x\n3:memory:/docker/1\n",
        "sys__fs__cgroup__memory__memory_dot_limit_in_bytes": f"{200 << 10}",
        "sys__fs__cgroup__memory__memory_dot_usage_in_bytes": f"{300 << 10}",
    }
    found = host_memory(system(tmp_path, **limits))
    assert (found.total, found.available) == (200 << 10, 0)


def test_no_meminfo(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="set --max-total-tokens"):
        host_memory(tmp_path)


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert 0 < found.available <= found.total


def test_devices_and_dtypes() -> None:
    assert resolve_device(ServerArgs(device="cpu")) == CPU
    assert resolve_device(ServerArgs()).type in ("cpu", "cuda")
    for wrong in ("gpu", "cuda:77", "meta"):
        with pytest.raises(StartupError, match="--device"):
            resolve_device(ServerArgs(device=wrong))
    assert resolve_dtype(ServerArgs(), tiny_config(torch_dtype="bfloat16"), CPU) is torch.float32
    assert resolve_dtype(ServerArgs(), tiny_config(torch_dtype="float16"), torch.device("cuda")) is torch.float16
    assert resolve_dtype(ServerArgs(dtype="bfloat16"), CONFIG, CPU) is torch.bfloat16
