"""What chat and completions have in common: the head of an answer, ids, reasons."""

from __future__ import annotations

import time
import uuid

from radixcast.actors.gateway.http import Call
from radixcast.protocols import limits
from radixcast.protocols.buffers import Int32Array, pack_ids, unpack_ids
from radixcast.protocols.errors import InvalidRequest
from radixcast.protocols.public import Finish

_INT32_MAX = 2**31 - 1


class Header:
    """What is the same in every part of one answer: id, created, model."""

    def __init__(self, call: Call, prefix: str, rid: str | None) -> None:
        self.id = check_rid(rid) if rid is not None else f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = call.gateway.served


def check_rid(rid: str) -> str:
    """A request id that a client chose. Raises InvalidRequest."""
    if not 0 < len(rid) <= limits.MAX_RID_CHARS:
        raise InvalidRequest(f"rid must have 1 to {limits.MAX_RID_CHARS} characters, got {len(rid)}", param="rid")
    return rid


def packed(ids: list[int], field: str) -> bytes:
    """Token ids of a body -> int32 buffer. Raises InvalidRequest for one that can't be an id, or for none."""
    if not ids:
        raise InvalidRequest(f"{field} must not be empty", param=field)
    if any(not 0 <= token <= _INT32_MAX for token in ids):
        raise InvalidRequest(f"{field} holds a number that is no token id", param=field)
    return pack_ids(ids)


def ids_array(ids: list[int], field: str) -> Int32Array:
    """As `packed`, but as an int32 array [n]."""
    return unpack_ids(packed(ids, field))


def reason_of(finish: Finish | None) -> str | None:
    """OpenAI's finish_reason."""
    return finish.reason if finish is not None else None
