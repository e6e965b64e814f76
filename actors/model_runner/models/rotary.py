"""Rotary frequencies with every scaling kind of the Llama family, and a growing table of their cosines and sines.

Formulas are those of transformers' modeling_rope_utils, in the same order of fp32 operations. One differs on purpose: with
`dynamic` scaling transformers rotates a whole prompt by its total length; here a token's angle depends on its own position
alone (as it does in transformers when it decodes token by token), so that chunks and cached prefixes give the same result.
"""

from __future__ import annotations

import math

import torch

from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig, RopeScaling

_FIRST_ROWS = 2048


class RotaryTable:
    """cos and sin of every position so far asked for, fp32, on the model's device."""

    def __init__(self, config: ModelConfig, device: torch.device, factors_C: torch.Tensor | None = None) -> None:
        """`factors_C`: divisors of the frequencies from a GGUF file; used when the config names no scaling itself."""
        self._config = config
        self._device = device
        self._divisor_C = factors_C.cpu().float() if factors_C is not None and config.rope_scaling.kind == "none" else None
        self._scale = attention_scale(config.rope_scaling)
        self._cos_PC = self._sin_PC = torch.empty((0, config.head_dim // 2), device=device)
        self._grow(_FIRST_ROWS)

    def rows(self, positions_T: torch.Tensor, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of each position, fp32 [T, head_dim / 2]. `max_position`: no position is larger."""
        if max_position >= len(self._cos_PC):
            self._grow(max_position + 1)
        return self._cos_PC.index_select(0, positions_T), self._sin_PC.index_select(0, positions_T)

    def _grow(self, rows: int) -> None:
        """Compute the table anew, for twice as many positions as before until `rows` are there."""
        size = _FIRST_ROWS
        while size < rows:
            size *= 2
        angles_PC = self._angles(size)
        self._cos_PC = (angles_PC.cos() * self._scale).to(self._device)
        self._sin_PC = (angles_PC.sin() * self._scale).to(self._device)

    def _angles(self, rows: int) -> torch.Tensor:
        positions_P1 = torch.arange(rows, dtype=torch.float32)[:, None]
        if self._config.rope_scaling.kind == "dynamic":
            return positions_P1 * _dynamic_frequencies(self._config, rows)
        frequencies_C = inverse_frequencies(self._config)
        if self._divisor_C is not None:
            frequencies_C = frequencies_C / self._divisor_C
        return positions_P1 * frequencies_C


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians a position, fp32 [head_dim / 2] on the CPU; for `dynamic` those within the trained context.

    Raises StartupError for an unknown scaling kind.
    """
    scaling = config.rope_scaling
    plain_C = _plain(config.rope_theta, config.head_dim)
    if scaling.kind in ("none", "dynamic"):
        return plain_C
    if scaling.kind == "linear":
        return plain_C / scaling.factor
    original = scaling.original_context or config.max_position_embeddings
    if scaling.kind == "llama3":
        return _llama3(plain_C, scaling, original)
    if scaling.kind == "yarn":
        return _yarn(config, scaling, original)
    raise StartupError(f"rope scaling {scaling.kind} is unknown; known are none, linear, dynamic, llama3 and yarn")


def attention_scale(scaling: RopeScaling) -> float:
    """What yarn multiplies cos and sin by; 1 for the other kinds."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    """1 / theta^(2i / d)."""
    return 1.0 / (theta ** _exponents(head_dim))


def _llama3(plain_C: torch.Tensor, scaling: RopeScaling, original: int) -> torch.Tensor:
    """Long wavelengths stretched by `factor`, short ones kept, a linear blend between (Llama 3.1)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength_C = 2 * math.pi / plain_C
    stretched_C = torch.where(wavelength_C > original / low, plain_C / scaling.factor, plain_C)
    blend_C = (original / wavelength_C - low) / (high - low)
    smooth_C = (1 - blend_C) * stretched_C / scaling.factor + blend_C * stretched_C
    between_C = (wavelength_C >= original / high) & (wavelength_C <= original / low)
    return torch.where(between_C, smooth_C, stretched_C)


def _yarn(config: ModelConfig, scaling: RopeScaling, original: int) -> torch.Tensor:
    """Interpolate pairs that turn seldom within the trained context, keep those that turn often (Peng et al. 2023)."""
    size, theta = config.head_dim, config.rope_theta

    def pair_turning(times: float) -> float:
        return size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_turning(scaling.beta_slow)), size - 1)
    width = high - low if high != low else 0.001
    keep_C = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers_C = theta ** _exponents(size)
    return 1.0 / (scaling.factor * powers_C) * (1 - keep_C) + 1.0 / powers_C * keep_C


def _dynamic_frequencies(config: ModelConfig, rows: int) -> torch.Tensor:
    """NTK-aware scaling: the base grows with the position once that is beyond the trained context -> [rows, head_dim / 2]."""
    size, trained, factor = config.head_dim, config.max_position_embeddings, config.rope_scaling.factor
    length_P1 = torch.arange(1, rows + 1, dtype=torch.float64)[:, None].clamp(min=trained)
    growth_P1 = (factor * length_P1 / trained - (factor - 1)) ** (size / (size - 2))
    base_P1 = (config.rope_theta * growth_P1).float()
    return 1.0 / (base_P1 ** _exponents(size))
