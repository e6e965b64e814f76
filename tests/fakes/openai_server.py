"""A tiny OpenAI server over a real socket: it answers `max_tokens` words, counts words as tokens and remembers prompts."""

from __future__ import annotations

import asyncio
import json
import socket
from types import TracebackType
from typing import Any

from aiohttp import web


class FakeOpenAI:
    """`async with FakeOpenAI() as server: … server.url`. `requests` holds what came, as (path, body).

    `hold`: nothing is answered before so many requests run at once.
    """

    def __init__(
        self,
        *,
        usage: bool = True,
        tokenize: bool = True,
        fail_every: int = 0,
        cut_every: int = 0,
        hold: int = 1,
        forced: int | None = None,
    ) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.running = 0
        self.most_running = 0
        self._usage = usage
        self._forced = forced
        self._fail_every = fail_every
        self._cut_every = cut_every
        self._hold = hold
        self._enough = asyncio.Event()
        self._seen: list[str] = []
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        if tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app)
        self.url = ""

    async def __aenter__(self) -> FakeOpenAI:
        await self._runner.setup()
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        await web.SockSite(self._runner, listening).start()
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """A word is a token, a line break too, but words with a `c` are two."""
        text = (await request.json())["prompt"]
        count = len(text.split()) + text.count("\n") + sum("c" in word for word in text.split())
        return web.json_response({"tokens": list(range(count)), "count": count})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body))
        number = len(self.requests)
        if self._fail_every and number % self._fail_every == 0:
            return web.json_response({"error": {"message": "busy"}}, status=503)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running >= self._hold:
            self._enough.set()
        try:
            await self._enough.wait()
            return await self._answer(request, body, cut=bool(self._cut_every) and number % self._cut_every == 0)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], *, cut: bool) -> web.StreamResponse:
        chat = "messages" in body
        prompt = " ".join(m["content"] for m in body["messages"]) if chat else body["prompt"]
        cached = max((_common(prompt, seen) for seen in self._seen), default=0)
        self._seen.append(prompt)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        for i in range(body["max_tokens"]):
            word = f"w{i} "
            piece: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
            last = i == body["max_tokens"] - 1
            await send({"choices": [{"index": 0, **piece, "finish_reason": "length" if last else None}]})
            if cut:
                return response
        if self._usage:
            used: dict[str, Any] = {"prompt_tokens": len(prompt.split()), "completion_tokens": body["max_tokens"]}
            if self._forced is not None:
                used["completion_tokens_details"] = {"forced_tokens": self._forced if body.get("jump_forward", True) else 0}
            await send({"choices": [], "usage": {**used, "prompt_tokens_details": {"cached_tokens": cached}}})
        await response.write(b"data: [DONE]\n\n")
        return response


def _common(a: str, b: str) -> int:
    """Words that two texts have in common at their start."""
    count = 0
    for x, y in zip(a.split(), b.split(), strict=False):
        if x != y:
            break
        count += 1
    return count
