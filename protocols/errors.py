"""Everything that can go wrong, as one tree.

::

    RadixcastError
    ├── RequestError            one request can't be served; carries an ErrorInfo
    │   ├── InvalidRequest      400  the request itself is wrong; `param` names the field
    │   │   ├── ContextLengthExceeded
    │   │   └── DuplicateRequest
    │   ├── Unauthorized        401
    │   ├── Forbidden           403
    │   ├── NotFound            404  a model or a route that is not there
    │   ├── PayloadTooLarge     413
    │   ├── RequestAborted      499  cancelled by its owner
    │   ├── Overloaded          503  refused at the door; try again after `retry_after` seconds
    │   └── InternalError       500  our fault
    ├── StartupError            the node can't start; the text is for the operator
    ├── ProtocolError           a peer sent what the wire does not allow
    └── LinkClosed              the peer is gone; what was in flight is unknown

An error crosses the wire as `ErrorInfo` and becomes the same class again on the other side (`to_exception`).
"""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels: OpenAI's four fields, the HTTP status and when to retry."""

    message: str
    status: int = 400
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    """Seconds after which trying again makes sense (HTTP Retry-After)."""

    def to_exception(self) -> RequestError:
        """The exception class that this error was made from (by code, then by status)."""
        return _class_for(self)(self.message, info=self)


class RadixcastError(Exception):
    """Base of every error that Radixcast raises on purpose."""


class StartupError(RadixcastError):
    """The node can't start; the message tells the operator what to change."""


class ProtocolError(RadixcastError):
    """A peer sent bytes that the wire protocol does not allow."""


class LinkClosed(RadixcastError):
    """The peer of a link died or was reset; messages in flight may be lost."""


class RequestError(RadixcastError):
    """One request can't be served. `info` is what its client is told."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        info: ErrorInfo | None = None,
    ) -> None:
        super().__init__(message)
        self.info = info or ErrorInfo(
            message=message,
            status=self.status,
            type=self.type,
            code=code or self.code,
            param=param,
            retry_after=retry_after,
        )


class InvalidRequest(RequestError):
    """The request is wrong; `info.param` names the field."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output don't fit into the model's context or the KV pool."""

    code = "context_length_exceeded"


class DuplicateRequest(InvalidRequest):
    """A request with this id is running."""

    code = "duplicate_request_id"


class Unauthorized(RequestError):
    """No valid key came with the request."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is valid but does not open this route."""

    status = 403
    type = "permission_error"


class NotFound(RequestError):
    """A model or route that does not exist."""

    status = 404
    type = "not_found_error"


class PayloadTooLarge(RequestError):
    """The body or a field of it is over its limit."""

    status = 413
    code = "payload_too_large"


class RequestAborted(RequestError):
    """The request was cancelled by its owner or an operator."""

    status = 499
    type = "aborted"
    code = "aborted"


class Overloaded(RequestError):
    """The queue is full, or the node is draining."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class InternalError(RequestError):
    """A fault of ours, contained in this request."""

    status = 500
    type = "internal_error"


_BY_CODE: dict[str, type[RequestError]] = {
    c.code: c
    for c in (ContextLengthExceeded, DuplicateRequest, Unauthorized, PayloadTooLarge, RequestAborted, Overloaded)
    if c.code
}
_BY_STATUS: dict[int, type[RequestError]] = {
    c.status: c
    for c in (
        InvalidRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        PayloadTooLarge,
        RequestAborted,
        Overloaded,
        InternalError,
    )
}


def _class_for(info: ErrorInfo) -> type[RequestError]:
    by_code = _BY_CODE.get(info.code or "")
    return by_code or _BY_STATUS.get(info.status, RequestError)
