"""What can be said about a request at the door, before it waits for anything."""

from __future__ import annotations

from radixcast.actors.scheduler.request import Request
from radixcast.protocols.errors import ContextLengthExceeded, ErrorInfo, InvalidRequest
from radixcast.protocols.grammar import GRAMMAR_MISSING
from radixcast.protocols.internal import END_EOS, END_LENGTH, END_STOP_ID, RowEnd


def fit(request: Request, pool_tokens: int) -> None:
    """Lower what the request may generate to what the pool holds, if its length is a default that nobody asked for."""
    if request.submit.clip and request.kv_cap > pool_tokens:
        request.max_position = max(request.prompt_len + 1, request.known, pool_tokens)
        request.min_position = min(request.min_position, request.max_position)
        request.kv_cap = max(request.prompt_len, request.max_position - 1)


def misfit(request: Request, context_length: int, pool_tokens: int) -> ErrorInfo | None:
    """Why the request could never run, even alone; None when it could."""
    if not request.prompt_len:
        return InvalidRequest("the prompt is empty", param="prompt").info
    if request.prompt_len > context_length:
        return ContextLengthExceeded(
            f"the prompt has {request.prompt_len} tokens, the context {context_length}", param="prompt"
        ).info
    if request.prompt_len > pool_tokens:
        return ContextLengthExceeded(
            f"the prompt has {request.prompt_len} tokens, but the KV pool holds {pool_tokens} (--max-total-tokens)",
            param="prompt",
        ).info
    if request.kv_cap > pool_tokens:
        return ContextLengthExceeded(
            f"prompt ({request.prompt_len} tokens) plus max_new_tokens ({request.max_position - request.prompt_len}) need "
            f"{request.kv_cap} KV slots, but the pool has {pool_tokens} (--max-total-tokens)",
            param="max_new_tokens",
        ).info
    return None


def ended_before(request: Request) -> tuple[int, int] | None:
    """(END_* reason, token) when the tokens that a request brings from an earlier life end it already."""
    if not request.outputs:
        return None
    last = int(request.tokens[request.known - 1])
    if request.known >= request.min_position:
        if last in request.submit.eos_ids:
            return END_EOS, last
        if last in request.submit.stop_ids:
            return END_STOP_ID, last
    return (END_LENGTH, -1) if request.known >= request.max_position else None


def lacks_grammar(request: Request, end: RowEnd) -> bool:
    """Whether a row could not be opened because the runner has dropped its grammar since it said that it was ready."""
    return bool(request.grammar_key) and end.error is not None and end.error.code == GRAMMAR_MISSING
