"""Writing keys and values into the paged pool."""

from __future__ import annotations

import torch


def kv_write(qkv_TAD: torch.Tensor, k_pool_SKD: torch.Tensor, v_pool_SKD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """pool[slots[t]] = the k (v) heads of token t. Slots (int64 [T]) are distinct; pool and tokens share a dtype."""
    kv_heads = k_pool_SKD.shape[1]
    first = qkv_TAD.shape[1] - 2 * kv_heads
    k_pool_SKD[slots_T] = qkv_TAD[:, first : first + kv_heads]
    v_pool_SKD[slots_T] = qkv_TAD[:, first + kv_heads :]
