"""Grammar masks in plain torch: which tokens may be drawn, one bit each.

Bit v % 32 of word v // 32 is token v; bits beyond the vocabulary don't count. Shape letters: S rows of logits, N of them
masked, V vocabulary, W = ceil(V / 32) words, K gathered tokens.
"""

from __future__ import annotations

import torch


def apply_bitmask_(logits_SV: torch.Tensor, at_N: torch.Tensor, mask_NW: torch.Tensor) -> None:
    """logits[at[n], v] = -inf where bit v of mask[n] is 0, in place; other rows are not touched.

    logits_SV: any float type; at_N: int64, each at most once; mask_NW: int32. All on one device.
    """
    blocked_NV = ~unpack_bits(mask_NW, logits_SV.shape[1])
    logits_SV.index_copy_(0, at_N, logits_SV.index_select(0, at_N).masked_fill_(blocked_NV, -torch.inf))


def gather_allowed(
    logits_SV: torch.Tensor, at_N: torch.Tensor, mask_NW: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the allowed tokens of rows `at`, and the ids of those tokens, ascending: both [N, width].

    Behind a row's last allowed token: -inf, and id 0. Raises IndexError when a row allows more than `width` tokens.
    """
    allowed_NV = unpack_bits(mask_NW, logits_SV.shape[1])
    n, ids = allowed_NV.nonzero(as_tuple=True)
    place = (allowed_NV.cumsum(dim=1) - 1)[n, ids]
    values_NK = logits_SV.new_full((len(at_N), width), -torch.inf)
    ids_NK = at_N.new_zeros((len(at_N), width))
    values_NK[n, place] = logits_SV[at_N[n], ids]
    ids_NK[n, place] = ids
    return values_NK, ids_NK


def unpack_bits(mask_NW: torch.Tensor, vocab: int) -> torch.Tensor:
    """int32 [N, W] -> bool [N, V]."""
    bits = torch.arange(32, dtype=torch.int32, device=mask_NW.device)
    return ((mask_NW[:, :, None] >> bits) & 1).flatten(1)[:, :vocab].bool()
