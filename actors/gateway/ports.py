"""What the gateway needs of an engine: the interface of `EngineClient`, so that a test can hand in another one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from radixcast.actors.collect import Output
from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.public import Chat, ControlReply, Generate, SchedulerStats, TextDelta, Welcome


class StreamPort(AbstractAsyncContextManager[Any], Protocol):
    """One output: its pieces in order. Leaving the context aborts it when it has not ended."""

    @property
    def rid(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    async def __anext__(self) -> TextDelta:
        """The next piece (several that wait come as one). Raises RequestError when it was refused or failed."""
        ...

    async def result(self) -> Output:
        """The whole output. Raises RequestError."""
        ...


class EnginePort(Protocol):
    """The engine as a client sees it."""

    @property
    def welcome(self) -> Welcome | None:
        """What is served; None before the first contact."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the links to the node are up."""
        ...

    def submit_choices(self, request: Generate, n: int) -> Sequence[StreamPort]:
        """n outputs of one prompt with one seed. Raises DuplicateRequest for a request id in use."""
        ...

    async def abort(self, rid: str = "", all: bool = False, reason: str = "") -> None: ...

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Int32Array]: ...

    async def tokenize_chat(self, chat: Chat) -> Int32Array: ...

    async def detokenize(self, ids: Sequence[Sequence[int] | Int32Array], *, skip_special_tokens: bool = True) -> list[str]: ...

    async def flush_cache(self) -> ControlReply: ...

    async def stats(self) -> SchedulerStats: ...
