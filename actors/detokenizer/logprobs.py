"""Logprobs of consecutive positions: cut, joined and given texts. All fields are row-major, so bytes are sliced and joined."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from radixcast.actors.detokenizer.token_table import TokenTable
from radixcast.protocols.buffers import unpack_ids
from radixcast.protocols.public import Logprobs

_ITEM = 4
"""Bytes of one id or value."""


def rows(logprobs: Logprobs) -> int:
    """Positions in `logprobs`."""
    return len(logprobs.ids) // _ITEM


def first_rows(logprobs: Logprobs, count: int) -> Logprobs:
    """The first `count` positions."""
    total = rows(logprobs)
    if count >= total:
        return logprobs
    top = count * logprobs.top_n * _ITEM
    return msgspec.structs.replace(
        logprobs,
        values=logprobs.values[: count * _ITEM],
        ids=logprobs.ids[: count * _ITEM],
        top_values=logprobs.top_values[:top],
        top_ids=logprobs.top_ids[:top],
        asked_values=logprobs.asked_values[: len(logprobs.asked_values) // total * count],
    )


def joined(parts: Sequence[Logprobs]) -> Logprobs | None:
    """`parts` (without texts), one after another; None for none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(
        values=b"".join([p.values for p in parts]),
        ids=b"".join([p.ids for p in parts]),
        top_n=max(p.top_n for p in parts),
        top_values=b"".join([p.top_values for p in parts]),
        top_ids=b"".join([p.top_ids for p in parts]),
        asked_values=b"".join([p.asked_values for p in parts]),
    )


def with_texts(logprobs: Logprobs | None, table: TokenTable) -> Logprobs | None:
    """`logprobs` with the text and the bytes of every token in it."""
    if logprobs is None:
        return None
    token_bytes = [table.bytes_of(token) for token in unpack_ids(logprobs.ids).tolist()]
    top_bytes = [table.bytes_of(token) for token in unpack_ids(logprobs.top_ids).tolist()]
    return msgspec.structs.replace(
        logprobs,
        token_bytes=token_bytes,
        token_texts=[raw.decode("utf-8", "replace") for raw in token_bytes],
        top_bytes=top_bytes,
        top_texts=[raw.decode("utf-8", "replace") for raw in top_bytes],
    )
