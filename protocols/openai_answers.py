"""The OpenAI dialect, what goes out: the shapes of whole answers and of stream events.

Field order is the order in the JSON. Floats in here are finite: who fills them in clamps.
"""

from __future__ import annotations

from typing import Any

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Always there, also when nothing was cached."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Always there."""

    forced_tokens: int = 0
    """Output tokens that a grammar forced, appended without sampling (jump-forward)."""


class UsageInfo(msgspec.Struct, frozen=True):
    """Tokens of one body: a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()
    reasoning_tokens: int = 0


class TopLogprob(msgspec.Struct, frozen=True):
    """One candidate at a position."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token at a position."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a completions choice; four lists of one length. The first prompt token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class ChatMessage(msgspec.Struct, frozen=True):
    """`message` of a chat choice."""

    content: str
    role: str = "assistant"
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a whole chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    metadata: dict[str, Any]


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a choice's message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice inside a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of a completions answer or chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completions answer, or one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
    metadata: dict[str, Any] | None = None


def usage_info(prompt_tokens: int, completion_tokens: int, cached_tokens: int, forced_tokens: int = 0) -> UsageInfo:
    """Counts -> usage."""
    return UsageInfo(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
        completion_tokens_details=CompletionTokensDetails(forced_tokens),
    )
