"""Output: one admitted request as the detokenizer knows it, and the delta that waits to be sent to its client. No I/O.

Whatever happens between two sends is merged into one delta, so a slow reader costs one delta, however late it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from radixcast.actors.detokenizer.logprobs import first_rows, joined, with_texts
from radixcast.actors.detokenizer.pipeline import TextPipeline
from radixcast.actors.detokenizer.token_table import TokenTable
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.internal import END_EOS, END_ERROR, END_LENGTH, END_STOP_ID, DeltaEnd, DeltaLogprobs, Open
from radixcast.protocols.public import Finish, Logprobs, TextDelta, Usage

ABORT = 0
"""DeltaEnd.reason of an abort."""

_REASONS: dict[int, Literal["abort", "error", "length"]] = {ABORT: "abort", END_ERROR: "error", END_LENGTH: "length"}
_ID_BYTES = 4


class Output:
    """Tokens of one output go in with `take`; `delta` is what its client does not have yet, `sent` says that it has."""

    def __init__(self, opened: Open, table: TokenTable) -> None:
        """Tokens of an earlier life are decoded again, and count as sent. Raises InvalidRequest for a bad stop expression."""
        self.handle = opened.handle
        self.client = opened.client
        self.stream = opened.stream
        self.finish: Finish | None = None
        """Set at the end; nothing is taken afterwards."""
        self.cached = 0
        self.retractions = 0
        self.forced = 0
        """Tokens that the grammar forced; some may lie behind a stop and not count."""
        self._opened = opened
        self._table = table
        self._keep_stop = opened.sampling.no_stop_trim
        self._pipeline = TextPipeline(table, opened.sampling, unpack_ids(opened.prompt_tail).tolist())
        self._text: list[str] = []
        self._ids: list[bytes] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._first = True
        self._sent_chars = len(self._pipeline.feed(unpack_ids(opened.output_ids).tolist()))
        self._sent_tokens = self._pipeline.tokens
        self._finish_on_match()

    @property
    def position(self) -> int:
        """Output tokens that count so far."""
        return self._pipeline.tokens

    @property
    def waiting(self) -> bool:
        """Whether there is a delta to send now."""
        return self.finish is not None or (self.stream and bool(self._ids))

    def take(self, ids: Sequence[int], logprobs: DeltaLogprobs | None = None, end: DeltaEnd | None = None) -> None:
        """Tokens of one step, in order, and the token-level end behind them. The earlier end of tokens and text counts."""
        if self.finish:
            return
        before = self.position
        silent = end is not None and bool(ids) and end.reason in (END_EOS, END_STOP_ID) and not self._keep_stop
        text = self._pipeline.feed(ids[:-1] if silent else ids)
        if end:
            text += self._pipeline.end()
            if silent:
                self._pipeline.count_silent()
        if text:
            self._text.append(text)
        used = self.position - before
        if used:
            self._ids.append(pack_ids(ids[:used]))
        if logprobs:
            self._take_logprobs(logprobs, used)
        self._finish_on_match()
        if end and not self.finish:
            self._finish_on_token(end)

    def _take_logprobs(self, logprobs: DeltaLogprobs, used: int) -> None:
        if logprobs.prompt and self._first:
            self._prompt_logprobs.append(logprobs.prompt)
        if logprobs.output and used:
            self._logprobs.append(first_rows(logprobs.output, used))

    def _finish_on_match(self) -> None:
        if self._pipeline.match:
            self.finish = Finish(reason="stop", matched=self._pipeline.match.what)

    def _finish_on_token(self, end: DeltaEnd) -> None:
        matched = end.token if end.reason in (END_EOS, END_STOP_ID) else None
        self.finish = Finish(reason=_REASONS.get(end.reason, "stop"), matched=matched, error=end.error)

    def cut_off(self, finish: Finish) -> None:
        """End here, for a reason that is not in the tokens (client or scheduler gone)."""
        if not self.finish:
            self._text.append(self._pipeline.end())
            self._finish_on_match()
            self.finish = self.finish or finish

    def fail(self, error: ErrorInfo) -> None:
        """End here because of a fault of ours; the text that is still held back is dropped."""
        self.finish = Finish(reason="error", error=error)

    def delta(self) -> TextDelta:
        """Everything that the client does not have yet."""
        opened, texts = self._opened, self._opened.return_text_in_logprobs
        logprobs, prompt = joined(self._logprobs), joined(self._prompt_logprobs) if self._first else None
        return TextDelta(
            rid=opened.rid,
            attempt=opened.attempt,
            choice=opened.choice,
            token_offset=self._sent_tokens,
            token_ids=b"".join(self._ids),
            text_offset=self._sent_chars,
            text="".join(self._text),
            logprobs=with_texts(logprobs, self._table) if texts else logprobs,
            prompt_logprobs=with_texts(prompt, self._table) if texts else prompt,
            prompt_ids=opened.prompt_ids if self._first else None,
            usage=Usage(
                prompt_tokens=opened.prompt_tokens,
                completion_tokens=self.position,
                cached_tokens=self.cached,
                retractions=self.retractions,
                forced_tokens=min(self.forced, self.position),
            ),
            finish=self.finish,
        )

    def sent(self, delta: TextDelta) -> None:
        """`delta` is on its way: forget what was in it."""
        self._sent_tokens += len(delta.token_ids) // _ID_BYTES
        self._sent_chars += len(delta.text)
        self._first = False
        self._text.clear()
        self._ids.clear()
        self._logprobs.clear()
        self._prompt_logprobs.clear()
