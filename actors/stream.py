"""Stream: the reader's end of one request, and what is held of it in case its node's actors die.

The client feeds it; a reader iterates over it. Pieces that wait for a slow reader are merged into one. Knows no sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import msgspec

from radixcast.actors.collect import Collector, Journal, Output, merge_deltas
from radixcast.protocols.errors import RequestError
from radixcast.protocols.public import Generate, TextDelta


class Stream:
    """Async iterator over the TextDeltas of one request; offsets are contiguous and the last one has `finish`.

    Raises the RequestError that the request was refused, aborted or failed with (after the pieces that came before it).
    `async with stream:` aborts the request when the block is left before its end.
    """

    def __init__(self, request: Generate, on_cancel: Callable[[Stream, str], None]) -> None:
        self.request = request
        """The request in its present form: attempt and output_ids grow when it is resubmitted."""
        self.first_attempt = request.attempt
        self.sent = False
        """Whether the present attempt was given to the link."""
        self.started = False
        """Whether a piece of the present attempt has come."""
        self.cancelled = False
        self.closed = False
        """Nothing more will come: ended, refused or given up."""
        self.fruitless = 0
        """Resubmissions since the last progress."""
        self.refusals = 0
        """Times that a busy node refused to go on with it."""
        self._journal = Journal()
        self._on_cancel = on_cancel
        self._was_read = False
        self._pending: list[TextDelta] = []
        self._error: RequestError | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def rid(self) -> str:
        """The request's id."""
        return self.request.rid

    @property
    def known_to_node(self) -> bool:
        """Whether any attempt was sent."""
        return self.sent or self.request.attempt > self.first_attempt

    # ------------------------------------------------------------------ the reader's side

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TextDelta:
        while not self._pending:
            if self._error is not None:
                raise self._error.with_traceback(None)  # one error may end many streams
            if self.closed:
                raise StopAsyncIteration
            if self._reader is not None:
                raise RuntimeError(f"request {self.rid} has two readers")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._was_read = True
        deltas, self._pending = self._pending, []
        return merge_deltas(deltas)

    async def result(self) -> Output:
        """Read a stream of which nothing was read yet to its end. Raises RequestError as iterating does."""
        if self._was_read:
            raise RuntimeError(f"request {self.rid} was read already; join its pieces with a Collector")
        collector = Collector(self.rid, self.request.choice)
        async for delta in self:
            collector.feed(delta)
        return collector.output()

    def cancel(self, reason: str = "") -> None:
        """Abort the request. Idempotent, never blocks; the reader then sees RequestAborted, or the end if that came first."""
        if not self.closed and not self.cancelled:
            self.cancelled = True
            self._on_cancel(self, reason)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel("the reader left")

    # ------------------------------------------------------------------ the client's side

    def follow(self, attempt: int) -> None:
        """The id was in use up to `attempt`: begin above it, so that what is still said of the former request shows."""
        if attempt >= self.request.attempt:
            self.first_attempt = attempt + 1
            self.request = msgspec.structs.replace(self.request, attempt=attempt + 1)

    def feed(self, delta: TextDelta) -> None:
        """Take a piece of the present attempt. Raises DeltaGap when one before it is missing."""
        new = self._journal.accept(delta)
        self.started = True
        if new is None:
            return
        self.fruitless = self.refusals = 0
        error = new.finish.error if new.finish is not None else None
        if error is not None:
            if new.token_ids or new.text:
                self._pending.append(msgspec.structs.replace(new, finish=None))
            self.fail(error.to_exception())
            return
        self.closed = new.finish is not None
        self._pending.append(new)
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End with `error`, behind the pieces that wait."""
        if not self.closed:
            self.closed = True
            self._error = error
            self._wake()

    def resubmit(self) -> Generate:
        """The request in its next form: a higher attempt that goes on behind what is held.

        After two resubmissions without progress it asks for everything again: what is held is then dropped as a repeat.
        """
        held = bytes(self._journal.token_ids) if self.fruitless < 2 else b""
        self.fruitless += 1
        self.started = False
        self.request = msgspec.structs.replace(
            self.request,
            attempt=self.request.attempt + 1,
            output_ids=held,
            logprob_start=-1 if self._journal.has_prompt_logprobs else self.request.logprob_start,
            return_prompt_ids=self.request.return_prompt_ids and not self._journal.has_prompt_ids,
        )
        return self.request

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
