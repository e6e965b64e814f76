"""One streamed request against an OpenAI server, and when each piece of it came."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_ERROR_CHARS = 300


@dataclass
class Sample:
    """What one request measured. Times are `time.perf_counter()` seconds."""

    start: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """One entry per event that carried text."""
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    forced_tokens: int | None = None
    """Of the completion tokens, those that a grammar forced; None: the server does not tell."""
    has_usage: bool = False
    """False: the server reported no usage, and events were counted for tokens."""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.arrivals[0] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring events (inter-token latency where an event is a token)."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class BenchClient:
    """Sends requests of one model to one server. Errors become part of the sample, never exceptions."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, model: str, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.session = session
        self.base_url = base_url
        self.model = model
        self.extra = dict(extra or {})

    async def completion(self, prompt: str, max_tokens: int) -> Sample:
        """POST /v1/completions, streamed, greedy, exactly `max_tokens` long where the server knows ignore_eos."""
        return await self._stream("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})

    async def chat(self, messages: list[dict[str, str]], max_tokens: int, **extra: Any) -> Sample:
        """POST /v1/chat/completions, likewise; `extra` goes into the body."""
        return await self._stream("/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens, **extra})

    async def _stream(self, path: str, body: dict[str, Any]) -> Sample:
        request = {
            "model": self.model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
            **self.extra,
        }
        sample = Sample(start=time.perf_counter())
        try:
            async with self.session.post(self.base_url + path, json=request) as answer:
                if answer.status != 200:
                    sample.error = f"HTTP {answer.status}: {(await answer.text())[:_ERROR_CHARS]}"
                else:
                    await _read_events(answer, sample)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            sample.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
        sample.end = time.perf_counter()
        if sample.error is None and not sample.arrivals:
            sample.error = "the stream held no text"
        if not sample.has_usage:
            sample.completion_tokens = len(sample.arrivals)
        return sample


async def _read_events(answer: aiohttp.ClientResponse, sample: Sample) -> None:
    ended = False
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            continue
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event that is no object: {data[:80]!r}")
        if event.get("error"):
            sample.error = str(event["error"])[:_ERROR_CHARS]
            return
        _take(event, sample, now)
    if not ended:
        sample.error = "the stream ended without [DONE]"


def _take(event: dict[str, Any], sample: Sample, now: float) -> None:
    usage = event.get("usage")
    if usage:
        sample.has_usage = True
        sample.prompt_tokens = usage.get("prompt_tokens") or 0
        sample.completion_tokens = usage.get("completion_tokens") or 0
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        sample.forced_tokens = (usage.get("completion_tokens_details") or {}).get("forced_tokens")
    for choice in event.get("choices") or ():
        piece = choice.get("text") or (choice.get("delta") or {}).get("content")
        if piece:
            sample.arrivals.append(now)
            sample.text += piece
        if choice.get("finish_reason"):
            sample.finish_reason = choice["finish_reason"]
