"""Is it alive, is it ready, does it generate: three questions with three honest answers.

/health           the actors live: heartbeats only, no token; quick also during a long prefill
/ready            new requests would be served now
/health_generate  a token came out, or the busy engine made progress meanwhile
"""

from __future__ import annotations

import asyncio
import uuid

from aiohttp import web

from radixcast.actors.gateway.http import Call
from radixcast.actors.gateway.service import Gateway
from radixcast.protocols.errors import ErrorInfo, Overloaded, RequestError
from radixcast.protocols.public import Generate
from radixcast.protocols.sampling import SamplingParams

PROBE_TIMEOUT = 20.0
"""Seconds that /health_generate waits for its token."""

_PROBE_TEXT = "Hello"


async def health(call: Call) -> web.StreamResponse:
    """GET /health: 200 when every actor shows signs of life, else 503 with the reason."""
    return _answer(call, call.gateway.unhealthy())


async def ready(call: Call) -> web.StreamResponse:
    """GET /ready: 200 when a request sent now would be served."""
    return _answer(call, call.gateway.unready())


async def live(call: Call) -> web.StreamResponse:
    """GET /livez: 200 when this process answers."""
    return _answer(call, None)


async def health_generate(call: Call) -> web.StreamResponse:
    """GET /health_generate: one greedy token, one probe at a time (later callers share the wait, not the work)."""
    gateway = call.gateway
    try:
        async with asyncio.timeout(PROBE_TIMEOUT + 5), gateway.probe:
            reason = await _probe(gateway)
    except TimeoutError:
        reason = "another probe did not end in time"
    return _answer(call, reason)


async def _probe(gateway: Gateway) -> str | None:
    before = (await gateway.fresh_stats()).steps
    request = Generate(
        rid=f"health-{uuid.uuid4().hex}",
        text=_PROBE_TEXT,
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        stream=False,
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT), gateway.work([(request, 1)]) as work:
            await work.outputs()
            return None
    except TimeoutError:
        reason = f"no token within {PROBE_TIMEOUT:g} s"
    except Overloaded as error:
        reason = str(error)
        await asyncio.sleep(1.0)
    except RequestError as error:
        return str(error)
    return None if (await gateway.fresh_stats()).steps > before else reason


def _answer(call: Call, reason: str | None) -> web.StreamResponse:
    if reason is None:
        return call.json({"status": "ok"})
    raise Overloaded(reason, info=ErrorInfo(reason, 503, "service_unavailable", "not_ready", retry_after=1))
