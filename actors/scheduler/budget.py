"""How much: the share of future tokens that is reserved, and how a step's chunk budget is split among prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixcast.actors.scheduler.request import Request

RESERVE_CLIP = 4096
"""Nobody is taken to write more new tokens than this when room is reserved."""

_INIT, _MIN_OF_INIT, _DECAY_STEPS, _LOOK_AHEAD = 0.7, 0.14, 600, 20


class NewTokenRatio:
    """The fraction of `max_new_tokens` reserved for each running request: most never write all they may.

    It starts at min(0.7 x conservativeness, 1) and decays over 600 steps to 0.14 of that; a retraction raises it to what
    the running requests have really used so far, plus 20 steps; idleness resets it (SGLang's rule).
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(_INIT * conservativeness, 1.0)
        self._least = _MIN_OF_INIT * self._initial
        self.value = self._initial

    def step(self) -> None:
        """One step without retraction."""
        self.value = max(self._least, self.value - (self._initial - self._least) / _DECAY_STEPS)

    def idle(self) -> None:
        """Nothing runs."""
        self.value = self._initial

    def retracted(self, running: Sequence[Request]) -> None:
        """Room ran out with these requests left."""
        used = sum(r.outputs for r in running) + _LOOK_AHEAD * len(running)
        asked = sum(r.max_position - r.prompt_len for r in running) + 1
        self.value = max(self.value, min(1.0, used / asked))


def reserve(request: Request, ratio: float) -> int:
    """Tokens to keep free for a request beyond its KV slots: what it knows already, and `ratio` of what may come."""
    known = max(0, request.known - request.nslots)
    return known + int(ratio * min(max(0, request.max_position - request.known), RESERVE_CLIP))


class Claim(NamedTuple):
    """A prompt that wants a chunk of this step."""

    rank: int
    """Smaller goes first whatever is left to compute (minus the priority, or 0)."""
    remaining: int
    order: int
    """Arrival; the smallest is the oldest."""


def split_chunk(claims: Sequence[Claim], budget: int) -> list[int]:
    """Split `budget` tokens: shortest remaining first, but half of the budget is the oldest's if it needs it.

    So a short prompt that arrives during a long prefill gets its first token within a step or two, and the long one goes
    on at half speed at least: nobody starves, because everybody becomes the oldest.
    """
    grants = [0] * len(claims)
    if not claims:
        return grants
    oldest = min(range(len(claims)), key=lambda i: claims[i].order)
    grants[oldest] = min(claims[oldest].remaining, -(-budget // 2))
    left = budget - grants[oldest]
    for i in sorted(range(len(claims)), key=lambda i: claims[i]):
        more = min(left, claims[i].remaining - grants[i])
        grants[i] += more
        left -= more
        if left <= 0:
            break
    return grants
