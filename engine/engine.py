"""Engine: a model inside a user's program. It starts the node's actors as child processes and talks to them as any client does.

::

    with radixcast.Engine(model_path="smollm2") as engine:
        print(engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 8})["text"])

Works in a script without a main guard and in a notebook: the children are plain subprocesses, and everything asynchronous
lives in a thread with a loop of its own, so calls may come from any thread, with or without a running loop. Shapes are those
of /generate (`radixcast.actors.native`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

import radixcast
from radixcast.actors.client import EngineClient
from radixcast.actors.collect import Collector
from radixcast.actors.native import NativeItem, NativeRequest, native_dict, parse_native
from radixcast.actors.stream import Stream
from radixcast.actors.supervisor import Supervisor
from radixcast.config import from_kwargs
from radixcast.models import resolve_model
from radixcast.node import assemble
from radixcast.protocols.errors import InternalError, InvalidRequest, LinkClosed, StartupError
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.public import Welcome
from radixcast.protocols.sampling import SamplingParams

T = TypeVar("T")
Sampling = Mapping[str, Any] | SamplingParams
Reply = dict[str, Any] | list[dict[str, Any]]

STOP_SECONDS = 5.0
"""How long `shutdown` lets the actors end by themselves."""


class Engine:
    """An embedded node. Keyword arguments are the fields of ServerArgs (flags of `radixcast serve`, with underscores).

    Raises StartupError when the node can't start. Requests raise RequestError subclasses. End it with `shutdown()` or `with`;
    at the latest the interpreter's exit ends it.
    """

    def __init__(self, *, model_spec: ModelSpec | None = None, **server_args: Any) -> None:
        """`model_spec`: an already resolved model instead of `model_path` (for tests and for models without a file)."""
        self.args = from_kwargs(**{"log_level": "warning", **server_args})
        self.model = model_spec or resolve_model(self.args)
        self._lock = threading.Lock()
        self._dead = ""
        self._closed = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="radixcast-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._supervisor, self._client, self._watcher = self._call(self._start())
        except BaseException:
            self._end_thread()
            raise

    # ------------------------------------------------------------------ generate

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        input_ids: Any = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Generate for one prompt or a batch, given as text or as token ids (lists or arrays).

        Returns the dict of /generate {"text", "output_ids", "meta_info"}; a list of them for a batch or n > 1; with `stream` an
        iterator of dicts (cumulative; with "index" when the plain reply would be a list), whose `close()` aborts. `fields`
        are further keys of /generate (return_logprob, top_logprobs_num, rid, priority, …). Raises RequestError.
        """
        request = _parse(prompt, sampling_params, input_ids, stream, fields)
        return self._stream(request) if stream else self._call(self._run(request))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        input_ids: Any = None,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """As `generate`, for a running loop: await it; with `stream` what it returns is an async iterator."""
        request = _parse(prompt, sampling_params, input_ids, stream, fields)
        return self._async_stream(request) if stream else await self._await(self._run(request))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Abort the request called `rid` (or all of a batch's group), or all requests."""
        self._call(self._client.abort(rid, all=abort_all))

    # ------------------------------------------------------------------ questions

    def tokenize(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each text of a list. Raises RequestError."""
        texts = [text] if isinstance(text, str) else list(text)
        ids = [i.tolist() for i in self._call(self._client.tokenize(texts, add_special_tokens=add_special_tokens))]
        return ids[0] if isinstance(text, str) else ids

    def detokenize(self, ids: Sequence[int] | Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> str | list[str]:
        """Text of token ids, or of each list of them. Raises RequestError."""
        many = bool(ids) and not isinstance(ids[0], int)
        rows: Any = ids if many else [ids]
        texts = self._call(self._client.detokenize(rows, skip_special_tokens=skip_special_tokens))
        return texts if many else texts[0]

    def flush_cache(self) -> bool:
        """Empty the radix cache; False, and nothing done, while requests run."""
        return self._call(self._client.flush_cache()).ok

    def get_model_info(self) -> dict[str, Any]:
        """What is served."""
        welcome = self._welcome()
        return {
            "model_path": self.args.model_path,
            "served_model_name": self.model.name,
            "is_generation": True,
            "context_length": welcome.context_length,
            "vocab_size": welcome.vocab_size,
            "has_chat_template": welcome.has_chat_template,
            "weight_version": welcome.weight_version,
        }

    def get_server_info(self) -> dict[str, Any]:
        """The arguments (keys masked), the version, where ZMQ clients may dial, and the scheduler's numbers, now."""
        stats = self._call(self._client.stats())
        return {
            **self.args.public(),
            "version": radixcast.__version__,
            "endpoint": self._supervisor.setup.endpoints.public_in,
            "max_total_num_tokens": stats.total_tokens,
            "internal_states": [msgspec.to_builtins(stats)],
        }

    # ------------------------------------------------------------------ life

    def shutdown(self) -> None:
        """Abort what runs, end the actors and the thread. Idempotent; no process is left when it returns."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._call(self._stop(), even_when_closed=True)
        finally:
            self._end_thread()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    # ------------------------------------------------------------------ the caller's thread

    def _call(self, work: Coroutine[Any, Any, T], *, even_when_closed: bool = False) -> T:
        """Run `work` on the engine's loop and wait for it. Interrupted (^C), it is cancelled."""
        loop = self._loop_or_raise(work)
        future = asyncio.run_coroutine_threadsafe(self._checked(work, even_when_closed), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop_or_raise(work)
        future = asyncio.run_coroutine_threadsafe(self._checked(work, False), loop)
        return await asyncio.wrap_future(future)

    def _loop_or_raise(self, work: Coroutine[Any, Any, Any]) -> asyncio.AbstractEventLoop:
        if self._loop.is_closed():
            work.close()
            raise LinkClosed("the engine is shut down")
        return self._loop

    async def _checked(self, work: Coroutine[Any, Any, T], even_when_closed: bool) -> T:
        if not even_when_closed and (self._closed or self._dead):
            work.close()
            raise LinkClosed(self._dead or "the engine is shut down")
        return await work

    def _stream(self, request: NativeRequest) -> Iterator[dict[str, Any]]:
        pieces = _Pieces(self._pieces(request))
        try:
            while (piece := self._call(pieces.next())) is not None:
                yield piece
        finally:
            with contextlib.suppress(LinkClosed):
                self._call(pieces.close(), even_when_closed=True)

    async def _async_stream(self, request: NativeRequest) -> AsyncIterator[dict[str, Any]]:
        pieces = _Pieces(self._pieces(request))
        try:
            while (piece := await self._await(pieces.next())) is not None:
                yield piece
        finally:
            with contextlib.suppress(LinkClosed):
                await self._await(pieces.close())

    def _welcome(self) -> Welcome:
        welcome = self._client.welcome
        if welcome is None:
            raise LinkClosed("the engine is shut down")
        return welcome

    # ------------------------------------------------------------------ the engine's thread

    async def _start(self) -> tuple[Supervisor, EngineClient, asyncio.Task[None]]:
        supervisor = assemble(self.args, self.model)
        await supervisor.start()
        setup = supervisor.setup
        client = EngineClient(
            setup.endpoints.public_in,
            name="engine",
            curve_server_public=setup.curve_server_public,
            context=self._context,
        )
        try:
            await client.connect()
        except LinkClosed as error:
            await supervisor.shutdown(drain=False)
            raise StartupError(str(error)) from None
        return supervisor, client, asyncio.create_task(self._watch(supervisor, client), name="watch the node")

    async def _watch(self, supervisor: Supervisor, client: EngineClient) -> None:
        """A node that gave up ends every open request with its cause."""
        await supervisor.wait()
        self._dead = f"the engine died: {supervisor.cause}" if supervisor.cause else "the engine is shut down"
        client.fail_open(InternalError(self._dead))

    async def _stop(self) -> None:
        await self._client.close()
        await self._supervisor.shutdown(drain=True, timeout=STOP_SECONDS)
        await self._watcher

    def _end_thread(self) -> None:
        atexit.unregister(self.shutdown)
        self._closed = True
        with contextlib.suppress(Exception):  # what an interrupted start left: it ends its actors
            self._call(_cancel_others(), even_when_closed=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._context.destroy(linger=0)

    async def _run(self, request: NativeRequest) -> Reply:
        """All outputs of a body, in order. The first that fails fails all; the others are aborted."""
        started = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            opened = [(item, stream) for item, stream in self._open(request, stack)]
            outputs = await asyncio.gather(*(stream.result() for _, stream in opened))
        elapsed = time.monotonic() - started
        version = self._welcome().weight_version
        replies = [
            native_dict(output, item.request, weight_version=version, e2e_latency=elapsed)
            for output, (item, _) in zip(outputs, opened, strict=True)
        ]
        return replies if request.is_list else replies[0]

    async def _pieces(self, request: NativeRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Cumulative dicts of all outputs as they grow. A slow reader gets fewer."""
        started = time.monotonic()
        version = self._welcome().weight_version
        async with contextlib.AsyncExitStack() as stack:
            opened = self._open(request, stack)
            collectors = [Collector() for _ in opened]
            waiting = {asyncio.ensure_future(anext(stream, None)): i for i, (_, stream) in enumerate(opened)}
            stack.callback(lambda: [task.cancel() for task in waiting])
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    index = waiting.pop(task)
                    delta = task.result()
                    if delta is None:
                        continue
                    collectors[index].feed(delta)
                    waiting[asyncio.ensure_future(anext(opened[index][1], None))] = index
                    output = collectors[index].output()
                    elapsed = time.monotonic() - started
                    piece = native_dict(output, opened[index][0].request, weight_version=version, e2e_latency=elapsed)
                    yield {**piece, "index": index} if request.is_list else piece

    def _open(self, request: NativeRequest, stack: contextlib.AsyncExitStack) -> list[tuple[NativeItem, Stream]]:
        opened = []
        for item in request.requests:
            for stream in self._client.submit_choices(item.request, item.n):
                stack.push_async_exit(stream)
                opened.append((item, stream))
        return opened


class _Pieces:
    """An async generator that is read and closed from another thread: one at a time, also when a read was interrupted."""

    def __init__(self, pieces: AsyncGenerator[dict[str, Any], None]) -> None:
        self._pieces = pieces
        self._lock = asyncio.Lock()

    async def next(self) -> dict[str, Any] | None:
        """The next piece; None at the end."""
        async with self._lock:
            return await anext(self._pieces, None)

    async def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        async with self._lock:
            await self._pieces.aclose()


async def _cancel_others() -> None:
    """End every other task of the loop and wait for that."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=STOP_SECONDS) if others else None


def _parse(prompt: Any, sampling_params: Any, input_ids: Any, stream: bool, fields: dict[str, Any]) -> NativeRequest:
    for name in ("text", "prompt"):
        if name in fields:
            raise InvalidRequest(f"{name} is the first argument", param=name)
    body: dict[str, Any] = {**fields, "sampling_params": sampling_params, "stream": stream}
    if prompt is not None:
        body["text"] = prompt if isinstance(prompt, str) else _plain(prompt)
    if input_ids is not None:
        body["input_ids"] = _plain(input_ids)
    return parse_native(body)


def _plain(values: Any) -> Any:
    """Arrays and tuples (also inside a list) as lists."""
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, list | tuple):
        return [_plain(v) if isinstance(v, list | tuple) or hasattr(v, "tolist") else v for v in values]
    return values
