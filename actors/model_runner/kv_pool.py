"""The paged KV pool: where the keys and values of every cached token are, and how many fit.

A slot holds one token's keys and values in every layer. Who owns which slot is the scheduler's knowledge, not ours.
"""

from __future__ import annotations

from pathlib import Path

import torch

from radixcast.actors.model_runner.placement import resolve_dtype
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig
from radixcast.protocols.server_args import ServerArgs

CPU_POOL_LIMIT = 4 << 30
"""Bytes that the pool takes on a CPU at most, unless told otherwise."""
CUDA_FRACTION = 0.88
MIN_TOKENS = 256
"""A pool that is sized from memory and would be smaller is refused."""


class KVPool:
    """Keys and values of `num_slots` tokens, for the layers of this rank.

    Memory is reserved, not touched: pages of the operating system come with the first write. A slot's content is undefined
    until it is written, and attention reads written slots only.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        layers: range | None = None,
    ) -> None:
        shape = (num_slots, config.num_kv_heads, config.head_dim)
        self.num_slots = num_slots
        self.dtype = dtype
        self.layers = range(config.num_layers) if layers is None else layers
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in self.layers]
        """Of each layer: [num_slots, num_kv_heads, head_dim]."""
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in self.layers]

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one slot in all layers of the model."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def size_pool(args: ServerArgs, config: ModelConfig, device: torch.device, weight_bytes: int) -> int:
    """Slots of the pool: whole pages, from --max-total-tokens, else from --mem-fraction-static, else half of the free memory
    (CPU, at most CPU_POOL_LIMIT) or CUDA_FRACTION of the device.

    Call it when the weights are loaded. Raises StartupError when that leaves no sensible pool.
    """
    page = args.page_size
    if args.max_total_tokens is not None:
        slots = args.max_total_tokens // page * page
        if slots == 0:
            raise StartupError(f"--max-total-tokens {args.max_total_tokens} is less than one page (--page-size {page})")
        return slots
    per_token = KVPool.bytes_per_token(config, resolve_dtype(args, config, device))
    room = _cpu_room(args, weight_bytes) if device.type == "cpu" else _cuda_room(args, device, weight_bytes)
    slots = max(room, 0) // per_token // page * page
    if slots < max(MIN_TOKENS, page):
        raise StartupError(
            f"{max(room, 0) >> 20} MiB are left for the KV pool, room for {slots} tokens; "
            f"set --max-total-tokens ({per_token} bytes a token) or raise --mem-fraction-static"
        )
    return slots


def _cpu_room(args: ServerArgs, weight_bytes: int) -> int:
    memory = host_memory()
    if args.mem_fraction_static is None:
        return min(memory.available // 2, CPU_POOL_LIMIT)
    return min(int(memory.total * args.mem_fraction_static) - weight_bytes, memory.available)


def _cuda_room(args: ServerArgs, device: torch.device, weight_bytes: int) -> int:
    free, total = torch.cuda.mem_get_info(device)
    fraction = CUDA_FRACTION if args.mem_fraction_static is None else args.mem_fraction_static
    return min(int(total * fraction) - weight_bytes, free)


class HostMemory:
    """Bytes of RAM that this process may have, and that are free now; a container's limit counts."""

    def __init__(self, total: int, available: int) -> None:
        self.total = total
        self.available = available


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read /proc/meminfo and the cgroup limits (v2, then v1) below `root`. Raises StartupError where there is no meminfo."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError as error:
        raise StartupError(f"can't read the size of the memory ({error}); set --max-total-tokens") from None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    total, available = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    for limit_file, used_file in _cgroup_files(root):
        limit, used = _read_bytes(limit_file), _read_bytes(used_file)
        if limit is not None and limit < total:
            total = limit
            available = min(available, limit - (used or 0))
    return HostMemory(total, max(available, 0))


def _cgroup_files(root: Path) -> list[tuple[Path, Path]]:
    """(limit, usage) files of this process's cgroup and of those above it."""
    pairs = []
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        entries = []
    base = root / "sys/fs/cgroup"
    for entry in [*entries, "0::/"]:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            folder = base / path.lstrip("/")
            pairs += [(f / "memory.max", f / "memory.current") for f in (folder, *folder.parents) if f.is_relative_to(base)]
        elif "memory" in controllers.split(","):
            for folder in (base / "memory" / path.lstrip("/"), base / "memory"):
                pairs.append((folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"))
    return pairs


def _read_bytes(path: Path) -> int | None:
    """The number in a file; None where there is no file or it says 'max'."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
