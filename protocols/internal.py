"""What our own actors say to each other: arrays tagged by their first element, fields appended only.

    tokenizer ──► scheduler       Submit, AbortOf, ControlOf
    scheduler ──► tokenizer       SubmitRefused, ControlDone, Capacity
    scheduler ──► model_runner    GrammarPrepare, StepPlan
    model_runner ──► scheduler    Capacity, GrammarReady, StepResult
    scheduler ──► detokenizer     Open, TokenDeltas
    detokenizer ──► scheduler     Finished
    supervisor ──► any actor      Shutdown, NodeState
    any actor ──► supervisor      Ready, Heartbeat, Failed

Inside the node an admitted request is its `handle`, an integer of the scheduler that is never used twice in an epoch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.public import Logprobs, SchedulerStats
from radixcast.protocols.sampling import SamplingParams


class Internal(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """Base of the array-like structs."""


# ------------------------------------------------------------------ tokenizer <-> scheduler


class Submit(Internal, frozen=True, tag="Submit"):
    """An admissible request: validated, tokenised, with its limits resolved."""

    client: str
    """Link name of the client; the detokenizer speaks to it."""
    rid: str
    attempt: int
    group: str
    choice: int
    prompt_ids: bytes
    output_ids: bytes
    """Tokens generated in an earlier life of this request."""
    sampling: SamplingParams
    """With `seed` set and max_new_tokens resolved (never None)."""
    eos_ids: tuple[int, ...]
    """Ids that end the row as EOS; empty with ignore_eos."""
    stop_ids: tuple[int, ...]
    """Other ids that end the row; empty with ignore_eos."""
    stream: bool = True
    logprobs: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    priority: int = 0
    namespace: str = ""
    """Cache namespace: adapter, salt and weight version, joined by the tokenizer so that they can't collide."""
    program: str = ""
    depth: int = 0
    return_prompt_ids: bool = False
    return_text_in_logprobs: bool = False
    grammar: GrammarSpec | None = None
    """What the output must match; proven to compile."""
    clip: bool = False
    """max_new_tokens was not asked for: the scheduler may lower it to what its pool holds."""


class AbortOf(Internal, frozen=True, tag="AbortOf"):
    """Abort, with the client that asked ('' for an operator)."""

    rid: str = ""
    all: bool = False
    reason: str = ""
    client: str = ""
    exact: bool = False
    """Only the request called `rid`, never a group."""

    def names(self, client: str, rid: str, group: str) -> bool:
        """Whether the request `rid` of `group`, sent by `client`, is meant."""
        if self.client not in ("", client):
            return False
        return self.all or (bool(self.rid) and (self.rid == rid or (self.rid == group and not self.exact)))


class ControlOf(Internal, frozen=True, tag="ControlOf"):
    """A client's Control on its way to the scheduler."""

    client: str
    id: str
    what: str


class SubmitRefused(Internal, frozen=True, tag="SubmitRefused"):
    """The scheduler did not take a Submit (queue full, duplicate, too large for the pool); the tokenizer tells the client."""

    client: str
    rid: str
    attempt: int
    error: ErrorInfo


class ControlDone(Internal, frozen=True, tag="ControlDone"):
    """Answer to ControlOf."""

    client: str
    id: str
    ok: bool = True
    message: str = ""
    stats: SchedulerStats | None = None


class Capacity(Internal, frozen=True, tag="Capacity"):
    """What the runner can hold, told once when it is ready; the scheduler passes it on to the tokenizer."""

    total_tokens: int
    """KV slots; slot ids are 0 … total_tokens-1."""
    max_running: int
    """Rows of the runner's tables; row slots are 0 … max_running-1."""
    context_length: int
    max_step_tokens: int = 0
    """Most tokens of one plan that the runner's buffers hold; 0: no limit."""
    device: str = "cpu"
    """Kind of device that the runner computes on: cpu, cuda."""


# ------------------------------------------------------------------ scheduler <-> model_runner


class RowOpen(Internal, frozen=True):
    """Fill one row of the runner's tables. Done before the rows of the same plan run."""

    row: int
    prompt_ids: bytes
    output_ids: bytes
    kv_slots: bytes
    """int32: KV slots of the first len/4 positions, already computed by earlier plans (the prefix hit)."""
    sampling: SamplingParams
    choice: int
    eos_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    max_position: int
    """The row ends (length) when it has this many tokens, prompt included."""
    min_position: int
    """EOS and stop ids are masked while the row has fewer tokens than this."""
    logprobs: bool = False
    logprob_start: int = -1
    """First prompt position to report; -1: none. Position 0 has no logprob (NaN)."""
    top_logprobs: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    """Key of a prepared grammar; '' for none."""


class StepPlan(Internal, frozen=True, tag="StepPlan"):
    """One step. Plans execute strictly in order of `number`.

    Row r of the plan computes at most `counts[r]` of its tokens whose KV is not there yet, starting at the first such
    position. When that reaches the row's last known token, a new token is sampled and appended (or several, when the
    runner accepts drafts: at most `counts[r]` in all). A row that has ended is a no-op with result count 0.
    `slot_counts[r]` new KV slots are appended to the row's page table before it runs.
    """

    number: int
    opens: list[RowOpen]
    rows: bytes
    """int32 [R]: row slots, each at most once."""
    counts: bytes
    """int32 [R]: most tokens to compute (a prefill chunk, or 1 for a decode)."""
    slot_counts: bytes
    """int32 [R]."""
    slots: bytes
    """int32 [sum(slot_counts)]: KV slot ids, row after row."""
    closes: bytes = b""
    """int32: rows to forget, before `opens` are done."""


class GrammarPrepare(Internal, frozen=True, tag="GrammarPrepare"):
    """Build this grammar beside the steps and keep it; answered by GrammarReady, at once when it is there already.

    A grammar is kept at least until every row that was opened with it is closed, and is then dropped by size and age; the
    scheduler asks again for each request.
    """

    spec: GrammarSpec


class GrammarReady(Internal, frozen=True, tag="GrammarReady"):
    """The grammar called `key` can be used by rows of plans sent from now on; or `error` says why not."""

    key: str
    error: ErrorInfo | None = None
    seconds: float = 0.0
    """Time that building took; 0 when it was there."""


class RowEnd(Internal, frozen=True):
    """Why the runner ended a row."""

    row: int
    reason: int
    """1 EOS, 2 stop id, 3 length (max_position), 4 grammar complete, 5 error."""
    token: int = -1
    """The EOS or stop id."""
    error: ErrorInfo | None = None


END_EOS, END_STOP_ID, END_LENGTH, END_GRAMMAR, END_ERROR = 1, 2, 3, 4, 5


class RowLogprobs(Internal, frozen=True):
    """Logprobs of what a row appended (`output`) or of prompt positions it computed (`prompt`) in this step."""

    row: int
    output: Logprobs | None = None
    prompt: Logprobs | None = None


class StepResult(Internal, frozen=True, tag="StepResult"):
    """What came of a plan. Rows are those of the plan, in its order."""

    number: int
    appended: bytes
    """int32 [R]: tokens appended to each row."""
    tokens: bytes
    """int32 [sum(appended)], row after row."""
    ends: list[RowEnd] = []
    logprobs: list[RowLogprobs] = []
    error: ErrorInfo | None = None
    """The whole step failed: no row was changed, KV written by it is garbage."""
    forward_seconds: float = 0.0
    wait_seconds: float = 0.0
    """How long the runner had been idle, waiting for this plan."""
    forced: bytes = b""
    """int32 [R]: how many of `appended` the grammar forced (jump-forward); empty: none."""


# ------------------------------------------------------------------ scheduler <-> detokenizer


class Open(Internal, frozen=True, tag="Open"):
    """A request was admitted: deltas for it follow. Carries everything the text pipeline needs."""

    handle: int
    client: str
    rid: str
    attempt: int
    choice: int
    prompt_tail: bytes
    """int32: the last prompt ids, context for the first output token's text (empty: none)."""
    output_ids: bytes
    """Tokens of an earlier life: decoded and matched again, and *not* sent again."""
    sampling: SamplingParams
    prompt_tokens: int
    stream: bool = True
    return_text_in_logprobs: bool = False
    prompt_ids: bytes | None = None


class DeltaEnd(Internal, frozen=True):
    """Token-level end of one output inside TokenDeltas."""

    handle: int
    reason: int
    """END_* of this module, or 0 for an abort."""
    token: int = -1
    error: ErrorInfo | None = None


class DeltaLogprobs(Internal, frozen=True):
    """Logprobs for one handle of a TokenDeltas."""

    handle: int
    output: Logprobs | None = None
    prompt: Logprobs | None = None


class TokenDeltas(Internal, frozen=True, tag="TokenDeltas"):
    """All tokens of one step, for all requests in it."""

    handles: bytes
    """int32 [R]."""
    counts: bytes
    """int32 [R]."""
    tokens: bytes
    """int32 [sum(counts)]."""
    cached: bytes = b""
    """int32 [R]: cached prompt tokens of each request, told again each time; empty: unchanged."""
    retractions: bytes = b""
    ends: list[DeltaEnd] = []
    logprobs: list[DeltaLogprobs] = []
    forced: bytes = b""
    """int32 [R]: forced tokens of each request so far, told again each time; empty: unchanged."""


class Finished(Internal, frozen=True, tag="Finished"):
    """Outputs that ended in text, and at which output position: the scheduler releases them.

    Sent for every handle, also when the end was the scheduler's own (then the position is the smaller one of both).
    """

    handles: bytes
    """int32 [R]."""
    positions: bytes
    """int32 [R]: output tokens that count."""


# ------------------------------------------------------------------ supervisor <-> all


class Ready(Internal, frozen=True, tag="Ready"):
    """The actor has loaded and serves."""

    info: dict[str, Any] = {}


class Heartbeat(Internal, frozen=True, tag="Heartbeat"):
    """Sent about once a second by the actor's loop."""

    progress: int
    """Grows with every unit of work done."""
    busy: bool
    """Work is waiting or running; a busy actor whose progress stands still hangs."""
    stats: dict[str, float] = {}


class Failed(Internal, frozen=True, tag="Failed"):
    """The actor can't start or go on; the text is for the operator."""

    message: str
    startup: bool = False


class Shutdown(Internal, frozen=True, tag="Shutdown"):
    """Stop. With `drain`, finish what runs first."""

    drain: bool = False
    timeout: float = 0.0


class ActorState(Internal, frozen=True):
    """One actor as the supervisor sees it."""

    name: str
    epoch: int
    state: str
    """starting | ready | stopping | dead."""
    pid: int = 0
    heartbeat_age: float = 0.0
    stats: dict[str, float] = {}


class NodeState(Internal, frozen=True, tag="NodeState"):
    """The node as the supervisor sees it; sent to gateway and tokenizer when it changes, and once a second to the gateway."""

    state: str
    """starting | ready | draining | stopping."""
    actors: list[ActorState]


TokenizerToScheduler = Submit | AbortOf | ControlOf
SchedulerToTokenizer = SubmitRefused | ControlDone | Capacity
SchedulerToRunner = StepPlan | GrammarPrepare
RunnerToScheduler = Capacity | StepResult | GrammarReady
SchedulerToDetokenizer = Open | TokenDeltas
SupervisorToActor = Shutdown | NodeState
ActorToSupervisor = Ready | Heartbeat | Failed
