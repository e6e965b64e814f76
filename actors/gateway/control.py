"""Operators' routes: flush the cache, abort requests."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from radixcast.actors.gateway.body import read_json
from radixcast.actors.gateway.http import Call
from radixcast.protocols import limits
from radixcast.protocols.errors import InvalidRequest

_RETRY_EVERY = 0.1
_MAX_FLUSH_WAIT = 600.0


async def flush_cache(call: Call) -> web.StreamResponse:
    """GET|POST /flush_cache?timeout=SECONDS: 200 when the tree is empty; 400 while requests run (after `timeout`)."""
    await read_json(call.request, optional=True)
    deadline = time.monotonic() + _timeout(call.request.query.get("timeout"))
    engine = call.gateway.ready_engine()
    while True:
        reply = await engine.flush_cache()
        if reply.ok:
            return call.text("Cache flushed.\n")
        if time.monotonic() >= deadline:
            raise InvalidRequest(reply.message or "the cache can't be flushed while requests run", code="cache_in_use")
        await asyncio.sleep(_RETRY_EVERY)


async def abort_request(call: Call) -> web.StreamResponse:
    """POST /abort_request {"rid"} or {"abort_all": true}: always 200, also for ids that are not known."""
    body = await read_json(call.request, optional=True)
    rid, everything, reason = body.get("rid", ""), body.get("abort_all", False), body.get("abort_message") or "aborted"
    if not isinstance(rid, str | None) or len(rid or "") > limits.MAX_RID_CHARS:
        raise InvalidRequest(f"rid must be a string of at most {limits.MAX_RID_CHARS} characters", param="rid")
    if not isinstance(everything, bool):
        raise InvalidRequest("abort_all must be true or false", param="abort_all")
    if not isinstance(reason, str):
        raise InvalidRequest("abort_message must be a string", param="abort_message")
    if rid or everything:
        await call.gateway.ready_engine().abort("" if everything else rid or "", all=everything, reason=reason[:1000])
    return call.json({"success": True})


def _timeout(text: str | None) -> float:
    """`timeout` of the query in seconds; 0 when absent. Raises InvalidRequest."""
    try:
        value = float(text) if text else 0.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MAX_FLUSH_WAIT:
        raise InvalidRequest(f"timeout must be in [0, {_MAX_FLUSH_WAIT:g}] seconds", param="timeout")
    return value
