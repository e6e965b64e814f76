"""A clock that moves only when told."""

from __future__ import annotations


class ManualClock:
    """Callable like time.monotonic: returns `now` (seconds), which the test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on by `seconds` (>= 0); returns the new time."""
        if seconds < 0:
            raise ValueError(f"time can't go back by {-seconds} s")
        self.now += seconds
        return self.now
