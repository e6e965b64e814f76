"""RMSNorm (Zhang and Sennrich 2019) as Llama computes it."""

from __future__ import annotations

import torch


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) in fp32, rounded to x's dtype, times weight. Any leading shape; returns x's shape and dtype."""
    x = x_TH.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return weight_H * x.to(x_TH.dtype)


def add_rms_norm_(x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; returns rms_norm(residual)."""
    residual_TH += x_TH
    return rms_norm(residual_TH, weight_H, eps)
