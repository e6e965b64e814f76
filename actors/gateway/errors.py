"""Errors as HTTP: one body shape on every route, `{"error": {"message", "type", "param", "code"}}`, all four keys always."""

from __future__ import annotations

import http
import math

import msgspec
from aiohttp import web

from radixcast.protocols.errors import ErrorInfo, RequestError

_SAMPLING_PREFIX = "sampling_params."
_OPENAI_NAMES = {
    "text": "prompt",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "overloaded_error"}
"""`type` by status, where it is not `invalid_request_error` (4xx) or `internal_error` (5xx)."""


class HttpError(RequestError):
    """A request that fails as HTTP (method, media type, time), before it means anything."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message, info=ErrorInfo(message, status, type_of(status), code, param))


def type_of(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    return TYPES.get(status) or ("internal_error" if status >= 500 else "invalid_request_error")


def error_object(info: ErrorInfo) -> dict[str, object]:
    """ErrorInfo -> the body."""
    return {"error": {"message": info.message or "unknown error", "type": info.type, "param": info.param, "code": info.code}}


def error_headers(info: ErrorInfo) -> dict[str, str]:
    """Headers that the status asks for: Retry-After (whole seconds, at least 1), WWW-Authenticate."""
    if info.status in (429, 503):
        return {"Retry-After": str(max(1, math.ceil(info.retry_after or 1.0)))}
    if info.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}


def error_response(info: ErrorInfo) -> web.Response:
    """ErrorInfo -> a whole answer."""
    return web.Response(
        status=info.status if 400 <= info.status <= 599 else 500,
        reason=_reason(info.status),
        body=msgspec.json.encode(error_object(info)),
        content_type="application/json",
        headers=error_headers(info),
    )


def for_openai(info: ErrorInfo) -> ErrorInfo:
    """The same error with `param` as an OpenAI body spells it: there sampling fields are at the top, some by another name."""
    if info.param is None:
        return info
    param = info.param.removeprefix(_SAMPLING_PREFIX)
    return msgspec.structs.replace(info, param=_OPENAI_NAMES.get(param, param))


def _reason(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Client Closed Request" if status == 499 else "Error"
