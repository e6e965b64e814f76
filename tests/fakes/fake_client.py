"""An engine in one object, with the interface of EngineClient: the byte is the token, the answer is the prompt backwards.

Deterministic, no sockets, no model. What is special:

* text longer than the context is refused as the tokenizer would (context_length_exceeded);
* `hold` set: streams stop after their first piece, whole answers before it, until it is released (for aborts and disconnects);
* with a seed and temperature > 0 every choice starts with its own letter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

import msgspec
import numpy as np

from radixcast.actors.collect import Collector, Output, choice_rid
from radixcast.protocols.buffers import Int32Array, pack_floats, pack_ids, unpack_ids
from radixcast.protocols.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    InvalidRequest,
    RequestAborted,
    RequestError,
)
from radixcast.protocols.public import (
    Chat,
    ControlReply,
    Finish,
    Generate,
    Logprobs,
    SchedulerStats,
    TextDelta,
    Usage,
    Welcome,
)


class FakeStream:
    """One output of the fake engine."""

    def __init__(self, engine: FakeEngine, request: Generate) -> None:
        self.engine = engine
        self.request = request
        self.rid = request.rid
        self.ended = False
        self.cancelled = False
        self._aborted = asyncio.Event()
        self._pieces = self._make()

    def abort(self) -> None:
        """As the node would end it."""
        self._aborted.set()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> TextDelta:
        try:
            return await self._pieces.__anext__()
        except RequestError:
            self._end()
            raise

    async def result(self) -> Output:
        collector = Collector(self.rid)
        async for delta in self:
            collector.feed(delta)
        return collector.output()

    def cancel(self, reason: str = "") -> None:
        if not self.ended:
            self.cancelled = True
            self.engine.cancelled.append(self.rid)
            self._end()

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel("left")

    def _end(self) -> None:
        self.ended = True
        self.engine.open.pop(self.rid, None)

    async def _make(self) -> AsyncIterator[TextDelta]:
        request, engine = self.request, self.engine
        prompt = engine.prompt_of(request)
        out = engine.answer_to(prompt, request)
        stop = next((s for s in request.sampling.stop if s in out), None)
        matched: int | str | None = None
        reason = "length" if request.sampling.max_new_tokens == len(out) else "stop"
        if stop is not None:
            out, reason, matched = out[: out.index(stop)], "stop", stop
        elif reason == "stop":
            matched = 0
        pieces = [out] if not request.stream else [out[i : i + 3] for i in range(0, len(out), 3)]
        for number, piece in enumerate(pieces):
            if engine.hold is not None and (number or not request.stream):
                waits = [asyncio.ensure_future(engine.hold.wait()), asyncio.ensure_future(self._aborted.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                if self._aborted.is_set():
                    raise RequestAborted("aborted by an operator")
            at = sum(len(p) for p in pieces[:number])
            yield TextDelta(
                rid=self.rid,
                choice=request.choice,
                token_offset=at,
                token_ids=pack_ids(list(piece.encode())),
                text_offset=at,
                text=piece,
                logprobs=engine.logprobs_of(piece, request) if request.logprobs else None,
                prompt_logprobs=engine.prompt_logprobs(prompt, request) if request.logprob_start >= 0 and not number else None,
            )
            if engine.fail_after_first is not None and not number:
                raise engine.fail_after_first
        self._end()
        yield TextDelta(
            rid=self.rid,
            choice=request.choice,
            token_offset=len(out),
            text_offset=len(out),
            prompt_logprobs=engine.prompt_logprobs(prompt, request) if request.logprob_start >= 0 and not pieces else None,
            usage=Usage(prompt_tokens=len(prompt.encode()), completion_tokens=len(out), cached_tokens=engine.cached),
            finish=Finish(reason=reason, matched=matched),  # type: ignore[arg-type]
        )


class FakeEngine:
    """Implements radixcast.actors.gateway.ports.EnginePort."""

    def __init__(self, context_length: int = 256) -> None:
        self.welcome: Welcome | None = Welcome(
            output_endpoint="", model="fake", context_length=context_length, vocab_size=256, max_total_tokens=1000
        )
        self.connected = True
        self.open: dict[str, FakeStream] = {}
        self.seen: list[Generate] = []
        self.cancelled: list[str] = []
        self.aborts: list[tuple[str, bool]] = []
        self.hold: asyncio.Event | None = None
        self.fail_after_first: RequestError | None = None
        self.cached = 0
        self.flush_ok = True
        self.numbers = SchedulerStats(prompt_tokens_total=5, generation_tokens_total=7, total_tokens=1000, locked_tokens=10)

    def submit_choices(self, request: Generate, n: int) -> Sequence[FakeStream]:
        rids = [request.rid] if n == 1 else [choice_rid(request.rid, c) for c in range(n)]
        if any(rid in self.open for rid in rids):
            raise DuplicateRequest(f"request id {request.rid!r} is in use", param="rid")
        streams = []
        for choice, rid in enumerate(rids):
            one = msgspec.structs.replace(request, rid=rid, choice=choice)
            self.seen.append(one)
            self.open[rid] = FakeStream(self, one)
            streams.append(self.open[rid])
        return streams

    async def abort(self, rid: str = "", all: bool = False, reason: str = "") -> None:
        self.aborts.append((rid, all))
        for stream in list(self.open.values()):
            if all or rid in (stream.rid, stream.request.group):
                stream.abort()

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Int32Array]:
        return [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]

    async def tokenize_chat(self, chat: Chat) -> Int32Array:
        return (await self.tokenize(["".join(str(m["content"]) for m in chat.messages)]))[0]

    async def detokenize(self, ids: Sequence[Sequence[int] | Int32Array], *, skip_special_tokens: bool = True) -> list[str]:
        return [bytes(int(i) for i in row).decode("utf-8", "replace") for row in ids]

    async def flush_cache(self) -> ControlReply:
        return ControlReply(id="x", ok=self.flush_ok, message="" if self.flush_ok else "requests are running")

    async def stats(self) -> SchedulerStats:
        return self.numbers

    # -- behaviour

    def prompt_of(self, request: Generate) -> str:
        """The prompt's text. Raises what the tokenizer would."""
        if request.chat is not None:
            for i, message in enumerate(request.chat.messages):
                if isinstance(message["content"], list) and any(p.get("type") != "text" for p in message["content"]):
                    raise InvalidRequest("images are not supported", param=f"messages[{i}].content")
            text = "".join(str(m["content"]) for m in request.chat.messages)
        elif request.input_ids is not None:
            text = bytes(int(i) for i in unpack_ids(request.input_ids)).decode("utf-8", "replace")
        else:
            text = request.text or ""
        assert self.welcome is not None
        wanted = len(text) + (request.sampling.max_new_tokens or 0)
        if wanted > self.welcome.context_length:
            raise ContextLengthExceeded(f"{wanted} tokens are over the context of {self.welcome.context_length}")
        if any(token >= 256 for token in request.sampling.logit_bias or ()):
            raise InvalidRequest("logit_bias names a token that is none", param="sampling_params.logit_bias")
        return text

    def answer_to(self, prompt: str, request: Generate) -> str:
        """The output: the prompt backwards, cut at max_new_tokens."""
        text = prompt[::-1]
        if request.sampling.temperature > 0:
            text = chr(ord("a") + (request.sampling.seed or 0 + request.choice) % 20 + request.choice) + text
        limit = request.sampling.max_new_tokens
        return text if limit is None else text[:limit]

    def logprobs_of(self, text: str, request: Generate) -> Logprobs:
        """Logprob -1 for each token, -inf for the worst candidate."""
        ids = list(text.encode())
        top = request.top_logprobs
        top_ids = [t for i in ids for t in ([i, *range(1, top)])][: len(ids) * top]
        values = [v for _ in ids for v in [-1.0, *([-float("inf")] * (top - 1))]][: len(ids) * top]
        return Logprobs(
            values=pack_floats([-1.0] * len(ids)),
            ids=pack_ids(ids),
            top_n=top,
            top_values=pack_floats(values),
            top_ids=pack_ids(top_ids),
            token_texts=[chr(i) for i in ids],
            top_texts=[chr(i) for i in top_ids],
            token_bytes=[bytes([i]) for i in ids],
            top_bytes=[bytes([i]) for i in top_ids],
        )

    def prompt_logprobs(self, prompt: str, request: Generate) -> Logprobs:
        """The same for the prompt; its first token has none."""
        whole = self.logprobs_of(prompt, request)
        values = [float("nan"), *([-1.0] * (len(prompt.encode()) - 1))]
        return msgspec.structs.replace(whole, values=pack_floats(values))
