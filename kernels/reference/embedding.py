"""Token embedding."""

from __future__ import annotations

import torch


def embedding(ids_T: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Rows of the table -> [T, H], in memory of its own. Ids (int64) must be in [0, V)."""
    return weight_VH.index_select(0, ids_T)
