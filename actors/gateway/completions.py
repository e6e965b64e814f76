"""POST /v1/completions: prompts as they are, no template; echo, and logprobs of the prompt with it."""

from __future__ import annotations

from aiohttp import web

from radixcast.actors.collect import Output
from radixcast.actors.gateway.body import read_json
from radixcast.actors.gateway.http import Call
from radixcast.actors.gateway.logprobs import CompletionRows, joined
from radixcast.actors.gateway.openai_common import Header, check_rid, ids_array, packed, reason_of
from radixcast.actors.gateway.sse import event
from radixcast.actors.gateway.work import Work
from radixcast.protocols import limits
from radixcast.protocols.errors import InvalidRequest
from radixcast.protocols.openai import CompletionRequest, check_supported, parse_completion, prompts_of, sampling_of
from radixcast.protocols.openai_answers import Completion, CompletionChoice, CompletionLogprobs, UsageInfo
from radixcast.protocols.public import Generate, TextDelta
from radixcast.protocols.sampling import SamplingParams


async def completions(call: Call) -> web.StreamResponse:
    """P prompts in, P x n texts out; choice j of prompt i has index i*n + j."""
    request, ignored = parse_completion(await read_json(call.request))
    call.note_ignored(ignored)
    call.gateway.check_model(request.model)
    check_supported(request)
    params = sampling_of(request, call.gateway.sampling_defaults)
    prompts = prompts_of(request.prompt)
    if len(prompts) * params.n > limits.MAX_BATCH:
        raise InvalidRequest(f"prompts x n is {len(prompts) * params.n}, at most {limits.MAX_BATCH}", param="n")
    header = Header(call, "cmpl", request.rid if isinstance(request.rid, str) else None)
    requests = to_generates(request, prompts, params, header.id)
    echoes = await _echoes(call, prompts) if request.echo else [""] * len(prompts)
    async with call.gateway.work([(r, params.n) for r in requests]) as work:
        if request.stream:
            return await _Streamer(call, request, header, work, echoes, params.n).run()
        outputs = await work.outputs()
        choices = [_choice(i, output, request, echoes[i // params.n]) for i, output in enumerate(outputs)]
        return call.json(
            Completion(
                id=header.id,
                created=header.created,
                model=header.model,
                choices=choices,
                usage=work.tally.usage(),
                metadata={"weight_version": call.gateway.weight_version},
            )
        )


def to_generates(
    request: CompletionRequest, prompts: list[str | list[int]], params: SamplingParams, rid: str
) -> list[Generate]:
    """A completions body as the engine's own requests, one a prompt. Raises InvalidRequest."""
    rids = _rids(request.rid, rid, len(prompts))
    with_logprobs = request.logprobs is not None
    return [
        Generate(
            rid=rids[i],
            group=rid if not isinstance(request.rid, list) else rids[i],
            text=prompt if isinstance(prompt, str) else None,
            input_ids=packed(prompt, "prompt") if not isinstance(prompt, str) else None,
            sampling=params,
            add_special_tokens=request.add_special_tokens is not False,
            stream=bool(request.stream),
            logprobs=with_logprobs,
            logprob_start=0 if with_logprobs and request.echo else -1,
            top_logprobs=request.logprobs or 0,
            priority=request.priority or 0,
            cache_salt=request.namespace,
            return_text_in_logprobs=with_logprobs,
            clip=request.max_tokens is None,
        )
        for i, prompt in enumerate(prompts)
    ]


def _rids(given: str | list[str] | None, rid: str, count: int) -> list[str]:
    if isinstance(given, list):
        if len(given) != count:
            raise InvalidRequest(f"rid is a list of {len(given)} for {count} prompts", param="rid")
        if len(set(given)) != count:
            raise InvalidRequest("rid holds the same id twice", param="rid", code="duplicate_request_id")
        return [check_rid(r) for r in given]
    return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]


async def _echoes(call: Call, prompts: list[str | list[int]]) -> list[str]:
    """The text of each prompt: as given, or decoded from its ids. Raises RequestError."""
    ids = [ids_array(p, "prompt") for p in prompts if not isinstance(p, str)]
    decoded = iter(await call.gateway.ready_engine().detokenize(ids, skip_special_tokens=False) if ids else ())
    return [p if isinstance(p, str) else next(decoded) for p in prompts]


def _choice(index: int, output: Output, request: CompletionRequest, echo: str) -> CompletionChoice:
    logprobs = None
    if request.logprobs is not None:
        rows = CompletionRows(request.logprobs)
        prompt = rows.prompt(output.prompt_logprobs, echo)
        logprobs = joined(prompt, rows.output(output.logprobs))
    return CompletionChoice(
        index=index,
        text=echo + output.text,
        logprobs=logprobs,
        finish_reason=reason_of(output.finish),
        matched_stop=output.finish.matched if output.finish else None,
    )


class _Streamer:
    """Turns pieces into chunks; the first one of a choice has the echoed prompt in front."""

    def __init__(self, call: Call, request: CompletionRequest, header: Header, work: Work, echoes: list[str], n: int) -> None:
        self._events = call.events()
        self._request = request
        self._header = header
        self._work = work
        self._echo: list[str | None] = [echo for echo in echoes for _ in range(n)]
        """None once it is out."""
        self._rows = [CompletionRows(request.logprobs or 0) for _ in self._echo]

    async def run(self) -> web.StreamResponse:
        """Stream everything."""
        async for index, delta in self._work.deltas():
            await self._events.send(self._piece(index, delta))
        if self._request.include_usage:
            await self._events.send(self._event([], self._work.tally.usage()))
        return await self._events.done()

    def _piece(self, index: int, delta: TextDelta) -> bytes:
        echo, self._echo[index] = self._echo[index], None
        text, logprobs = (echo or "") + delta.text, self._logprobs(index, delta, echo)
        if not text and not (logprobs and logprobs.tokens) and delta.finish is None:
            return b""
        finish = delta.finish
        choice = CompletionChoice(index, text, logprobs, reason_of(finish), finish.matched if finish else None)
        return self._event([choice], self._work.tally.usage() if self._request.continuous_usage else None)

    def _logprobs(self, index: int, delta: TextDelta, echo: str | None) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        rows = self._rows[index]
        if echo is None:
            return rows.output(delta.logprobs)
        prompt = rows.prompt(delta.prompt_logprobs, echo)
        return joined(prompt, rows.output(delta.logprobs))

    def _event(self, choices: list[CompletionChoice], usage: UsageInfo | None) -> bytes:
        header = self._header
        return event(Completion(id=header.id, created=header.created, model=header.model, choices=choices, usage=usage))
