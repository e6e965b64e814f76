"""The outputs of one HTTP body: submitted together, read as they come, aborted together when the client goes.

A body holds P prompts with n choices each; output i*n + j is choice j of prompt i. One handler task reads all of them:
while it waits for its client's socket, pieces of each output merge upstream, so a slow reader costs no memory here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from radixcast.actors.collect import Collector, Output
from radixcast.actors.gateway.metrics import Metrics
from radixcast.actors.gateway.ports import EnginePort, StreamPort
from radixcast.protocols.errors import RequestAborted
from radixcast.protocols.openai_answers import UsageInfo, usage_info
from radixcast.protocols.public import Finish, Generate, TextDelta, Usage


class Work:
    """`async with Work(engine, metrics, [(request, n), …]) as work:` submits all; leaving it aborts what has not ended.

    Entering raises RequestError when one is refused at once (a request id in use); then none is left running.
    """

    def __init__(self, engine: EnginePort, metrics: Metrics, requests: Sequence[tuple[Generate, int]]) -> None:
        self._engine = engine
        self._metrics = metrics
        self._requests = requests
        self._stack = AsyncExitStack()
        self._streams: list[StreamPort] = []
        self._merged = Merged(self._streams)
        self._started = time.perf_counter()
        self._timers: list[_Timer] = []
        self.tally = Tally([n for _, n in requests])

    @property
    def elapsed(self) -> float:
        """Seconds since the requests were submitted."""
        return time.perf_counter() - self._started

    async def __aenter__(self) -> Work:
        self._started = time.perf_counter()
        try:
            for request, n in self._requests:
                for stream in self._engine.submit_choices(request, n):
                    self._streams.append(await self._stack.enter_async_context(stream))
                    self._timers.append(_Timer(self._metrics, self._started, request.stream))
        except BaseException:
            await self._stack.aclose()
            raise
        self._stack.push_async_callback(self._merged.aclose)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """(output, piece) in order of arrival until every output has ended. Raises RequestError."""
        async for index, delta in self._merged:
            self._timers[index].note(delta)
            self.tally.note(index, delta)
            yield index, delta

    async def outputs(self) -> list[Output]:
        """All outputs, whole, in order. Raises the first RequestError."""
        collectors = [Collector(stream.rid) for stream in self._streams]
        async for index, delta in self.deltas():
            collectors[index].feed(delta)
        return [c.output() for c in collectors]


class Tally:
    """Usage of a body from the usages of its outputs: a prompt counts once, its cached part is what no choice computed."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._prompt = [0] * sum(choices)
        self._cached: list[int | None] = [None] * sum(choices)
        self._completion = [0] * sum(choices)
        self._forced = [0] * sum(choices)

    def note(self, index: int, delta: TextDelta) -> None:
        """Take the counts of a piece of output `index`."""
        self._completion[index] += len(delta.token_ids) // 4
        if delta.usage is not None:
            self.set(index, delta.usage, final=delta.finish is not None)

    def set(self, index: int, usage: Usage, *, final: bool) -> None:
        """Take the counts of output `index` as the node tells them."""
        self._prompt[index] = usage.prompt_tokens
        self._cached[index] = usage.cached_tokens
        self._forced[index] = usage.forced_tokens
        if final:
            self._completion[index] = usage.completion_tokens

    def usage(self) -> UsageInfo:
        """Counts so far."""
        prompt, cached, at = 0, 0, 0
        for n in self._choices:
            prompt += max(self._prompt[at : at + n], default=0)
            cached += min((c for c in self._cached[at : at + n] if c is not None), default=0)
            at += n
        return usage_info(prompt, sum(self._completion), cached, sum(self._forced))


class _Timer:
    """Latencies of one output as its client sees them."""

    def __init__(self, metrics: Metrics, started: float, streaming: bool) -> None:
        self._metrics = metrics
        self._started = started
        self._streaming = streaming
        self._last: float | None = None

    def note(self, delta: TextDelta) -> None:
        now = time.perf_counter()
        count = len(delta.token_ids) // 4
        if self._streaming and count:
            if self._last is None:
                self._metrics.first_token.observe(now - self._started)
            else:
                self._metrics.observe_tokens((now - self._last) / count, count)
            self._last = now
        if delta.finish is not None:
            self._metrics.end_to_end.observe(now - self._started)


class Merged:
    """Pieces of all streams with the stream's index, as they come; raises what a stream raises. Close it before the streams."""

    def __init__(self, streams: Sequence[StreamPort]) -> None:
        self._streams = streams
        self._waiting: dict[asyncio.Task[TextDelta | None], int] = {}
        self._ready: deque[asyncio.Task[TextDelta | None]] = deque()
        self._started = False
        self._ended = False

    def __aiter__(self) -> Merged:
        return self

    async def __anext__(self) -> tuple[int, TextDelta]:
        if len(self._streams) == 1:
            delta = None if self._ended else await _next(self._streams[0])
            if delta is None:
                raise StopAsyncIteration
            self._ended = delta.finish is not None
            return 0, delta
        if not self._started:
            self._started = True
            for index in range(len(self._streams)):
                self._ask(index)
        while self._waiting:
            if not self._ready:
                done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
                self._ready.extend(sorted(done, key=self._waiting.__getitem__))
            task = self._ready.popleft()
            index = self._waiting.pop(task)
            delta = task.result()
            if delta is not None:
                if delta.finish is None:
                    self._ask(index)
                return index, delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop asking the streams."""
        tasks, self._waiting = list(self._waiting), {}
        self._ready.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ask(self, index: int) -> None:
        self._waiting[asyncio.create_task(_next(self._streams[index]))] = index


async def _next(stream: StreamPort) -> TextDelta | None:
    """The next piece; None at the end. An abort from outside (by an operator) is an end like another, not an error."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None
    except RequestAborted as error:
        return TextDelta(rid=stream.rid, finish=Finish(reason="abort", error=error.info))
