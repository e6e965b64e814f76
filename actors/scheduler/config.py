"""SchedulerConfig: what the scheduler needs to know of the deployment, resolved from ServerArgs and the runner's Capacity."""

from __future__ import annotations

from dataclasses import dataclass

from radixcast.protocols.internal import Capacity
from radixcast.protocols.server_args import Eviction, Policy, ServerArgs

CHUNK_CPU, CHUNK_CUDA = 512, 8192
"""Default prompt tokens a step: about what one forward does in the time that a reader of a stream does not notice."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes in tokens unless said otherwise."""

    total_tokens: int
    max_running: int
    context_length: int
    max_step_tokens: int = 0
    """Most tokens of one plan; 0: no limit."""
    page_size: int = 1
    radix_cache: bool = True
    eviction: Eviction = "lru"
    policy: Policy = "fcfs"
    priority_scheduling: bool = False
    conservativeness: float = 1.0
    chunked_prefill_size: int = -1
    """Tokens of a step shared by decodes and prompt chunks; -1: whole prompts."""
    max_prefill_tokens: int = 16384
    max_queued: int = 4096
    """Requests waiting beyond the running ones."""
    depth: int = 2
    """Plans in flight."""
    row_gap: int = 0
    """A row is in at most one of row_gap + 1 consecutive plans, unless the earlier one has come back already."""
    draft: int = 1
    """Most tokens that a row may append in one step."""
    force_retract_interval: int = 0
    decode_log_interval: int = 40
    seed: int = 0
    """Of the random policy."""
    strict: bool = False
    """Raise on bookkeeping slips (tests)."""

    @classmethod
    def resolve(cls, args: ServerArgs, capacity: Capacity) -> SchedulerConfig:
        """Join what the operator asked for with what the runner has."""
        chunk = args.chunked_prefill_size
        if chunk is None:
            chunk = CHUNK_CUDA if args.device.startswith("cuda") else CHUNK_CPU
        return cls(
            total_tokens=capacity.total_tokens,
            max_running=capacity.max_running,
            context_length=capacity.context_length,
            max_step_tokens=capacity.max_step_tokens,
            page_size=args.page_size,
            radix_cache=args.radix_cache,
            eviction=args.radix_eviction_policy,
            policy=args.schedule_policy,
            priority_scheduling=args.enable_priority_scheduling,
            conservativeness=args.schedule_conservativeness,
            chunked_prefill_size=chunk,
            max_prefill_tokens=args.max_prefill_tokens,
            max_queued=args.max_queued_requests,
            depth=1 if args.disable_overlap_schedule else 2,
            force_retract_interval=args.force_retract_interval,
            decode_log_interval=args.decode_log_interval,
            seed=args.random_seed or 0,
        )
