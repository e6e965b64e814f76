"""What the runner tells the scheduler that it can hold."""

from __future__ import annotations

from radixcast.protocols.internal import Capacity
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs

MAX_ROWS = 256
TOKENS_A_ROW = 64
"""A pool that has fewer tokens than this for each row would spend its time on retractions."""


def make_capacity(args: ServerArgs, spec: ModelSpec, total_tokens: int, device: str = "cpu") -> Capacity:
    """Rows from --max-running-requests, else from the pool; context from the model, shortened by --context-length."""
    rows = args.max_running_requests or max(1, min(MAX_ROWS, total_tokens // TOKENS_A_ROW))
    context = min(spec.context_length, args.context_length or spec.context_length)
    return Capacity(total_tokens=total_tokens, max_running=rows, context_length=context, device=device)
