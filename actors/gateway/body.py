"""Request bodies: read within limits of size and time, then strict JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from radixcast.actors.gateway.errors import HttpError
from radixcast.protocols import limits
from radixcast.protocols.errors import InvalidRequest, PayloadTooLarge

READ_TIMEOUT = 60.0
"""Seconds that a client may take to send its body."""


async def read_json(request: web.BaseRequest, *, optional: bool = False) -> dict[str, Any]:
    """The body as a JSON object. With `optional` an empty body is {}.

    Raises InvalidRequest (no JSON, no object, no UTF-8), HttpError (415 media type or encoding, 408) and PayloadTooLarge.
    """
    data = await _read(request)
    if optional and not data.strip():
        return {}
    _check_type(request)
    return decode_object(data)


def decode_object(data: bytes) -> dict[str, Any]:
    """UTF-8 JSON -> dict. NaN, infinities and lone surrogates are no JSON. Raises InvalidRequest."""
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {_explain(data, error)}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return body


async def _read(request: web.BaseRequest) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(415, "compressed bodies are refused: send the body without Content-Encoding")
    if (request.content_length or 0) > limits.MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {READ_TIMEOUT:g} s") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body could not be read: {error}") from None


def _check_type(request: web.BaseRequest) -> None:
    if not request.headers.get("Content-Type"):
        raise InvalidRequest("Content-Type is missing: send Content-Type: application/json")
    kind = request.content_type
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(415, "Content-Type must be application/json")
    charset = (request.charset or "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise HttpError(415, "the body must be UTF-8")


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over {limits.MAX_BODY_BYTES} bytes")


def _explain(data: bytes, error: msgspec.MsgspecError) -> str:
    """msgspec says "invalid character" for NaN; say what it is and, where it is easily seen, of which field."""
    for word in (b"NaN", b"Infinity"):
        at = data.find(word)
        if at >= 0 and "character" in str(error):
            field = data[max(0, at - 40) : at].rpartition(b'"')[0].rpartition(b'"')[2].decode("utf-8", "replace")
            return f"{word.decode()} is no number in JSON" + (f" (near {field!r})" if field else "")
    return str(error)
