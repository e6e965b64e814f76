"""The HTTP shell: from bytes to a `Call`, from a handler's answer or error to bytes.

Order for every request: request id, route, metrics, connection limit, auth, handler. What fails anywhere, aiohttp's own
parser included, is answered in the one error shape.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from radixcast.actors.gateway.auth import Level
from radixcast.actors.gateway.errors import HttpError, error_response, for_openai, type_of
from radixcast.actors.gateway.metrics import UNMATCHED
from radixcast.actors.gateway.service import Gateway
from radixcast.actors.gateway.sse import EventStream
from radixcast.protocols import limits
from radixcast.protocols.errors import ErrorInfo, InternalError, LinkClosed, NotFound, Overloaded, RequestError

log = logging.getLogger(__name__)

KEEPALIVE_TIMEOUT = 620.0
"""Seconds an idle connection stays open: longer than load balancers keep theirs, so that the server never closes first."""

LINGER = 30.0
"""Seconds that a refused body is still read and thrown away, so that its sender gets to see the answer."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Route:
    """One row of the route table. A pattern that ends in `/{id}` matches any tail, slashes included."""

    methods: tuple[str, ...]
    pattern: str
    level: Level
    handler: Callable[[Call], Awaitable[web.StreamResponse]]
    openai: bool = False
    """Errors name sampling fields as OpenAI bodies spell them."""


@dataclass(slots=True)
class Call:
    """One request on its way through a handler."""

    gateway: Gateway
    request: web.BaseRequest
    request_id: str
    tail: str = ""
    """What `{id}` of the pattern matched."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with the answer, streamed or not."""

    stream: EventStream | None = None
    """The streamed answer, once a handler began one: what fails after its first byte becomes its last event."""

    def events(self) -> EventStream:
        """The answer as a stream of events."""
        self.stream = EventStream(self.request, self.headers)
        return self.stream

    def json(self, value: object, status: int = 200) -> web.Response:
        """A struct or plain data as the whole answer."""
        return web.Response(
            status=status, body=msgspec.json.encode(value), content_type="application/json", headers=self.headers
        )

    def text(self, text: str, status: int = 200) -> web.Response:
        """Plain text as the whole answer."""
        return web.Response(status=status, text=text, headers=self.headers)

    def note_ignored(self, names: list[str]) -> None:
        """Tell the client which of its fields had no effect."""
        if names:
            safe = ",".join(_UNSAFE.sub("?", name[:64]) for name in names[:16])
            self.headers["X-Radixcast-Ignored-Fields"] = safe
            log.debug("request %s: fields without effect: %s", self.request_id, safe)


class Table:
    """Finds routes. Paths are compared as sent: `//health` or `/%68ealth` is another path, and matches nothing."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefix: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            head, placeholder, _ = route.pattern.partition("{id}")
            by_method = (self._prefix if placeholder else self._exact).setdefault(head, {})
            for method in route.methods:
                if method in by_method:
                    raise ValueError(f"two routes for {method} {route.pattern}")
                by_method[method] = route

    def find(self, method: str, path: str) -> tuple[Route | None, str, tuple[str, ...]]:
        """(route or None, tail, methods that the path knows)."""
        by_method, tail = self._exact.get(path), ""
        if by_method is None:
            for head, candidates in self._prefix.items():
                if path.startswith(head) and len(path) > len(head):
                    by_method, tail = candidates, path[len(head) :]
        if by_method is None:
            return None, "", ()
        return by_method.get(method), tail, tuple(sorted(by_method))


class Dispatcher:
    """The handler of the aiohttp server."""

    def __init__(self, gateway: Gateway, routes: Iterable[Route]) -> None:
        self.gateway = gateway
        self.table = Table(routes)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        call = Call(self.gateway, request, _request_id(request))
        call.headers["X-Request-Id"] = call.request_id
        route, tail, allowed = self.table.find(request.method, request.rel_url.raw_path)
        call.tail = tail
        endpoint = route.pattern if route else UNMATCHED
        metrics, status = self.gateway.metrics, 499
        started = time.perf_counter()
        metrics.request(endpoint, request.method)
        try:
            response = await self._answer(call, route, allowed)
            status = response.status
            return response
        finally:
            metrics.response(endpoint, request.method, status)
            took = time.perf_counter() - started
            log.debug("%s %s %s %d %.3fs", call.request_id, request.method, endpoint, status, took)

    async def _answer(self, call: Call, route: Route | None, allowed: tuple[str, ...]) -> web.StreamResponse:
        try:
            level = route.level if route else Level.NORMAL
            if level is not Level.OPEN and self.gateway.open_connections() > self.gateway.args.max_connections:
                call.headers["Connection"] = "close"
                raise Overloaded("too many open connections", code="too_many_connections", retry_after=1)
            self.gateway.guard.check(level, call.request.headers)
            if route is not None:
                return await route.handler(call)
            if allowed:
                call.headers["Allow"] = ", ".join(allowed)
                raise HttpError(405, f"this route takes {' or '.join(allowed)}", code="method_not_allowed")
            raise NotFound("there is no such route", code="route_not_found")
        except RequestError as error:
            info = for_openai(error.info) if route and route.openai else error.info
        except LinkClosed as error:
            info = Overloaded(f"the engine is away: {error}", code="node_unavailable", retry_after=1).info
        except web.HTTPException as error:
            info = ErrorInfo(error.reason, error.status, type_of(error.status))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("request %s failed", call.request_id)
            info = InternalError("an internal error occurred; the server's log has it under this request id").info
        if call.stream is not None and call.stream.started:
            return await call.stream.fail(info)
        response = error_response(info)
        response.headers.update(call.headers)
        if "Connection" in call.headers:
            response.force_close()
        return response


class Connection(web.RequestHandler):
    """aiohttp's protocol, but with errors of its parser in the one shape."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A whole answer for what is no valid HTTP; then the connection closes."""
        log.debug("bad request from %s: %s", request.remote, exc or message)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; it can't become an error any more")
        first_line = (message or "").strip().splitlines()
        text = first_line[0].rstrip(":") if first_line and status < 500 else "an internal error occurred"
        response = error_response(ErrorInfo(text, status, type_of(status), "invalid_http" if status < 500 else None))
        response.force_close()
        return response


class HttpServer(web.Server):
    """The protocol factory: `Connection` for each socket, bodies limited, never inflated."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher, request_factory=self._request, handler_cancellation=True)
        self._event_loop = asyncio.get_running_loop()

    def __call__(self) -> web.RequestHandler:
        """A protocol for a new connection."""
        return Connection(
            self,
            loop=self._event_loop,
            keepalive_timeout=KEEPALIVE_TIMEOUT,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's way to say: no access log
            max_line_size=limits.MAX_HEADER_BYTES,
            max_field_size=limits.MAX_HEADER_BYTES,
            lingering_time=LINGER,
            auto_decompress=False,
        )

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._event_loop, client_max_size=limits.MAX_BODY_BYTES
        )


def _request_id(request: web.BaseRequest) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
