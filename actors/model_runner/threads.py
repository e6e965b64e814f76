"""How many threads tensors use, and how those threads wait: settings that OpenMP reads once, when torch is imported.

GOMP's threads spin at a barrier by default. With any other process busy (our own actors are) a spinning team waits for a
descheduled member and an op of 5 ms takes 20 to 50; one that sleeps costs a few µs more when alone. Measured on two cores
with other work running, attention of a 512-token chunk: 24 ms spinning, 5.4 ms sleeping.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SWITCH_SECONDS = 0.0002
"""How long another Python thread may keep the GIL from the one that computes. A decode step asks for it hundreds of times, so
with Python's own 5 ms a grammar built beside the steps would stop every stream until it is done."""

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def configure_threads() -> int:
    """Set OpenMP's environment for this process; what the user has set stays. Returns the number of threads.

    Call it before torch is imported. Raises RuntimeError when that is too late.
    """
    if "torch" in sys.modules:
        raise RuntimeError("configure_threads() must run before torch is imported")
    sys.setswitchinterval(SWITCH_SECONDS)
    threads = usable_cores()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    return int(os.environ["OMP_NUM_THREADS"].split(",")[0])


def usable_cores() -> int:
    """Physical cores that this process may use: affinity and cgroup quota respected, hyper-threads not counted."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = physical_cores(_read(_CPUINFO), allowed) or len(allowed)
    quota = _read(_CGROUP_QUOTA).split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return max(1, cores)


def physical_cores(cpuinfo: str, allowed: set[int]) -> int:
    """Distinct (socket, core) pairs among the allowed processors of /proc/cpuinfo's text; 0 when it does not say."""
    found = set()
    for block in cpuinfo.split("\n\n"):
        values = dict(part for line in block.splitlines() if len(part := [x.strip() for x in line.split(":", 1)]) == 2)
        if "core id" in values and int(values.get("processor", -1)) in allowed:
            found.add((values.get("physical id", "0"), values["core id"]))
    return len(found)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
