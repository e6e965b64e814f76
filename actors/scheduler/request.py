"""Request: one output wanted, and how far its tokens and its KV are. Plain state; the rules are in the scheduler.

There is no prefill or decode phase: `computed` tokens catch up with `known` tokens, by chunks or one by one::

    tokens   | prompt ............... | output ...|
    known    ─────────────────────────────────────►   tokens whose ids the scheduler has
    computed ──────────────────────────►              KV is there, told by results
    planned                             ──────►       counts of plans in flight (upper bound beyond `computed`)
    slots    ──────────────────────────────────────►  KV slots in the row's page table
    shared   ──────────────────►                      positions that the tree owns; the rest is the request's own
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from radixcast.actors.scheduler.kv_slots import NO_SLOTS
from radixcast.actors.scheduler.radix_cache import Node
from radixcast.protocols.buffers import Int32Array, unpack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.internal import RowOpen, Submit


class State(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """In the queue, without row and KV."""
    RUNNING = "running"
    """Has a row."""
    DRAINING = "draining"
    """Retracted; results of plans in flight are still to come."""
    ENDED = "ended"
    """Ended by runner, abort or error; may hold KV until the detokenizer has told where the text ends."""
    GONE = "gone"
    """Released and forgotten."""


class Request:
    """See the module's picture. `life` changes whenever what plans in flight say about the request stops to matter."""

    __slots__ = (
        "cached",
        "computed",
        "draft",
        "end",
        "error",
        "failures",
        "flights",
        "forced",
        "grammar_key",
        "grammar_ready",
        "handle",
        "known",
        "kv_cap",
        "last_plan",
        "life",
        "life_start",
        "max_position",
        "min_position",
        "node",
        "nslots",
        "opened",
        "planned",
        "private",
        "prompt_len",
        "prompt_reported",
        "retractions",
        "row",
        "sampling_flights",
        "sent",
        "shared",
        "slots",
        "state",
        "submit",
        "submitted_at",
        "suspect_at",
        "tokens",
    )

    def __init__(self, handle: int, submit: Submit, context_length: int, now: float) -> None:
        prompt, output = unpack_ids(submit.prompt_ids), unpack_ids(submit.output_ids)
        new = submit.sampling.max_new_tokens
        self.handle = handle
        self.submit = submit
        self.submitted_at = now
        self.state = State.WAITING
        self.prompt_len = len(prompt)
        limit = max(context_length, self.prompt_len)
        self.max_position = limit if new is None else min(self.prompt_len + new, limit)
        self.min_position = min(self.prompt_len + submit.sampling.min_new_tokens, self.max_position)
        self.kv_cap = max(self.prompt_len, self.max_position - 1)
        """Most KV slots it can ever fill: the last token's KV is never computed."""
        self.known = self.prompt_len + len(output)
        self.tokens: Int32Array = np.empty(self.known + min(64, self.max_position - self.prompt_len), dtype=np.int32)
        self.tokens[: self.prompt_len] = prompt
        self.tokens[self.prompt_len : self.known] = output
        self.cached = -1
        """Prompt tokens found in the cache at first admission; -1 before."""
        self.retractions = 0
        self.life = 0
        self.prompt_reported = 0
        """Prompt positions whose logprobs have been told."""
        self.failures = 0
        """Failed steps that it was in alone."""
        self.suspect_at = -1
        """>= 0: it was in a failed step and runs alone until it knows more than so many tokens."""
        self.grammar_key = submit.grammar.key if submit.grammar is not None else ""
        self.draft = 1
        """Most tokens that a step may append; the scheduler sets it."""
        self.forced = 0
        """Output tokens that the grammar forced."""
        self.end: tuple[int, int] | None = None
        """(END_* reason or 0, token) once ended."""
        self.error: ErrorInfo | None = None
        self.row = -1
        self.forget_kv()

    def forget_kv(self) -> None:
        """Forget row and KV (whoever calls has given the slots back)."""
        self.node: Node | None = None
        self.slots: Int32Array = NO_SLOTS
        self.private = False
        """The tree has the next tokens from somebody else: this request's own copies stay its own until it is released."""
        self.nslots = 0
        self.sent = 0
        """Of `nslots`, those that the runner has been told."""
        self.shared = 0
        self.computed = 0
        self.planned = 0
        self.flights: list[int] = []
        """Plans in flight that it is in."""
        self.grammar_ready = False
        """The runner that would run it has its grammar."""
        self.sampling_flights = 0
        """Of those, the ones that append at least one token (or find the row ended)."""
        self.last_plan = -1
        self.opened = False
        self.life_start = self.known

    @property
    def rid(self) -> str:
        """The client's id of this output."""
        return self.submit.rid

    @property
    def remaining(self) -> int:
        """Known tokens that no plan computes yet; <= 0 when running ahead of results."""
        return self.known - self.computed - self.planned

    @property
    def outputs(self) -> int:
        """Output tokens known."""
        return self.known - self.prompt_len

    @property
    def output_ids(self) -> Int32Array:
        """int32 [outputs]."""
        return self.tokens[self.prompt_len : self.known]

    @property
    def logprob_start(self) -> int:
        """First prompt position whose logprob is still to be told; -1: none."""
        start = self.submit.logprob_start
        if start < 0:
            return -1
        start += self.prompt_reported
        return start if start < self.prompt_len else -1

    @property
    def match_limit(self) -> int:
        """Longest usable prefix hit: one token at least is computed, and the logits before every wanted prompt logprob are.

        The logprob of position p comes from the logits of position p - 1, so that one must be computed.
        """
        start = self.logprob_start
        return self.known - 1 if start < 0 else min(self.known - 1, max(0, start - 1))

    def append(self, ids: Int32Array) -> None:
        """Tokens (int32 [n], n >= 1) that the runner appended."""
        end = self.known + len(ids)
        if end > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(len(ids), len(self.tokens)), dtype=np.int32)])
        self.tokens[self.known : end] = ids
        self.known = end

    def row_open(self) -> RowOpen:
        """What the runner needs to fill its row; the prefix hit is slots[:computed]."""
        s = self.submit
        return RowOpen(
            row=self.row,
            prompt_ids=s.prompt_ids,
            output_ids=self.output_ids.tobytes(),
            kv_slots=self.slots[: self.computed].tobytes(),
            sampling=s.sampling,
            choice=s.choice,
            eos_ids=s.eos_ids,
            stop_ids=s.stop_ids,
            max_position=self.max_position,
            min_position=self.min_position,
            logprobs=s.logprobs,
            logprob_start=self.logprob_start,
            top_logprobs=s.top_logprobs,
            logprob_token_ids=s.logprob_token_ids,
            grammar=self.grammar_key,
        )
