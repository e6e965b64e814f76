"""POST /generate, the native route: one prompt or a batch, in the shape that SGLang's clients know.

Streams are cumulative: every event holds the whole text and all ids so far; with a list reply each also has its `index`.
"""

from __future__ import annotations

from aiohttp import web

from radixcast.actors.collect import Collector
from radixcast.actors.gateway.body import read_json
from radixcast.actors.gateway.http import Call
from radixcast.actors.gateway.sse import event
from radixcast.actors.gateway.work import Work
from radixcast.actors.native import NativeRequest, native_dict, parse_native
from radixcast.protocols.public import Generate


async def generate(call: Call) -> web.StreamResponse:
    """Answer one body of /generate."""
    native = parse_native(await read_json(call.request))
    requests = [(item.request, item.n) for item in native.requests]
    of_output = [item.request for item in native.requests for _ in range(item.n)]
    async with call.gateway.work(requests) as work:
        if native.stream:
            return await _stream(call, native, of_output, work)
        outputs = await work.outputs()
        version, elapsed = call.gateway.weight_version, work.elapsed
        replies = [
            native_dict(output, request, weight_version=version, e2e_latency=elapsed)
            for output, request in zip(outputs, of_output, strict=True)
        ]
        return call.json(replies if native.is_list else replies[0])


async def _stream(call: Call, native: NativeRequest, of_output: list[Generate], work: Work) -> web.StreamResponse:
    events = call.events()
    collectors = [Collector() for _ in of_output]
    version = call.gateway.weight_version
    async for index, delta in work.deltas():
        if collectors[index].feed(delta) is None:
            continue
        output = collectors[index].output()
        reply = native_dict(output, of_output[index], weight_version=version, e2e_latency=work.elapsed)
        await events.send(event({**reply, "index": index} if native.is_list else reply))
    return await events.done()
