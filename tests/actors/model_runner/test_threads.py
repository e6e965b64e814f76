"""Thread settings: physical cores, the environment, and that it is set in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from radixcast.actors.model_runner.threads import configure_threads, physical_cores, usable_cores

HYPER_THREADED = "\n\n".join(
    f"processor\t: {i}\nphysical id\t: {i // 4}\ncore id\t\t: {i % 2}\nflags\t\t: a:b" for i in range(8)
)


def test_hyper_threads_are_not_cores() -> None:
    assert physical_cores(HYPER_THREADED, set(range(8))) == 4
    assert physical_cores(HYPER_THREADED, {0, 2}) == 1
    assert physical_cores(HYPER_THREADED, {0, 1, 4}) == 3
    assert physical_cores("processor : 0\nmodel name : arm", {0}) == 0
    assert physical_cores("", {0}) == 0


def test_at_least_one_and_no_more_than_there_are() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_too_late_is_an_error() -> None:
    import torch

    assert torch
    with pytest.raises(RuntimeError, match="before torch"):
        configure_threads()


def test_torch_follows_and_the_user_wins() -> None:
    code = (
        "import json, os; from radixcast.actors.model_runner.threads import configure_threads; n = configure_threads();"
        "import torch; print(json.dumps([n, torch.get_num_threads(), os.environ['OMP_WAIT_POLICY']]))"
    )

    def run(**changes: str) -> list[object]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
        result = subprocess.run([sys.executable, "-P", "-c", code], env={**kept, **changes}, capture_output=True, check=True)
        found: list[object] = json.loads(result.stdout)
        return found

    assert run() == [usable_cores(), usable_cores(), "PASSIVE"]
    assert run(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="ACTIVE") == [1, 1, "ACTIVE"]
