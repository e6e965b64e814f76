"""Joins the TextDeltas of one output: what a client holds of it, and the whole in the end. Pure: no sockets, no clock.

Pieces carry offsets, so a repeat is dropped and a gap shows. `Journal` keeps only what is needed to ask for the rest of an
output elsewhere (token ids and lengths); `Collector` also keeps the pieces and makes an `Output` of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from radixcast.protocols.buffers import unpack_floats, unpack_ids
from radixcast.protocols.errors import RadixcastError
from radixcast.protocols.public import Finish, Logprobs, TextDelta, Usage

T = TypeVar("T")

LOWEST_LOGPROB = -9999.0
"""Shown in place of minus infinity, which JSON can't say."""


class DeltaGap(RadixcastError):
    """A piece of an output is missing: what came starts behind what is held."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One output, whole or (without `finish`) so far."""

    rid: str
    choice: int = 0
    text: str = ""
    token_ids: list[int] = []
    """Output tokens; those of a trimmed stop string are among them."""
    finish: Finish | None = None
    usage: Usage = Usage(prompt_tokens=0, completion_tokens=0)
    logprobs: Logprobs | None = None
    """Of `token_ids`, when asked for."""
    prompt_logprobs: Logprobs | None = None
    """From prompt position `logprob_start` on, when asked for."""
    prompt_ids: list[int] | None = None


class LogprobEntry(NamedTuple):
    """A token at a position with its logprob (natural log; None where there is none, as for the first prompt token)."""

    logprob: float | None
    token_id: int
    text: str | None
    utf8: bytes | None


class LogprobPosition(NamedTuple):
    """One position: its token, the best tokens (descending) and the logprobs of the asked ids (in the order asked)."""

    token: LogprobEntry
    top: list[LogprobEntry]
    asked: list[float | None]


def choice_rid(rid: str, choice: int) -> str:
    """The request id of choice `choice` of request `rid`: rid, rid_1, rid_2 …"""
    return f"{rid}_{choice}" if choice else rid


def logprob_positions(logprobs: Logprobs) -> Iterator[LogprobPosition]:
    """The columns of `logprobs` as one row a position, ready for JSON (no NaN, no infinity)."""
    values, ids = unpack_floats(logprobs.values).tolist(), unpack_ids(logprobs.ids).tolist()
    top_values, top_ids = unpack_floats(logprobs.top_values).tolist(), unpack_ids(logprobs.top_ids).tolist()
    asked_values = unpack_floats(logprobs.asked_values).tolist()
    n, k = len(ids), logprobs.top_n
    asked = len(asked_values) // n if n else 0
    for i in range(n):
        token = LogprobEntry(_finite(values[i]), ids[i], _at(logprobs.token_texts, i), _at(logprobs.token_bytes, i))
        top = [
            LogprobEntry(_finite(top_values[j]), top_ids[j], _at(logprobs.top_texts, j), _at(logprobs.top_bytes, j))
            for j in range(i * k, (i + 1) * k)
            if not math.isnan(top_values[j])
        ]
        yield LogprobPosition(token, top, [_finite(v) for v in asked_values[i * asked : (i + 1) * asked]])


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Logprobs of consecutive stretches of positions -> of the whole; None for no parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(
        values=b"".join(p.values for p in parts),
        ids=b"".join(p.ids for p in parts),
        top_n=parts[0].top_n,
        top_values=b"".join(p.top_values for p in parts),
        top_ids=b"".join(p.top_ids for p in parts),
        asked_values=b"".join(p.asked_values for p in parts),
        token_texts=_join_lists([p.token_texts for p in parts]),
        top_texts=_join_lists([p.top_texts for p in parts]),
        token_bytes=_join_lists([p.token_bytes for p in parts]),
        top_bytes=_join_lists([p.top_bytes for p in parts]),
    )


def cut_logprobs(logprobs: Logprobs, start: int) -> Logprobs:
    """The positions from `start` (counted inside `logprobs`) on."""
    n = len(logprobs.ids) // 4
    top, asked = start * logprobs.top_n, start * (len(logprobs.asked_values) // 4 // n if n else 0)
    return msgspec.structs.replace(
        logprobs,
        values=logprobs.values[4 * start :],
        ids=logprobs.ids[4 * start :],
        top_values=logprobs.top_values[4 * top :],
        top_ids=logprobs.top_ids[4 * top :],
        asked_values=logprobs.asked_values[4 * asked :],
        token_texts=None if logprobs.token_texts is None else logprobs.token_texts[start:],
        top_texts=None if logprobs.top_texts is None else logprobs.top_texts[top:],
        token_bytes=None if logprobs.token_bytes is None else logprobs.token_bytes[start:],
        top_bytes=None if logprobs.top_bytes is None else logprobs.top_bytes[top:],
    )


def merge_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Consecutive pieces (at least one) -> one piece that says the same: what a slow reader gets."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    return TextDelta(
        rid=first.rid,
        attempt=last.attempt,
        choice=first.choice,
        token_offset=first.token_offset,
        token_ids=b"".join(d.token_ids for d in deltas),
        text_offset=first.text_offset,
        text="".join(d.text for d in deltas),
        logprobs=join_logprobs([d.logprobs for d in deltas if d.logprobs is not None]),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        prompt_ids=next((d.prompt_ids for d in deltas if d.prompt_ids is not None), None),
        usage=next((d.usage for d in reversed(deltas) if d.usage is not None), None),
        finish=last.finish,
    )


class Journal:
    """What is held of one output, in numbers: enough to drop repeats, to see gaps and to resubmit the rest."""

    def __init__(self) -> None:
        self.token_ids = bytearray()
        """int32 little-endian, as in Generate.output_ids."""
        self.text_length = 0
        """Characters."""
        self.has_prompt_logprobs = False
        self.has_prompt_ids = False
        self.ended = False

    @property
    def token_count(self) -> int:
        """Output tokens held."""
        return len(self.token_ids) // 4

    def accept(self, delta: TextDelta) -> TextDelta | None:
        """Note a piece; returns what is new in it (None: nothing). Raises DeltaGap when something before it is missing."""
        if self.ended:
            return None
        token_cut, text_cut = self.token_count - delta.token_offset, self.text_length - delta.text_offset
        if token_cut < 0 or text_cut < 0:
            raise DeltaGap(
                f"output {delta.rid} goes on at token {delta.token_offset}, character {delta.text_offset}; "
                f"held are {self.token_count} tokens, {self.text_length} characters"
            )
        if token_cut or text_cut or self.has_prompt_logprobs or self.has_prompt_ids:
            delta = self._new_part(delta, token_cut, text_cut)
        if not (delta.token_ids or delta.text or delta.finish or delta.usage or delta.prompt_logprobs or delta.prompt_ids):
            return None
        self.token_ids += delta.token_ids
        self.text_length += len(delta.text)
        self.has_prompt_logprobs |= delta.prompt_logprobs is not None
        self.has_prompt_ids |= delta.prompt_ids is not None
        self.ended = delta.finish is not None
        return delta

    def _new_part(self, delta: TextDelta, token_cut: int, text_cut: int) -> TextDelta:
        logprobs = delta.logprobs
        if logprobs is not None and token_cut:
            logprobs = cut_logprobs(logprobs, token_cut) if 4 * token_cut < len(logprobs.ids) else None
        return msgspec.structs.replace(
            delta,
            token_offset=self.token_count,
            token_ids=delta.token_ids[4 * token_cut :],
            text_offset=self.text_length,
            text=delta.text[text_cut:],
            logprobs=logprobs,
            prompt_logprobs=None if self.has_prompt_logprobs else delta.prompt_logprobs,
            prompt_ids=None if self.has_prompt_ids else delta.prompt_ids,
        )


class Collector:
    """Joins pieces; `output()` is what there is so far, complete once `ended`."""

    def __init__(self, rid: str = "", choice: int = 0) -> None:
        self.rid, self.choice = rid, choice
        self.journal = Journal()
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: Logprobs | None = None
        self._prompt_ids: bytes | None = None
        self._usage: Usage | None = None
        self._finish: Finish | None = None

    @property
    def ended(self) -> bool:
        """Whether the last piece is here."""
        return self.journal.ended

    def feed(self, delta: TextDelta) -> TextDelta | None:
        """Take a piece; returns what was new in it (None: nothing). Raises DeltaGap, and then takes nothing."""
        new = self.journal.accept(delta)
        if new is None:
            return None
        self.rid, self.choice = new.rid, new.choice
        if new.text:
            self._texts.append(new.text)
        if new.logprobs is not None:
            self._logprobs.append(new.logprobs)
        self._prompt_logprobs = new.prompt_logprobs or self._prompt_logprobs
        self._prompt_ids = self._prompt_ids if new.prompt_ids is None else new.prompt_ids
        self._usage = new.usage or self._usage
        self._finish = new.finish
        return new

    def output(self) -> Output:
        """The pieces so far, joined. Without a Usage yet, completion_tokens counts what is held."""
        self._texts = ["".join(self._texts)]
        joined = join_logprobs(self._logprobs)
        self._logprobs = [] if joined is None else [joined]
        usage = self._usage or Usage(prompt_tokens=0, completion_tokens=0)
        if self._finish is None or self._usage is None:
            usage = msgspec.structs.replace(usage, completion_tokens=self.journal.token_count)
        return Output(
            rid=self.rid,
            choice=self.choice,
            text=self._texts[0],
            token_ids=np.frombuffer(bytes(self.journal.token_ids), dtype="<i4").tolist(),
            finish=self._finish,
            usage=usage,
            logprobs=joined,
            prompt_logprobs=self._prompt_logprobs,
            prompt_ids=None if self._prompt_ids is None else unpack_ids(self._prompt_ids).tolist(),
        )


def _finite(value: float) -> float | None:
    if math.isnan(value):
        return None
    return max(value, LOWEST_LOGPROB)


def _at(items: list[T] | None, index: int) -> T | None:
    return items[index] if items is not None and index < len(items) else None


def _join_lists(lists: list[list[T] | None]) -> list[T] | None:
    if all(items is None for items in lists):
        return None
    return [item for items in lists if items is not None for item in items]
