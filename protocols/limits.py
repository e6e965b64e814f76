"""Every numeric limit on what a client may send, in one place.

A limit here is a property of the product, the same for every server; what depends on the deployment (context length,
queue length, KV size) is in `server_args`. Past a limit the answer is a 4xx that names the field.
"""

from __future__ import annotations

MAX_BODY_BYTES = 32 << 20
"""HTTP request body, and one ZMQ message (bytes)."""

MAX_HEADER_BYTES = 16 << 10
"""One HTTP header field or the request line (bytes)."""

MAX_PROMPT_CHARS_PER_TOKEN = 64
"""A text prompt longer than context length x this (characters) is refused before it is tokenised."""

MAX_BATCH = 2048
"""Prompts in one request body."""

MAX_N = 128
"""Choices of one prompt (`n`)."""

MAX_MESSAGES = 4096
"""Messages of one chat request."""

MAX_TOP_LOGPROBS = 20
"""`top_logprobs` of chat, `logprobs` of completions."""

MAX_TOP_LOGPROBS_NATIVE = 128
"""`top_logprobs_num` of /generate and of the ZMQ protocol."""

MAX_LOGPROB_TOKEN_IDS = 512
"""`token_ids_logprob` entries."""

MAX_STOP_STRINGS = 64
"""Entries of `stop` and of `stop_regex` each."""

MAX_STOP_CHARS = 1024
"""Characters of one stop string."""

MAX_STOP_REGEX_CHARS = 512
"""Characters of one stop regular expression."""

MAX_STOP_REGEX_MATCH = 1024
"""Longest match (characters) that a stop regular expression may have; unbounded ones are refused."""

MAX_STOP_TOKEN_IDS = 1024
"""Entries of `stop_token_ids`."""

MAX_LOGIT_BIAS = 4096
"""Entries of `logit_bias`."""

LOGIT_BIAS_RANGE = 100.0
"""`logit_bias` values lie in [-this, this] (OpenAI's rule)."""

MAX_RID_CHARS = 256
"""Characters of a request id."""

MAX_CACHE_SALT_CHARS = 512
"""Characters of `cache_salt`."""

MAX_TEMPLATE_SECONDS = 5.0
"""Rendering one chat template (seconds)."""

MAX_ZMQ_FRAMES = 16
"""Frames of one ZMQ message."""

MAX_GRAMMAR_BYTES = 512 << 10
"""Text of one constraint (UTF-8 bytes)."""

MAX_GRAMMAR_DEPTH = 128
"""Nesting of a schema's JSON, and of groups in a grammar."""

MAX_ENUM_VALUES = 20_000
"""Values of all `enum`s of one schema, and rules of one grammar."""

MAX_SCHEMA_NODES = 50_000
"""Subschemas of one schema, counting those that a keyword is rewritten to."""
