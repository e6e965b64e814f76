"""From the constraint fields of a request to the GrammarSpec that is proved, sent and built. No I/O."""

from __future__ import annotations

import msgspec

from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.grammar import GrammarSpec, rounded_tokens
from radixcast.protocols.sampling import SamplingParams, json_text
from radixcast.protocols.server_args import ServerArgs


def grammar_of(sampling: SamplingParams, args: ServerArgs, context_length: int) -> GrammarSpec | None:
    """What the output must match, as `args` read it; None without a constraint.

    Whitespace and leniency are told for JSON only, and lengths for expressions, so that other keys don't depend on them.
    """
    backend = args.grammar_backend
    if sampling.regex:
        most = context_length if sampling.max_new_tokens is None else sampling.max_new_tokens
        return GrammarSpec(kind="regex", text=sampling.regex, backend=backend, max_tokens=rounded_tokens(most))
    if sampling.ebnf:
        return GrammarSpec(kind="ebnf", text=sampling.ebnf, backend=backend)
    if sampling.choices:
        return GrammarSpec(kind="choices", text=json_text(list(sampling.choices), "choices"), backend=backend)
    whitespace, lenient = _whitespace(sampling, args), args.grammar_lenient
    if sampling.json_schema:
        text = sampling.json_schema
        return GrammarSpec(kind="json_schema", text=text, backend=backend, whitespace=whitespace, lenient=lenient)
    if sampling.structural_tag:
        text = sampling.structural_tag
        return GrammarSpec(kind="structural_tag", text=text, backend=backend, whitespace=whitespace, lenient=lenient)
    return None


def _whitespace(sampling: SamplingParams, args: ServerArgs) -> str:
    """The request's own wish, else the server's."""
    if sampling.json_whitespace is not None:
        return sampling.json_whitespace
    if args.constrained_json_disable_any_whitespace:
        return "compact"
    return args.constrained_json_whitespace_pattern or "flexible"


def named(error: ErrorInfo, sampling: SamplingParams) -> ErrorInfo:
    """The error with a `param`: the JSON pointer into a schema if it has one, else the field that holds the grammar."""
    if error.status != 400 or error.param not in (None, sampling.constraint):
        return error
    return msgspec.structs.replace(error, param=f"sampling_params.{sampling.constraint}")
