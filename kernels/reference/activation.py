"""SwiGLU's activation (Shazeer 2020)."""

from __future__ import annotations

import torch


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, where gate and up are the halves of the last axis -> [T, I]."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
