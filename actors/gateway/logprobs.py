"""Logprobs in OpenAI's two shapes: entries with bytes (chat) and four parallel lists (completions)."""

from __future__ import annotations

from radixcast.actors.collect import LOWEST_LOGPROB, LogprobEntry, LogprobPosition, logprob_positions
from radixcast.protocols.openai_answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from radixcast.protocols.public import Logprobs


def chat_logprobs(logprobs: Logprobs | None) -> ChatLogprobs:
    """Logprobs of output tokens -> chat's `logprobs`. Every number is finite."""
    if logprobs is None:
        return ChatLogprobs([])
    return ChatLogprobs([_chat_entry(p) for p in logprob_positions(logprobs)])


class CompletionRows:
    """Builds the lists of one completions choice; offsets count characters of its text, the echoed prompt included."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._characters = 0

    def prompt(self, logprobs: Logprobs | None, text: str) -> CompletionLogprobs:
        """Rows of the echoed prompt `text`. Special tokens in front of it (BOS) have no characters in it: offset 0."""
        rows = self._rows(logprobs)
        extra = self._characters - len(text)
        rows.text_offset = [max(0, offset - extra) for offset in rows.text_offset]
        self._characters = len(text)
        return rows

    def output(self, logprobs: Logprobs | None) -> CompletionLogprobs:
        """Rows of the next output tokens."""
        return self._rows(logprobs)

    def _rows(self, logprobs: Logprobs | None) -> CompletionLogprobs:
        rows = CompletionLogprobs([], [], [] if self._top else None, [])
        for position in logprob_positions(logprobs) if logprobs is not None else ():
            token = position.token
            inside = bool(token.utf8) and token.utf8[0] & 0xC0 == 0x80  # type: ignore[index]  # the rest of a character
            rows.tokens.append(_text(token))
            rows.token_logprobs.append(token.logprob)
            rows.text_offset.append(max(0, self._characters - inside))
            if rows.top_logprobs is not None:
                rows.top_logprobs.append(_candidates(position))
            self._characters += _characters(token)
        return rows


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Rows of consecutive stretches as one."""
    top = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        top = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        top,
        first.text_offset + second.text_offset,
    )


def _chat_entry(position: LogprobPosition) -> TokenLogprob:
    token = position.token
    return TokenLogprob(
        _text(token),
        _bytes(token),
        _finite(token),
        [TopLogprob(_text(e), _bytes(e), _finite(e)) for e in position.top],
    )


def _candidates(position: LogprobPosition) -> dict[str, float] | None:
    """The best tokens and the chosen one; None where the model says nothing (the first prompt token)."""
    if position.token.logprob is None:
        return None
    candidates: dict[str, float] = {}
    for entry in (*position.top, position.token):
        candidates.setdefault(_text(entry), _finite(entry))
    return candidates


def _characters(token: LogprobEntry) -> int:
    """Characters that begin in this token."""
    if token.utf8 is None:
        return len(token.text or "")
    return sum(byte & 0xC0 != 0x80 for byte in token.utf8)


def _text(entry: LogprobEntry) -> str:
    return entry.text if entry.text is not None else f"token_id:{entry.token_id}"


def _bytes(entry: LogprobEntry) -> list[int]:
    return list(entry.utf8 if entry.utf8 is not None else (entry.text or "").encode())


def _finite(entry: LogprobEntry) -> float:
    return LOWEST_LOGPROB if entry.logprob is None else entry.logprob
