"""Rotary position embedding (Su et al. 2021), half layout."""

from __future__ import annotations

import torch


def rope_(qkv_TAD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of each token in place, in fp32.

    For pair (a, b) = (x[i], x[i + D/2]):  a' = a·cos - b·sin;  b' = b·cos + a·sin.
    """
    a, b = qkv_TAD[:, :heads].float().chunk(2, dim=-1)
    cos, sin = cos_TC[:, None], sin_TC[:, None]
    qkv_TAD[:, :heads] = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv_TAD.dtype)
