"""What clients and the node say to each other (gateway, Engine, a user's own program): maps, tagged by `type`.

    client ──► tokenizer     Generate, Abort, Tokenize, Detokenize, Control
    tokenizer ──► client     Welcome, Refused, TokenizeReply, DetokenizeReply, ControlReply
    client ──► detokenizer   EndAck
    detokenizer ──► client   TextDelta   (the only speaker once a request is admitted; the last one carries `finish`)

A request is (rid, attempt): sending the same pair again is harmless, a higher attempt replaces a lower one. n > 1 is
n requests of one `group` with choices 0 … n-1 and one seed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.sampling import SamplingParams

PublicStruct = msgspec.Struct


class Chat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation that the tokenizer renders with the chat template."""

    messages: list[dict[str, Any]]
    """OpenAI messages: {"role", "content", …}; content a string or a list of parts."""
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message is unfinished assistant text that the model goes on with."""
    template_kwargs: dict[str, Any] = {}


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """One output wanted. Exactly one of `text`, `input_ids`, `chat` is set.

    The same form serves first submission, restart and migration: `output_ids` are tokens that this request has already
    generated (never part of the prompt); generation goes on behind them with the same (seed, choice) counters.
    """

    rid: str
    attempt: int = 0
    group: str = ""
    """The user's request id; Abort may name it. Empty: rid."""
    choice: int = 0
    text: str | None = None
    input_ids: bytes | None = None
    """int32 little-endian token ids."""
    chat: Chat | None = None
    output_ids: bytes = b""
    sampling: SamplingParams = SamplingParams()
    add_special_tokens: bool = True
    """Put BOS and the like in front of `text` as the tokenizer would."""
    stream: bool = True
    """False: the node may merge all deltas into one."""
    logprobs: bool = False
    logprob_start: int = -1
    """First prompt position whose logprob is wanted; -1: output only. A hit is never matched beyond it."""
    top_logprobs: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    """Also report the logprobs of these tokens at every reported position."""
    priority: int = 0
    """Higher first, with --enable-priority-scheduling."""
    cache_salt: str = ""
    """Requests share prefixes only within one salt."""
    program: str = ""
    """Hint of the frontend language: requests of one program."""
    depth: int = 0
    return_prompt_ids: bool = False
    return_text_in_logprobs: bool = False
    clip: bool = False
    """`sampling.max_new_tokens` is a default that nobody asked for: clipped to what fits behind the prompt, not refused."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Stop this client's requests: the one called `rid` and those of group `rid`, or all.

    Means what the client has sent before it and nothing later, so an id may be used again at once. Idempotent.
    """

    rid: str = ""
    all: bool = False
    reason: str = ""
    exact: bool = False
    """Only the request called `rid`, never a group: choice 0 has the id of its group."""

    def names(self, rid: str, group: str) -> bool:
        """Whether the request `rid` of `group` ('': none but itself) is meant."""
        return self.all or (bool(self.rid) and (self.rid == rid or (self.rid == group and not self.exact)))


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Ask for token ids of texts or of a conversation."""

    id: str
    texts: list[str] = []
    chat: Chat | None = None
    add_special_tokens: bool = True


class Detokenize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Ask for the texts of id lists (int32 buffers)."""

    id: str
    ids: list[bytes]
    skip_special_tokens: bool = True


class Control(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Ask the node to do or tell something."""

    id: str
    what: Literal["flush_cache", "stats"]


ClientToTokenizer = Generate | Abort | Tokenize | Detokenize | Control


class Welcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """First message to a client: where its output comes from and what is served here."""

    output_endpoint: str
    """Dial this with the same client id to get TextDeltas."""
    model: str
    context_length: int
    vocab_size: int
    max_total_tokens: int = 0
    """Tokens in the KV pool; 0 while the runner still loads."""
    eos_token_ids: tuple[int, ...] = ()
    weight_version: str = "default"
    has_chat_template: bool = False
    sampling_defaults: dict[str, Any] = {}
    random_seed: int | None = None
    """Seed for requests that bring none (--random-seed); None: the client draws one."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The request was not admitted; nothing else will come for this (rid, attempt)."""

    rid: str
    attempt: int
    error: ErrorInfo


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Ids of each text (one entry for a conversation)."""

    id: str
    ids: list[bytes] = []
    error: ErrorInfo | None = None


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Text of each id list."""

    id: str
    texts: list[str] = []
    error: ErrorInfo | None = None


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Outcome of a Control. For `stats`, `stats` holds the scheduler's numbers."""

    id: str
    ok: bool = True
    message: str = ""
    stats: SchedulerStats | None = None


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of the scheduler, at the moment of asking. Counters count since start."""

    running: int = 0
    queued: int = 0
    retracted: int = 0
    """Requests now waiting after a retraction."""
    total_tokens: int = 0
    free_tokens: int = 0
    cached_tokens: int = 0
    """In the tree and evictable."""
    locked_tokens: int = 0
    """Held by running requests (tree paths and their own)."""
    steps: int = 0
    plans_in_flight: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    requests_total: int = 0
    aborted_total: int = 0
    retractions_total: int = 0
    evicted_tokens_total: int = 0
    cache_hit_rate: float = 0.0
    """cached / prompt tokens of admitted requests since start (or the last flush of the numbers)."""
    cache_hit_rate_window: float = 0.0
    """The same over the last 60 s."""
    gen_throughput: float = 0.0
    """Output tokens/s over the last seconds."""
    new_token_ratio: float = 0.0
    device_wait_seconds_total: float = 0.0
    """Time the runner sat without a plan while requests were running."""
    forward_seconds_total: float = 0.0
    repaired_total: int = 0
    """Bookkeeping slips found and mended."""
    grammar_queued: int = 0
    """Requests waiting for their grammar."""
    grammars_total: int = 0
    grammar_hits_total: int = 0
    """Requests whose grammar the runner had already."""
    forced_tokens_total: int = 0


TokenizerToClient = Welcome | Refused | TokenizeReply | DetokenizeReply | ControlReply


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why and where an output ended."""

    reason: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    """The stop token id, stop string or stop expression that ended it."""
    error: ErrorInfo | None = None
    """Set for `abort` and `error`."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of one output; complete in the last delta."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    retractions: int = 0
    forced_tokens: int = 0
    """Output tokens that the grammar forced, appended without sampling (jump-forward)."""


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Logprobs of n consecutive positions, of the model's own distribution (before penalties, temperature and masks)."""

    values: bytes
    """float32 [n]; NaN where there is none (the first prompt token)."""
    ids: bytes
    """int32 [n]: the token at the position."""
    top_n: int = 0
    top_values: bytes = b""
    """float32 [n, top_n], descending."""
    top_ids: bytes = b""
    """int32 [n, top_n]."""
    asked_values: bytes = b""
    """float32 [n, len(logprob_token_ids)]."""
    token_texts: list[str] | None = None
    """Text of `ids`, filled in by the detokenizer."""
    top_texts: list[str] | None = None
    """Text of `top_ids`, flat [n * top_n]."""
    token_bytes: list[bytes] | None = None
    """UTF-8 bytes of `ids` (a token may be part of a character)."""
    top_bytes: list[bytes] | None = None


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A piece of one output. Pieces joined in order are the whole; offsets show a gap or a repeat."""

    rid: str
    attempt: int = 0
    choice: int = 0
    token_offset: int = 0
    """Output tokens before this piece (those in Generate.output_ids included)."""
    token_ids: bytes = b""
    """int32. Tokens whose text is still held back may come before their text."""
    text_offset: int = 0
    """Characters (Unicode code points) before this piece."""
    text: str = ""
    logprobs: Logprobs | None = None
    """Of `token_ids`."""
    prompt_logprobs: Logprobs | None = None
    """Positions logprob_start … of the prompt; once, in the first piece."""
    prompt_ids: bytes | None = None
    """Once, in the first piece, when asked."""
    usage: Usage | None = None
    finish: Finish | None = None
    """Set in the last piece, which also has `usage`."""


class EndAck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The client holds the end of (rid, attempt); the node may forget it."""

    rid: str
    attempt: int = 0


ClientToDetokenizer = EndAck
DetokenizerToClient = TextDelta
