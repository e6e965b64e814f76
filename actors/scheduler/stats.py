"""Meter: the scheduler's counters, its sliding windows and its two log lines (which operators grep for)."""

from __future__ import annotations

import logging
from collections import deque

from radixcast.actors.scheduler.batch import Draft, RunningBatch
from radixcast.actors.scheduler.memory import KvMemory
from radixcast.actors.scheduler.policy import WaitingQueue
from radixcast.actors.scheduler.request import Request
from radixcast.protocols.public import SchedulerStats

logger = logging.getLogger("radixcast.scheduler")

HIT_WINDOW_SECONDS = 60.0
RATE_WINDOW_SECONDS = 5.0


class Window:
    """Sums of pairs over the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._items: deque[tuple[float, int, int]] = deque()
        self._sums = [0, 0]

    def add(self, now: float, a: int, b: int = 0) -> None:
        """Add a pair at time `now` (seconds; never going back)."""
        self._items.append((now, a, b))
        self._sums[0] += a
        self._sums[1] += b
        self.sums(now)

    def sums(self, now: float) -> tuple[int, int]:
        """Both sums as of `now`."""
        while self._items and self._items[0][0] <= now - self._seconds:
            _, a, b = self._items.popleft()
            self._sums[0] -= a
            self._sums[1] -= b
        return self._sums[0], self._sums[1]

    def rate(self, now: float) -> float:
        """First sum per second, over the window or since its first item if that is shorter."""
        total, _ = self.sums(now)
        if not self._items:
            return 0.0
        return total / max(now - self._items[0][0], 1e-3) if now > self._items[0][0] else 0.0


class Meter:
    """Counters since start."""

    def __init__(self) -> None:
        self.steps = 0
        self.requests = 0
        self.aborted = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated = 0
        self.forward_seconds = 0.0
        self.wait_seconds = 0.0
        self.forced = 0
        self._hits = Window(HIT_WINDOW_SECONDS)
        self._out = Window(RATE_WINDOW_SECONDS)
        self._in = Window(RATE_WINDOW_SECONDS)
        self._ends = Window(HIT_WINDOW_SECONDS)

    def admitted(self, request: Request, now: float) -> None:
        """A request got its first row: its hit counts, once."""
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += request.cached
        self._hits.add(now, request.prompt_len, request.cached)

    def sampled(self, tokens: int, now: float) -> None:
        """Output tokens came back."""
        if tokens:
            self._out.add(now, tokens)

    def ended(self, outputs: int, now: float) -> None:
        """A request was released; `outputs` of its tokens count."""
        self.generated += outputs
        self._ends.add(now, 1)

    def hit_rate(self) -> float:
        """cached / prompt tokens since start."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def hit_rate_window(self, now: float) -> float:
        """The same over the last minute."""
        prompt, cached = self._hits.sums(now)
        return cached / prompt if prompt else 0.0

    def throughput(self, now: float) -> float:
        """Output tokens/s lately."""
        return self._out.rate(now)

    def retry_after(self, queued: int, now: float) -> float:
        """Seconds until a queue of this length has probably moved on."""
        rate = self._ends.rate(now)
        return float(min(60.0, max(1.0, queued / rate if rate else 1.0)))

    def stats(self, memory: KvMemory, batch: RunningBatch, waiting: WaitingQueue, now: float) -> SchedulerStats:
        """What can be told of these; the scheduler adds the rest."""
        free, cached, gate = memory.pool.free_tokens, memory.tree.evictable, waiting.gate
        return SchedulerStats(
            running=len(batch),
            queued=len(waiting),
            retracted=waiting.retracted,
            total_tokens=memory.pool.total_tokens,
            free_tokens=free,
            cached_tokens=cached,
            locked_tokens=memory.pool.total_tokens - free - cached,
            steps=self.steps,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            generation_tokens_total=self.generated,
            requests_total=self.requests,
            aborted_total=self.aborted,
            evicted_tokens_total=memory.evicted_total,
            cache_hit_rate=self.hit_rate(),
            cache_hit_rate_window=self.hit_rate_window(now),
            gen_throughput=self.throughput(now),
            device_wait_seconds_total=self.wait_seconds,
            forward_seconds_total=self.forward_seconds,
            grammar_queued=len(gate),
            grammars_total=gate.asked_total,
            grammar_hits_total=gate.hits_total,
            forced_tokens_total=self.forced,
        )

    def log(
        self, draft: Draft, memory: KvMemory, batch: RunningBatch, waiting: WaitingQueue, interval: int, now: float
    ) -> None:
        """A line for a plan with prompts in it, or every `interval` plans."""
        if not logger.isEnabledFor(logging.INFO):
            return
        total = memory.pool.total_tokens
        used, running, queued = total - memory.available, len(batch), len(waiting) + len(waiting.gate)
        if draft.new_tokens or draft.opens:
            pending = sum(r.remaining for r in batch if r.remaining > 1)
            logger.info("%s", self.prefill_line(draft, used / total, running, queued, pending, now))
        elif draft.number % interval == 0:
            logger.info("%s", self.decode_line(used, used / total, running, queued, now))

    def prefill_line(self, draft: Draft, usage: float, running: int, queued: int, pending: int, now: float) -> str:
        """Told for every step that admits requests or computes prompt chunks."""
        self._in.add(now, draft.new_tokens)
        return (
            f"Prefill batch, #new-seq: {len(draft.opens)}, #new-token: {draft.new_tokens}, "
            f"#cached-token: {draft.cached_tokens}, token usage: {usage:.2f}, #running-req: {running}, "
            f"#queue-req: {queued}, #pending-token: {pending}, input throughput (token/s): {self._in.rate(now):.2f}"
        )

    def decode_line(self, tokens: int, usage: float, running: int, queued: int, now: float) -> str:
        """Told every --decode-log-interval steps."""
        return (
            f"Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, "
            f"gen throughput (token/s): {self.throughput(now):.2f}, #queue-req: {queued}"
        )
