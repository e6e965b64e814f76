"""SchedulerConfig: what the scheduler needs to know of the deployment, resolved from ServerArgs and the runner's Capacity."""

from __future__ import annotations

from dataclasses import dataclass

from radixcast.actors.scheduler.grammar_gate import ASKS
from radixcast.protocols.internal import Capacity, Submit
from radixcast.protocols.server_args import Eviction, Policy, ServerArgs

CHUNK_CPU, CHUNK_CUDA = 512, 8192
"""Default prompt tokens a step: about what one forward does in the time that a reader of a stream does not notice."""

GRAMMAR_SLACK = 10.0
"""Seconds: the runner tells itself when a grammar takes too long; this is for one that does not answer at all."""

JUMP_TOKENS = 8
"""Tokens that a grammar may force in one step: KV slots for as many a plan in flight stay with each such row."""


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
    jump: int = JUMP_TOKENS
    """The same for a row with a grammar, whose forced text needs no forward pass for each token."""
    grammar_patience: float = 60.0
    """Seconds that the runner may take to answer for one grammar."""
    force_retract_interval: int = 0
    decode_log_interval: int = 40
    seed: int = 0
    """Of the random policy."""
    strict: bool = False
    """Raise on bookkeeping slips (tests)."""

    def draft_of(self, submit: Submit) -> int:
        """Most tokens that a step may append to this request's row."""
        jumps = submit.grammar is not None and submit.sampling.jump_forward
        return max(self.draft, self.jump if jumps else 1)

    @classmethod
    def resolve(cls, args: ServerArgs, capacity: Capacity) -> SchedulerConfig:
        """Join what the operator asked for with what the runner has."""
        chunk = args.chunked_prefill_size
        if chunk is None:
            chunk = CHUNK_CUDA if capacity.device == "cuda" else CHUNK_CPU
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
            jump=1 if args.disable_jump_forward else JUMP_TOKENS,
            grammar_patience=ASKS * args.grammar_timeout + GRAMMAR_SLACK,
            force_retract_interval=args.force_retract_interval,
            decode_log_interval=args.decode_log_interval,
            seed=args.random_seed or 0,
        )
