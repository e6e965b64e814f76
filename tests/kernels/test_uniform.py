"""The counter-based generator against its authors' known answers, and what sampling needs of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixcast.kernels.reference.uniform import philox_4x32, uniforms

U64 = st.integers(0, 2**64 - 1)


def test_known_answers() -> None:
    """philox4x32 10 of Random123's kat_vectors."""
    ones = 0xFFFFFFFF
    counters = np.array([[0] * 4, [ones] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]])
    keys = np.array([[0] * 2, [ones] * 2, [0xA4093822, 0x299F31D0]])
    assert philox_4x32(counters, keys).tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


@given(st.lists(st.tuples(U64, st.integers(0, 127), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_a_number_depends_on_its_own_counter_only(rows: list[tuple[int, int, int]]) -> None:
    seeds, choices, positions = (list(column) for column in zip(*rows, strict=True))
    together = uniforms(np.array(seeds, np.uint64), np.array(choices), np.array(positions))
    alone = [uniforms(np.array([s], np.uint64), np.array([c]), np.array([p]))[0] for s, c, p in rows]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_seed_choice_and_position_all_matter() -> None:
    n = 1000
    zero, count = np.zeros(n, np.int64), np.arange(n)
    parts = [
        uniforms(count.astype(np.uint64), zero, zero),
        uniforms(zero.astype(np.uint64), count, zero),
        uniforms(zero.astype(np.uint64), zero, count),
        uniforms((count + 1).astype(np.uint64) << np.uint64(32), zero, zero),
    ]
    assert len(np.unique(np.concatenate(parts))) == 4 * n - 2  # seed 0, choice 0, position 0 is in three of them


def test_uniform_over_the_unit_interval() -> None:
    n, bins = 100_000, 100
    u = uniforms(np.full(n, 42, np.uint64), np.zeros(n, np.int64), np.arange(n))
    counts = np.histogram(u, bins, (0, 1))[0]
    chi_square = ((counts - n / bins) ** 2 / (n / bins)).sum()
    assert chi_square < 149  # 99 degrees of freedom, p = 0.001; fixed seed, so it never changes
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
