"""Outbox: what the detokenizer is told, as arrays over all rows of a step rather than one object a token."""

from __future__ import annotations

import numpy as np

from radixcast.actors.scheduler.request import Request
from radixcast.protocols.buffers import Int32Array, pack_ids, unpack_ids
from radixcast.protocols.internal import DeltaEnd, DeltaLogprobs, Open, StepResult, TokenDeltas

Event = Open | TokenDeltas

PROMPT_TAIL = 16
"""Prompt tokens that the detokenizer gets as context of the first output token."""


class StepOutput:
    """Walks through a StepResult row by row and keeps the tokens of rows that still matter."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self.appended: list[int] = unpack_ids(result.appended).tolist()
        self.forced: list[int] = unpack_ids(result.forced).tolist() if result.forced else [0] * len(self.appended)
        self.tokens: Int32Array = unpack_ids(result.tokens)
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.ends: list[DeltaEnd] = []
        self.by_row: dict[int, Request] = {}
        """Row -> request, of the rows taken."""
        self.kept = 0
        self._at = 0
        self._skipped: list[tuple[int, int]] = []

    def skip(self, appended: int) -> None:
        """The next row belongs to nobody any more."""
        if appended:
            self._skipped.append((self._at, self._at + appended))
            self._at += appended

    def take(self, request: Request, row: int, appended: int) -> Int32Array:
        """The next row's tokens: int32 [appended]."""
        self.by_row[row] = request
        start = self._at
        self._at += appended
        self.kept += appended
        if appended:
            self.requests.append(request)
            self.counts.append(appended)
        return self.tokens[start : self._at]

    def end(self, request: Request, end: DeltaEnd) -> None:
        """The row just taken has ended."""
        self.ends.append(end)
        if not self.requests or self.requests[-1] is not request:
            self.requests.append(request)
            self.counts.append(0)

    def token_bytes(self) -> bytes:
        """Tokens of all rows taken, row after row (int32)."""
        if not self._skipped:
            return self.result.tokens
        keep = np.ones(len(self.tokens), dtype=np.bool_)
        for start, stop in self._skipped:
            keep[start:stop] = False
        return pack_ids(self.tokens[keep])


class Outbox:
    """Events in the order in which they must be sent."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def drain(self) -> list[Event]:
        """All events; the outbox is empty then."""
        events, self._events = self._events, []
        return events

    def opened(self, request: Request) -> None:
        """A request was accepted, or must be made known to a new detokenizer."""
        s = request.submit
        prompt = request.tokens[: request.prompt_len]
        self._events.append(
            Open(
                handle=request.handle,
                client=s.client,
                rid=s.rid,
                attempt=s.attempt,
                choice=s.choice,
                prompt_tail=pack_ids(prompt[-PROMPT_TAIL:]),
                output_ids=pack_ids(request.output_ids),
                sampling=s.sampling,
                prompt_tokens=request.prompt_len,
                stream=s.stream,
                return_text_in_logprobs=s.return_text_in_logprobs,
                prompt_ids=s.prompt_ids if s.return_prompt_ids else None,
            )
        )

    def ended(self, ends: list[DeltaEnd]) -> None:
        """Ends without tokens (aborts, errors)."""
        self._events.append(TokenDeltas(handles=b"", counts=b"", tokens=b"", ends=ends))

    def step(self, output: StepOutput) -> None:
        """What a step brought; nothing when it brought nothing."""
        logprobs = self._logprobs(output) if output.result.logprobs else []
        if not output.requests:
            return
        retractions = [r.retractions for r in output.requests]
        forced = [r.forced for r in output.requests]
        self._events.append(
            TokenDeltas(
                handles=pack_ids([r.handle for r in output.requests]),
                counts=pack_ids(output.counts),
                tokens=output.token_bytes(),
                cached=pack_ids([max(r.cached, 0) for r in output.requests]),
                retractions=pack_ids(retractions) if any(retractions) else b"",
                ends=output.ends,
                logprobs=logprobs,
                forced=pack_ids(forced) if any(forced) else b"",
            )
        )

    @staticmethod
    def _logprobs(output: StepOutput) -> list[DeltaLogprobs]:
        told = []
        listed = {r.handle for r in output.requests}
        for entry in output.result.logprobs:
            request = output.by_row.get(entry.row)
            if request is None:
                continue
            if entry.prompt is not None:
                request.prompt_reported += len(entry.prompt.ids) // 4
            if request.handle not in listed:  # a chunk of the prompt: no token, but logprobs
                output.requests.append(request)
                output.counts.append(0)
            told.append(DeltaLogprobs(handle=request.handle, output=entry.output, prompt=entry.prompt))
        return told
