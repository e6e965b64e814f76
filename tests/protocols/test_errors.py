"""An error crosses the wire and is the same class again."""

from __future__ import annotations

import msgspec
import pytest

from radixcast.protocols import errors
from radixcast.protocols.errors import ErrorInfo, RequestError

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, RequestError) and c is not RequestError]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_round_trip(cls: type[RequestError]) -> None:
    raised = cls("what happened", param="top_p", retry_after=2.5)
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(raised.info), type=ErrorInfo)
    back = info.to_exception()
    assert type(back) is cls
    assert str(back) == "what happened"
    assert back.info == raised.info
    assert (info.status, info.type, info.param, info.retry_after) == (cls.status, cls.type, "top_p", 2.5)


def test_every_status_is_told() -> None:
    statuses = {c.__name__: c.status for c in CLASSES}
    assert statuses == {
        "InvalidRequest": 400,
        "ContextLengthExceeded": 400,
        "DuplicateRequest": 400,
        "Unauthorized": 401,
        "Forbidden": 403,
        "NotFound": 404,
        "PayloadTooLarge": 413,
        "RequestAborted": 499,
        "Overloaded": 503,
        "InternalError": 500,
    }


def test_code_wins_over_status_and_unknown_ones_have_a_class() -> None:
    assert type(ErrorInfo("x", status=400, code="context_length_exceeded").to_exception()) is errors.ContextLengthExceeded
    assert type(ErrorInfo("x", status=400, code="of a later version").to_exception()) is errors.InvalidRequest
    assert type(ErrorInfo("x", status=418).to_exception()) is RequestError


def test_own_code_replaces_the_class_code() -> None:
    assert errors.Overloaded("x", code="node_unavailable").info.code == "node_unavailable"
    assert errors.Overloaded("x").info.code == "overloaded"
