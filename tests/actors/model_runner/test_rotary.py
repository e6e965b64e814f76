"""The table of rotary angles: it grows, and a row depends on its position alone."""

from __future__ import annotations

import pytest
import torch

from fakes.tiny_hf import tiny_config
from radixcast.actors.model_runner.models.rotary import RotaryTable
from radixcast.protocols.model import RopeScaling

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["none", "linear", "dynamic", "llama3", "yarn"])
def test_growing_changes_no_row(kind: str) -> None:
    scaling = RopeScaling(kind=kind, factor=4.0, original_context=64)
    table = RotaryTable(tiny_config(rope_scaling=scaling), CPU)
    positions = torch.tensor([0, 1, 127, 128, 2047, 5])
    before = table.rows(positions, 2047)
    after = table.rows(positions, 70_000)
    for small, large in zip(before, after, strict=True):
        assert small.shape == (6, 4)
        assert torch.equal(small, large)


def test_positions_are_angles() -> None:
    cos, sin = RotaryTable(tiny_config(), CPU).rows(torch.tensor([3000]), 3000)
    angle = torch.tensor([3000.0 / 10000 ** (i / 4) for i in range(4)])
    torch.testing.assert_close(cos[0], angle.cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[0], angle.sin(), rtol=0, atol=1e-3)


def test_factors_from_a_file_yield_to_the_config() -> None:
    factors = torch.full((4,), 2.0)
    plain, scaled = tiny_config(), tiny_config(rope_scaling=RopeScaling(kind="linear", factor=2.0))
    positions = torch.arange(50)
    wanted = RotaryTable(scaled, CPU).rows(positions, 49)
    for config in (plain, scaled):
        found = RotaryTable(config, CPU, factors).rows(positions, 49)
        assert all(map(torch.equal, found, wanted))
