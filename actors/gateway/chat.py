"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from radixcast.actors.collect import Output
from radixcast.actors.gateway.body import read_json
from radixcast.actors.gateway.http import Call
from radixcast.actors.gateway.logprobs import chat_logprobs
from radixcast.actors.gateway.openai_common import Header, packed, reason_of
from radixcast.actors.gateway.sse import event
from radixcast.actors.gateway.work import Work
from radixcast.protocols.openai import ChatRequest, check_supported, parse_chat, sampling_of
from radixcast.protocols.openai_answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    UsageInfo,
)
from radixcast.protocols.public import Chat, Generate, TextDelta
from radixcast.protocols.sampling import SamplingParams


async def chat_completions(call: Call) -> web.StreamResponse:
    """One conversation in, n continuations out, whole or streamed."""
    request, ignored = parse_chat(await read_json(call.request))
    call.note_ignored(ignored)
    call.gateway.check_model(request.model)
    check_supported(request)
    params = sampling_of(request, call.gateway.sampling_defaults)
    header = Header(call, "chatcmpl", request.rid)
    generate = to_generate(request, params, header.id)
    async with call.gateway.work([(generate, params.n)]) as work:
        if request.stream:
            return await _Streamer(call, request, header, work).run(params.n)
        outputs = await work.outputs()
        choices = [_choice(i, output, bool(request.logprobs)) for i, output in enumerate(outputs)]
        return call.json(
            ChatCompletion(
                id=header.id,
                created=header.created,
                model=header.model,
                choices=choices,
                usage=work.tally.usage(),
                metadata={"weight_version": call.gateway.weight_version},
            )
        )


def to_generate(request: ChatRequest, params: SamplingParams, rid: str) -> Generate:
    """A chat body as the engine's own request."""
    chat = None
    if request.input_ids is None:
        chat = Chat(
            messages=[_message(m) for m in request.messages],
            tools=request.tools if request.tools and request.tool_choice != "none" else None,
            add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=request.template_kwargs,
        )
    return Generate(
        rid=rid,
        group=rid,
        chat=chat,
        input_ids=None if request.input_ids is None else packed(request.input_ids, "input_ids"),
        sampling=params,
        stream=bool(request.stream),
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        priority=request.priority or 0,
        cache_salt=request.namespace,
        return_text_in_logprobs=bool(request.logprobs),
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Templates know `system`; OpenAI's newer name for it is `developer`."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _choice(index: int, output: Output, with_logprobs: bool) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=ChatMessage(content=output.text),
        logprobs=chat_logprobs(output.logprobs) if with_logprobs else None,
        finish_reason=reason_of(output.finish),
        matched_stop=output.finish.matched if output.finish else None,
    )


class _Streamer:
    """Turns pieces into chunks: the role once for each choice, text, then a closing chunk with the reason."""

    def __init__(self, call: Call, request: ChatRequest, header: Header, work: Work) -> None:
        self._events = call.events()
        self._request = request
        self._header = header
        self._work = work

    async def run(self, n: int) -> web.StreamResponse:
        """Stream everything."""
        opened = [False] * n
        async for index, delta in self._work.deltas():
            data = b""
            if not opened[index]:
                opened[index] = True
                data = self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
            await self._events.send(data + self._piece(index, delta))
        if self._request.include_usage:
            await self._events.send(self._event([], self._work.tally.usage()))
        return await self._events.done()

    def _piece(self, index: int, delta: TextDelta) -> bytes:
        data = b""
        if delta.text or delta.logprobs is not None:
            logprobs = chat_logprobs(delta.logprobs) if self._request.logprobs else None
            data = self._chunk(ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs))
        if delta.finish is not None:
            finish = delta.finish
            data += self._chunk(ChatChunkChoice(index, ChatDelta(), None, reason_of(finish), finish.matched))
        return data

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        usage = self._work.tally.usage() if self._request.continuous_usage else None
        return self._event([choice], usage)

    def _event(self, choices: list[ChatChunkChoice], usage: UsageInfo | None) -> bytes:
        header = self._header
        return event(ChatChunk(id=header.id, created=header.created, model=header.model, choices=choices, usage=usage))
