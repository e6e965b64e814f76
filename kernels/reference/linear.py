"""Matrix products with a weight."""

from __future__ import annotations

import torch


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias -> [T, O], in the common dtype of x and weight."""
    return torch.nn.functional.linear(x_TI, weight_OI, bias_O)
