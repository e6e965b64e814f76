"""A node in one object: real sockets and the real protocol, but a made-up model. Its two actors can be killed and replaced.

Output token p of a request is a pure function of (prompt, seed, choice, p), as in a real node; its text is one letter. Text
comes out in pairs of tokens, so that ids run ahead of their text as they do while a stop string is held back.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from typing import Any

import msgspec
import zmq

from radixcast.actors.setup import CLIENT_PREFIX
from radixcast.actors.transport import Router, new_epoch
from radixcast.protocols.buffers import pack_floats, pack_ids, unpack_ids
from radixcast.protocols.errors import ContextLengthExceeded, Overloaded, RequestAborted
from radixcast.protocols.public import (
    Abort,
    ClientToDetokenizer,
    ClientToTokenizer,
    Control,
    ControlReply,
    Detokenize,
    DetokenizeReply,
    EndAck,
    Finish,
    Generate,
    Logprobs,
    Refused,
    SchedulerStats,
    TextDelta,
    Tokenize,
    TokenizeReply,
    Usage,
    Welcome,
)

CONTEXT = 4096


def prompt_of(request: Generate) -> bytes:
    """The prompt as bytes, whatever form it came in."""
    return request.input_ids or (request.text or "").encode()


def token_at(request: Generate, position: int) -> int:
    """Output token `position`: 97 … 122, a letter."""
    key = prompt_of(request) + f"/{request.sampling.seed}/{request.choice}/{position}".encode()
    return 97 + zlib.crc32(key) % 26


def expected_text(request: Generate, tokens: int) -> str:
    """The whole text of `tokens` output tokens."""
    return "".join(chr(token_at(request, p)) for p in range(tokens))


class FakeNode:
    """Serves until `close`. `pause` holds all output back; `step_seconds` is the time of one token."""

    def __init__(self, folder: str, step_seconds: float = 0.0) -> None:
        self.endpoint = f"ipc://{folder}/in"
        self.output_endpoint = f"ipc://{folder}/out"
        self.step_seconds = step_seconds
        self.go = asyncio.Event()
        self.go.set()
        self.received: list[Any] = []
        self.end_acks: list[EndAck] = []
        self.refuse: set[str] = set()
        self.busy_attempts: set[tuple[str, int]] = set()
        self.random_seed: int | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self.deaf = False
        """Questions are not answered."""
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._groups: dict[tuple[str, str], str] = {}
        """By (client, rid), as `_tasks`."""
        self._in: Router | None = None
        self._out: Router | None = None
        self._clients: set[str] = set()
        self._outbox: list[tuple[str, TextDelta]] = []

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Bind both sockets."""
        self.start_tokenizer()
        self.start_detokenizer()

    def start_tokenizer(self) -> None:
        """A new tokenizer, under a new epoch."""
        self._in = self._router(self.endpoint, ClientToTokenizer, self._on_request, self._on_client)

    def start_detokenizer(self) -> None:
        """A new detokenizer, under a new epoch."""
        self._out = self._router(self.output_endpoint, ClientToDetokenizer, self._on_ack, lambda client: None)

    def kill_tokenizer(self) -> None:
        """The tokenizer dies: nothing is told to anybody."""
        assert self._in is not None
        self._in._close_socket(0)
        self._in.close()
        self._in = None

    def kill_detokenizer(self) -> None:
        """The detokenizer dies, and with it what it had not sent. The requests run on (and their output is lost)."""
        assert self._out is not None
        self._out._close_socket(0)
        self._out.close()
        self._out = None
        self._outbox.clear()

    async def close(self) -> None:
        """Stop everything."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for router in (self._in, self._out):
            if router is not None:
                router.close()
        await asyncio.to_thread(self._context.term)

    async def __aenter__(self) -> FakeNode:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def replace_scheduler(self) -> None:
        """The scheduler dies with all requests: what streamed ends with its code, then clients hear Welcome once more."""
        for task in list(self._tasks.values()):
            task.cancel("lost")
        asyncio.get_running_loop().call_later(0.01, self._welcome_all)

    def _welcome_all(self) -> None:
        for client in self._clients:
            self._on_client(client)

    def requests(self, rid: str) -> list[Generate]:
        """Every form in which the request arrived."""
        return [m for m in self.received if isinstance(m, Generate) and m.rid == rid]

    def _router(self, endpoint: str, inbox: Any, on_message: Any, on_up: Any) -> Router:
        router = Router(
            self._context,
            endpoint,
            epoch=new_epoch(),
            inboxes={CLIENT_PREFIX: inbox},
            on_message=on_message,
            on_up=on_up,
            on_down=lambda client, reason: None,
            on_writable=lambda client: self._push(),
        )
        router.open()
        return router

    # ------------------------------------------------------------------ tokenizer

    def _on_client(self, client: str) -> None:
        self._clients.add(client)
        welcome = Welcome(
            output_endpoint=self.output_endpoint,
            model="fake",
            context_length=CONTEXT,
            vocab_size=256,
            max_total_tokens=1 << 16,
            random_seed=self.random_seed,
        )
        self._answer(client, welcome)

    def _answer(self, client: str, message: msgspec.Struct) -> None:
        peer = self._in.get(client) if self._in is not None else None
        if peer is not None:
            peer.send(message)

    def _on_request(self, message: Any, client: str, buffers: list[bytes]) -> None:
        self.received.append(message)
        if isinstance(message, Generate):
            self._generate(message, client)
        elif isinstance(message, Abort):
            for key in [k for k, group in self._groups.items() if k[0] == client and message.names(k[1], group)]:
                asyncio.get_running_loop().call_soon(self._tasks[key].cancel)  # when it has begun, so that it tells its end
        elif self.deaf:
            pass
        elif isinstance(message, Tokenize):
            self._answer(client, TokenizeReply(id=message.id, ids=[pack_ids(t.encode()) for t in message.texts]))
        elif isinstance(message, Detokenize):
            texts = [bytes(unpack_ids(i).tolist()).decode() for i in message.ids]
            self._answer(client, DetokenizeReply(id=message.id, texts=texts))
        elif isinstance(message, Control):
            stats = SchedulerStats(running=len(self._tasks)) if message.what == "stats" else None
            self._answer(client, ControlReply(id=message.id, stats=stats))

    def _generate(self, request: Generate, client: str) -> None:
        if len(prompt_of(request)) > CONTEXT or request.rid in self.refuse:
            error = ContextLengthExceeded("too long", param="text").info
            self._answer(client, Refused(rid=request.rid, attempt=request.attempt, error=error))
            return
        if (request.rid, request.attempt) in self.busy_attempts:
            error = Overloaded("queue full", retry_after=0.05).info
            self._answer(client, Refused(rid=request.rid, attempt=request.attempt, error=error))
            return
        key = (client, request.rid)
        old = self._tasks.pop(key, None)
        if old is not None:
            old.remove_done_callback(self._forget)
            old.cancel("replaced")
        task = asyncio.create_task(self._run(request, client), name=f"{client}/{request.rid}")
        self._tasks[key] = task
        self._groups[key] = request.group
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        for key in [k for k, t in self._tasks.items() if t is task]:
            del self._tasks[key]
            del self._groups[key]

    # ------------------------------------------------------------------ the model and the detokenizer

    async def _run(self, request: Generate, client: str) -> None:
        held = len(request.output_ids) // 4
        total = request.sampling.max_new_tokens or 16
        given = unpack_ids(request.output_ids).tolist()
        assert given == [token_at(request, p) for p in range(held)], "output_ids are not what was generated"
        text_sent = held if held == total else held - held % 2
        position = held
        try:
            for position in range(held, total):
                await asyncio.sleep(self.step_seconds)
                await self.go.wait()
                ready = position + 1 if position + 1 == total else (position + 1) - (position + 1) % 2
                text = "".join(chr(token_at(request, p)) for p in range(text_sent, ready))
                self._say(client, self._delta(request, position, text_sent, text, position == held, position + 1 == total))
                text_sent = ready
        except asyncio.CancelledError as cancelled:
            lost = cancelled.args == ("lost",)
            if cancelled.args != ("replaced",) and not (lost and position == held):
                error = Overloaded("lost", code="scheduler_lost") if lost else RequestAborted("aborted")
                finish = Finish(reason="error" if lost else "abort", error=error.info)
                self._say(client, TextDelta(rid=request.rid, attempt=request.attempt, token_offset=held, finish=finish))
            raise

    def _delta(self, request: Generate, position: int, text_offset: int, text: str, first: bool, last: bool) -> TextDelta:
        token = token_at(request, position)
        prompt = list(prompt_of(request))
        logprobs = prompt_logprobs = None
        if request.logprobs:
            logprobs = Logprobs(values=pack_floats([-token / 100]), ids=pack_ids([token]))
            if first and request.logprob_start >= 0:
                values = [math.nan] + [-0.5] * (len(prompt) - 1)
                prompt_logprobs = Logprobs(values=pack_floats(values), ids=pack_ids(prompt))
        return TextDelta(
            rid=request.rid,
            attempt=request.attempt,
            choice=request.choice,
            token_offset=position,
            token_ids=pack_ids([token]),
            text_offset=text_offset,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_ids=pack_ids(prompt) if first and request.return_prompt_ids else None,
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=position + 1),
            finish=Finish(reason="length") if last else None,
        )

    def _say(self, client: str, delta: TextDelta) -> None:
        if self._out is not None:
            self._outbox.append((client, delta))
            self._push()

    def _push(self) -> None:
        left = []
        for client, delta in self._outbox:
            peer = self._out.get(client) if self._out is not None else None
            if peer is not None and not peer.send(delta):
                left.append((client, delta))
        self._outbox = left

    def _on_ack(self, message: EndAck, client: str, buffers: list[bytes]) -> None:
        self.end_acks.append(message)
