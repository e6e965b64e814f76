"""EngineClient: the one way into a node, for the gateway, for Engine and for users' own programs.

::

    async with EngineClient("ipc:///tmp/radixcast/in") as client:
        output = await client.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 8})
        async with client.submit(Generate(rid="", text="Once upon a time")) as stream:
            async for delta in stream:
                print(delta.text, end="")

It dials the tokenizer, is told where output comes from, dials the detokenizer, and keeps both links. When an actor of the node
is replaced it submits again what was lost (see desk.py), so a stream goes on with no token lost, repeated or changed. It
draws the seed of a request that brings none: what a request samples is settled before it is sent.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from radixcast.actors.collect import Output, choice_rid
from radixcast.actors.desk import Desk, Reply
from radixcast.actors.setup import CLIENT_PREFIX, DETOKENIZER, TOKENIZER
from radixcast.actors.stream import Stream
from radixcast.actors.transport import Dealer, new_epoch
from radixcast.protocols import limits, sampling
from radixcast.protocols.buffers import Int32Array, pack_ids, unpack_ids
from radixcast.protocols.errors import (
    InvalidRequest,
    LinkClosed,
    Overloaded,
    PayloadTooLarge,
    RequestAborted,
    RequestError,
)
from radixcast.protocols.public import (
    Abort,
    Chat,
    Control,
    ControlReply,
    Detokenize,
    DetokenizerToClient,
    Generate,
    Refused,
    SchedulerStats,
    TextDelta,
    Tokenize,
    TokenizerToClient,
    Welcome,
)
from radixcast.protocols.sampling import SamplingParams

PATIENCE_SECONDS = 60.0
"""How long open requests wait for a node that is away."""
ANSWER_SECONDS = 30.0
"""How long a question (tokenize, stats, …) waits for its answer; a node that replaces an actor is asked again meanwhile."""
FLUSH_SECONDS = 1.0
"""How long `close` waits until the node has taken the aborts."""

_encoder = msgspec.msgpack.Encoder()


class EngineClient:
    """A connection to one node (async; all calls from one event loop).

    endpoint: what the server prints, ipc://PATH or tcp://HOST:PORT (then with `curve_server_public`, its Z85 key).
    name: shows in the node's logs. patience: seconds that open requests wait while the node is away, then they fail (503).
    """

    def __init__(
        self,
        endpoint: str,
        *,
        name: str = "",
        curve_server_public: str = "",
        context: zmq.Context[Any] | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.endpoint = endpoint
        self.identity = f"{CLIENT_PREFIX}{name + '-' if name else ''}{uuid.uuid4().hex[:12]}"
        self._server_key = curve_server_public
        self._context = context
        self._own_context = context is None
        self._patience = patience
        self._inward: Dealer | None = None
        self._outward: Dealer | None = None
        self._desk: Desk | None = None
        self._welcome: Welcome | None = None
        self._greeted = False  # in this session, by a node whose runner is ready: a further Welcome means a new scheduler
        self._both_up = asyncio.Event()
        self._away: asyncio.TimerHandle | None = None
        self._closed = False

    # ------------------------------------------------------------------ life

    @property
    def welcome(self) -> Welcome | None:
        """What the node serves; None before the first contact."""
        return self._welcome

    @property
    def connected(self) -> bool:
        """Whether both links are up."""
        return self._both_up.is_set()

    async def connect(self, timeout: float = 30.0) -> Welcome:  # noqa: ASYNC109 - the error says what did not answer
        """Dial and wait until the node answers on both links. Raises LinkClosed after `timeout` seconds (then call again)."""
        if self._closed:
            raise LinkClosed("the client is closed")
        if self._desk is None:
            loop = asyncio.get_running_loop()
            self._desk = Desk(loop.call_later)
            self._context = self._context or zmq.Context()
            self._inward = self._dial(self.endpoint, TOKENIZER, TokenizerToClient)
        try:
            await asyncio.wait_for(self._both_up.wait(), timeout)
        except TimeoutError:
            raise LinkClosed(f"no answer from {self.endpoint} within {timeout:g} s") from None
        assert self._welcome is not None
        return self._welcome

    async def close(self) -> None:
        """Abort what is open and disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._desk is not None:
            self._desk.cancel_all("the client closes")
            if self._both_up.is_set() and self._inward is not None:
                await self._inward.flushed(FLUSH_SECONDS)
            self._desk.fail_all(RequestAborted("the client is closed"))
        self._stop_waiting()
        for dealer in (self._inward, self._outward):
            if dealer is not None:
                dealer.close()
        if self._own_context and self._context is not None:
            self._context.destroy(linger=100)

    async def __aenter__(self) -> EngineClient:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------ requests

    def submit(self, request: Generate) -> Stream:
        """Send one request; an empty rid and a missing seed are filled in.

        Raises at once: DuplicateRequest for an rid that is open in this client, PayloadTooLarge, and InvalidRequest for what
        can't be encoded. Everything else that is wrong with it the stream raises. Needs `connect` to have been called.
        """
        return self.submit_choices(request, 1)[0]

    def submit_choices(self, request: Generate, n: int) -> list[Stream]:
        """Send n requests for n different outputs of one prompt: choices 0 … n-1 of one group with one seed. As `submit`."""
        desk = self._ready_desk()
        if not 1 <= n <= limits.MAX_N:
            raise InvalidRequest(f"n must be in [1, {limits.MAX_N}], got {n}", param="n")
        rid = request.rid or uuid.uuid4().hex
        seed = self._seed() if request.sampling.seed is None else request.sampling.seed
        request = msgspec.structs.replace(
            request,
            rid=rid,
            group=request.group or rid,
            sampling=msgspec.structs.replace(request.sampling, seed=seed, n=1),
        )
        _check_encodable(request)
        if n == 1:
            return desk.submit([request])
        return desk.submit([msgspec.structs.replace(request, rid=choice_rid(rid, c), choice=c) for c in range(n)])

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        **fields: Any,
    ) -> Output:
        """One prompt (text, or token ids) -> its whole output. `fields` are further fields of Generate. Raises RequestError."""
        if isinstance(sampling_params, SamplingParams):
            params = sampling_params
        else:
            params = sampling.parse(sampling_params or {})
            fields.setdefault("clip", not sampling.says_length(sampling_params))
        if isinstance(prompt, str):
            fields["text"] = prompt
        else:
            fields["input_ids"] = pack_ids(prompt)
        async with self.submit(Generate(rid=fields.pop("rid", ""), sampling=params, **fields)) as stream:
            return await stream.result()

    async def abort(self, rid: str = "", all: bool = False, reason: str = "", exact: bool = False) -> None:
        """Abort this client's request called `rid` and those of group `rid` (not with `exact`), or all; unknown ids too.

        Means what was submitted before: the id may be used again at once.
        """
        self._ready_desk().abort(Abort(rid=rid, all=all, reason=reason, exact=exact))

    # ------------------------------------------------------------------ questions
    # Each raises Overloaded when there is no answer within `timeout` seconds, LinkClosed when the client is closed.

    async def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        timeout: float = ANSWER_SECONDS,  # noqa: ASYNC109 - the error says what did not answer
    ) -> list[Int32Array]:
        """Token ids of each text: int32 arrays, read-only. Raises RequestError."""
        message = Tokenize(id=_new_id(), texts=list(texts), add_special_tokens=add_special_tokens)
        return [unpack_ids(ids) for ids in (await self._ask(message, timeout)).ids]

    async def tokenize_chat(self, chat: Chat, *, timeout: float = ANSWER_SECONDS) -> Int32Array:  # noqa: ASYNC109
        """Token ids of a conversation rendered with the chat template. Raises RequestError."""
        return unpack_ids((await self._ask(Tokenize(id=_new_id(), chat=chat), timeout)).ids[0])

    async def detokenize(
        self,
        ids: Sequence[Sequence[int] | Int32Array],
        *,
        skip_special_tokens: bool = True,
        timeout: float = ANSWER_SECONDS,  # noqa: ASYNC109
    ) -> list[str]:
        """Text of each list of token ids. Raises RequestError."""
        message = Detokenize(id=_new_id(), ids=[pack_ids(i) for i in ids], skip_special_tokens=skip_special_tokens)
        return list((await self._ask(message, timeout)).texts)

    async def flush_cache(self, *, timeout: float = ANSWER_SECONDS) -> ControlReply:  # noqa: ASYNC109
        """Empty the radix cache. `ok` is False, with a message, while requests run."""
        reply = await self._ask(Control(id=_new_id(), what="flush_cache"), timeout)
        assert isinstance(reply, ControlReply)
        return reply

    async def stats(self, *, timeout: float = ANSWER_SECONDS) -> SchedulerStats:  # noqa: ASYNC109
        """The scheduler's gauges and counters, now. Raises Overloaded while it has none (the model is loading)."""
        reply = await self._ask(Control(id=_new_id(), what="stats"), timeout)
        if reply.stats is None:
            raise Overloaded(reply.message or "the node gave no numbers", retry_after=1.0)
        stats: SchedulerStats = reply.stats
        return stats

    async def _ask(self, question: Tokenize | Detokenize | Control, seconds: float) -> Any:
        desk = self._ready_desk()
        _check_encodable(question)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        desk.ask(question, answer)
        try:
            async with asyncio.timeout(seconds):
                reply = await answer
        except TimeoutError:
            what = question.what if isinstance(question, Control) else type(question).__name__.lower()
            state = "has not answered" if self.connected else "is away and has not answered"
            raise Overloaded(
                f"the node at {self.endpoint} {state} {what!r} within {seconds:g} s", code="node_unavailable", retry_after=1.0
            ) from None
        if not isinstance(reply, ControlReply) and reply.error is not None:
            raise reply.error.to_exception()
        return reply

    def fail_open(self, error: RequestError) -> None:
        """End everything that is open with `error`: for an owner who knows that the node will not come back."""
        if self._desk is not None:
            self._desk.fail_all(error)

    # ------------------------------------------------------------------ links

    def _ready_desk(self) -> Desk:
        if self._closed or self._desk is None:
            raise LinkClosed("the client is closed" if self._closed else "the client is not connected: await connect() first")
        return self._desk

    def _seed(self) -> int:
        """For a request that brings none: the node's --random-seed, else a fresh one."""
        fixed = self._welcome.random_seed if self._welcome is not None else None
        return secrets.randbits(63) if fixed is None else fixed

    def _dial(self, endpoint: str, peer: str, inbox: Any) -> Dealer:
        assert self._context is not None
        dealer = Dealer(
            self._context,
            endpoint,
            identity=self.identity,
            peer=peer,
            epoch=new_epoch(),
            inbox=inbox,
            server_key=self._server_key if endpoint.startswith("tcp://") else "",
            on_message=self._on_message,
            on_up=self._on_up,
            on_down=self._on_down,
            on_writable=self._on_writable,
        )
        try:
            dealer.open()
        except (zmq.ZMQError, ValueError) as error:
            raise LinkClosed(f"can't dial {endpoint}: {error}") from None
        return dealer

    def _on_message(self, message: Any, peer: str, buffers: list[bytes]) -> None:
        assert self._desk is not None
        if isinstance(message, TextDelta):
            self._desk.on_delta(message)
        elif isinstance(message, Refused):
            self._desk.on_refused(message)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        else:
            self._desk.on_reply(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._greeted and self._desk is not None:
            self._desk.scheduler_replaced()
        self._greeted = welcome.max_total_tokens > 0
        self._welcome = welcome
        endpoint = reachable(welcome.output_endpoint, self.endpoint)
        if self._outward is not None and self._outward.endpoint != endpoint:
            self._outward.close()
            self._outward = None
            self._on_down(DETOKENIZER, "it moved")
        if self._outward is None:
            self._outward = self._dial(endpoint, DETOKENIZER, DetokenizerToClient)
        self._check_up()

    def _on_up(self, peer: str) -> None:
        assert self._desk is not None
        if peer == TOKENIZER and self._inward is not None:
            self._desk.inward_up(self._inward)
        elif peer == DETOKENIZER and self._outward is not None:
            self._desk.outward_up(self._outward)
        self._check_up()

    def _on_down(self, peer: str, reason: str) -> None:
        assert self._desk is not None
        self._both_up.clear()
        if peer == TOKENIZER:
            self._greeted = False
            self._desk.inward_down()
        else:
            self._desk.outward_down()
        if self._away is None and not self._closed:
            self._away = asyncio.get_running_loop().call_later(self._patience, self._give_up)

    def _on_writable(self, peer: str) -> None:
        if self._desk is not None:
            self._desk.pump()

    def _check_up(self) -> None:
        if self._welcome and self._inward and self._inward.up and self._outward and self._outward.up:
            self._both_up.set()
            self._stop_waiting()

    def _give_up(self) -> None:
        self._away = None
        self.fail_open(Overloaded(f"the node at {self.endpoint} is away", code="node_unavailable", retry_after=1.0))

    def _stop_waiting(self) -> None:
        if self._away is not None:
            self._away.cancel()
            self._away = None


def reachable(endpoint: str, dialled: str) -> str:
    """The output endpoint as this client can dial it: for a wildcard address, the host that was dialled."""
    parts = urlsplit(endpoint)
    if parts.scheme == "tcp" and parts.hostname in ("0.0.0.0", "*", "::"):
        host = dialled.removeprefix("tcp://").rpartition(":")[0]
        return f"tcp://{host}:{endpoint.rpartition(':')[2]}"
    return endpoint


def _check_encodable(message: msgspec.Struct) -> None:
    """Refuse what msgpack can't carry before it is queued: lone surrogates, integers beyond 64 bits, foreign objects."""
    try:
        size = len(_encoder.encode(message))
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the request can't be encoded: {error}") from None
    if size > limits.MAX_BODY_BYTES:
        raise PayloadTooLarge(f"the request has {size} bytes, at most {limits.MAX_BODY_BYTES}")


def _new_id() -> str:
    return uuid.uuid4().hex
