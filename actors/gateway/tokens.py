"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from radixcast.actors.gateway.body import read_json
from radixcast.actors.gateway.http import Call
from radixcast.actors.gateway.openai_common import ids_array
from radixcast.protocols import limits
from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.errors import InvalidRequest
from radixcast.protocols.openai import field_of
from radixcast.protocols.public import Chat

T = TypeVar("T", bound=msgspec.Struct)


class TokenizeBody(msgspec.Struct, frozen=True):
    """Texts, or a conversation."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """One id list, or several."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool = True
    model: str | None = None


async def tokenize(call: Call) -> web.StreamResponse:
    """{"prompt": text or texts} or {"messages": …} -> {"tokens", "count", "max_model_len"}."""
    body = _convert(await read_json(call.request), TokenizeBody)
    call.gateway.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
    tokens: list[int] | list[list[int]]
    if body.messages is not None:
        if not body.messages:
            raise InvalidRequest("messages must be a list with at least one message", param="messages")
        tokens = (await call.gateway.ready_engine().tokenize_chat(_chat(body, body.messages))).tolist()
    else:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        if not texts or len(texts) > limits.MAX_BATCH:
            raise InvalidRequest(f"prompt must hold 1 to {limits.MAX_BATCH} texts", param="prompt")
        rows = await call.gateway.ready_engine().tokenize(texts, add_special_tokens=body.add_special_tokens)
        tokens = rows[0].tolist() if isinstance(body.prompt, str) else [row.tolist() for row in rows]
    is_batch = isinstance(body.prompt, list)
    count = [len(t) for t in tokens if isinstance(t, list)] if is_batch else len(tokens)
    return call.json({"tokens": tokens, "count": count, "max_model_len": call.gateway.context_length})


async def detokenize(call: Call) -> web.StreamResponse:
    """{"tokens": ids or id lists} -> {"text": text or texts}."""
    body = _convert(await read_json(call.request), DetokenizeBody)
    call.gateway.check_model(body.model)
    flat = [t for t in body.tokens if isinstance(t, int)]
    rows = [t for t in body.tokens if isinstance(t, list)]
    if flat and rows:
        raise InvalidRequest("tokens must be ids or lists of ids, not both", param="tokens")
    if len(rows) > limits.MAX_BATCH:
        raise InvalidRequest(f"tokens has {len(rows)} lists, at most {limits.MAX_BATCH}", param="tokens")
    ids: list[Sequence[int] | Int32Array] = [ids_array(row, "tokens") if row else [] for row in rows or [flat]]
    texts = await call.gateway.ready_engine().detokenize(ids, skip_special_tokens=body.skip_special_tokens)
    return call.json({"text": texts if rows else texts[0]})


def _chat(body: TokenizeBody, messages: list[dict[str, Any]]) -> Chat:
    return Chat(
        messages=messages,
        tools=body.tools or None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs or {},
    )


def _convert(body: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=field_of(error)) from None
