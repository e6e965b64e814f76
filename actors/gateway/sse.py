"""Server-sent events: `data: JSON`, a blank line, and `data: [DONE]` at the end.

The headers go out with the first event, so an error before it is still an ordinary answer with its own status.
`await send` is the back-pressure: a slow reader holds it, and what comes meanwhile is merged upstream.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from radixcast.actors.gateway.errors import error_object
from radixcast.protocols.errors import ErrorInfo

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """A struct or plain data -> the bytes of one event. Compact JSON has no raw line break, so one line is enough."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventStream:
    """One streamed answer."""

    def __init__(self, request: web.BaseRequest, headers: dict[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS | headers)

    @property
    def started(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Write events (bytes from `event`, joined; none: the headers only). Raises ConnectionError when the client left."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
        if data:
            await self.response.write(data)

    async def done(self) -> web.StreamResponse:
        """Write [DONE] and end the answer."""
        await self.send(DONE)
        await self.response.write_eof()
        return self.response

    async def fail(self, info: ErrorInfo) -> web.StreamResponse:
        """Write an error event, then end: the stream says what happened and is still well-formed."""
        await self.send(event(error_object(info)))
        return await self.done()
