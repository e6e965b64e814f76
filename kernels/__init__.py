"""Tensors in, tensors out: plain torch (`reference`: the definition of right), Numba and torch for the CPU (`cpu`), and
Triton for CUDA (`triton`, yet to come). `select` picks the op table of a device.

Layer 1: imports torch, numba and numpy only.
"""

from __future__ import annotations

import torch

from radixcast.kernels.cpu.ops import CpuOps
from radixcast.kernels.ops import Ops, PackedLinear, RaggedRows

__all__ = ["Ops", "PackedLinear", "RaggedRows", "select"]


def select(device: torch.device, *, reference: bool = False) -> Ops:
    """The fastest op table for `device`; plain torch where there is none, or when `reference` asks for it."""
    if device.type == "cpu" and not reference:
        return CpuOps()
    return Ops()
