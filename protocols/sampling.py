"""SamplingParams: how one output is to be drawn and when it ends.

Names, defaults and ranges are those that users of SGLang and of the OpenAI API know; `parse` also understands their
spellings (`max_tokens`, `min_tokens`, `sampling_seed`). One function checks them, wherever a request comes from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from radixcast.protocols import limits
from radixcast.protocols.errors import InvalidRequest

CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag", "choices")
"""Fields of which at most one may be set."""

ANY_JSON = "$$ANY$$"
"""`json_schema` of SGLang's clients that allows any JSON value."""

GREEDY_BELOW = 1e-5
"""A temperature up to this is greedy: dividing logits by less only adds rounding noise."""

_ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
}


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """How to sample and when to stop. Build it from client input with `parse`, which checks every rule."""

    max_new_tokens: int | None = 128
    """Most tokens to generate; None: up to the end of the context. 0 only computes the prompt."""
    min_new_tokens: int = 0
    """EOS and stop tokens are masked until so many tokens are out."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """(0, 1]: the smallest set of tokens with at least this mass."""
    top_k: int = -1
    """-1: all; else >= 1."""
    min_p: float = 0.0
    """[0, 1]: drop tokens below this share of the best token's probability."""
    frequency_penalty: float = 0.0
    """[-2, 2], times the count among the *output* tokens (OpenAI's definition)."""
    presence_penalty: float = 0.0
    """[-2, 2], once for each token that is among the output tokens."""
    repetition_penalty: float = 1.0
    """(0, 2]: divides positive and multiplies negative logits of every token in prompt or output (Keskar 2019, CTRL)."""
    logit_bias: dict[int, float] | None = None
    """Token id -> value in [-100, 100], added to the logit."""
    seed: int | None = None
    """The client class draws one when None. Uniforms are a pure function of (seed, choice, position)."""
    n: int = 1
    """Choices. The client class splits n > 1 into n requests; on the wire it is 1."""
    stop: tuple[str, ...] = ()
    """Stop strings; cut from the text unless `no_stop_trim`."""
    stop_regex: tuple[str, ...] = ()
    """Stop regular expressions (linear-time dialect, bounded match length)."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Skips every token-level stop: EOS, the model's stop ids and `stop_token_ids`."""
    no_stop_trim: bool = False
    """Keep the matched stop string, or the text of the stop token, in the output."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    choices: tuple[str, ...] = ()
    """The output is exactly one of these strings."""
    jump_forward: bool = True
    """Append text that the constraint forces without a forward pass each; the server may have it off for all."""
    json_whitespace: Literal["flexible", "compact"] | None = None
    """Between JSON tokens: at most what a pretty printer makes, or none; None: as the server is set."""

    @property
    def greedy(self) -> bool:
        """True when the best token is taken without drawing."""
        return self.temperature <= GREEDY_BELOW or self.top_k == 1

    @property
    def constraint(self) -> str | None:
        """The name of the grammar field that is set, or None."""
        return next((f for f in CONSTRAINTS if getattr(self, f)), None)


def parse(data: Mapping[str, Any], *, prefix: str = "sampling_params.") -> SamplingParams:
    """Client input -> checked SamplingParams. A null means the default; `stop`, `stop_regex` and ids may be single values.

    Raises InvalidRequest whose `param` is `prefix` + the field, as the client spelled it.
    """
    spelled: dict[str, str] = {}
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = _ALIASES.get(key, key)
        if name not in SamplingParams.__struct_fields__:
            raise InvalidRequest(f"unknown sampling parameter {key!r}", param=prefix + key, code="unknown_parameter")
        if name in spelled and values.get(name) != value and value is not None and values.get(name) is not None:
            raise InvalidRequest(f"{spelled[name]!r} and {key!r} are the same thing; give one", param=prefix + key)
        if value is None and name != "max_new_tokens":
            continue
        if value is None and name in values:
            continue
        spelled[name] = key
        values[name] = _normalise(name, value, prefix + key)
    try:
        params = msgspec.convert(values, SamplingParams, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        field = _field_of(str(error))
        raise InvalidRequest(str(error), param=prefix + spelled.get(field, field)) from None
    check(params, prefix=prefix, spelled=spelled)
    return params


def says_length(data: Mapping[str, Any] | None) -> bool:
    """Whether client input for `parse` says how many tokens it wants, in any spelling (else the default may be clipped)."""
    return any(_ALIASES.get(key, key) == "max_new_tokens" for key in data or ())


def check(params: SamplingParams, *, prefix: str = "sampling_params.", spelled: Mapping[str, str] | None = None) -> None:
    """Check every range and cross-field rule that needs no model. Raises InvalidRequest naming the field."""
    names = spelled or {}

    def need(ok: bool, field: str, rule: str) -> None:
        if not ok:
            name = names.get(field, field)
            got = _shorten(getattr(params, field))
            raise InvalidRequest(f"{name} must be {rule}, got {got}", param=prefix + name)

    for field in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        need(math.isfinite(getattr(params, field)), field, "a finite number")
    need(params.max_new_tokens is None or params.max_new_tokens >= 0, "max_new_tokens", ">= 0")
    need(params.min_new_tokens >= 0, "min_new_tokens", ">= 0")
    if params.max_new_tokens is not None:
        need(params.min_new_tokens <= params.max_new_tokens, "min_new_tokens", f"<= max_new_tokens ({params.max_new_tokens})")
    need(params.temperature >= 0, "temperature", ">= 0")
    need(0 < params.top_p <= 1, "top_p", "in (0, 1]")
    need(params.top_k == -1 or params.top_k >= 1, "top_k", "-1 (all) or >= 1")
    need(0 <= params.min_p <= 1, "min_p", "in [0, 1]")
    need(-2 <= params.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
    need(-2 <= params.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
    need(0 < params.repetition_penalty <= 2, "repetition_penalty", "in (0, 2]")
    need(1 <= params.n <= limits.MAX_N, "n", f"in [1, {limits.MAX_N}]")
    need(params.seed is None or -(2**63) <= params.seed < 2**64, "seed", "a 64-bit integer")
    need(len(params.stop) <= limits.MAX_STOP_STRINGS, "stop", f"at most {limits.MAX_STOP_STRINGS} strings")
    need(all(params.stop), "stop", "without empty strings")
    need(all(len(s) <= limits.MAX_STOP_CHARS for s in params.stop), "stop", f"at most {limits.MAX_STOP_CHARS} characters each")
    need(len(params.stop_regex) <= limits.MAX_STOP_STRINGS, "stop_regex", f"at most {limits.MAX_STOP_STRINGS} expressions")
    need(
        all(0 < len(s) <= limits.MAX_STOP_REGEX_CHARS for s in params.stop_regex),
        "stop_regex",
        f"1 to {limits.MAX_STOP_REGEX_CHARS} characters each",
    )
    need(len(params.stop_token_ids) <= limits.MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {limits.MAX_STOP_TOKEN_IDS} ids")
    _check_bias(params, prefix)
    set_ = [f for f in CONSTRAINTS if getattr(params, f)]
    if len(set_) > 1:
        raise InvalidRequest(f"only one constraint may be set, got {' and '.join(set_)}", param=prefix + set_[1])


def check_vocabulary(params: SamplingParams, vocab_size: int, *, prefix: str = "sampling_params.") -> None:
    """Check that every token id named in `params` is in [0, vocab_size). Raises InvalidRequest."""
    for field, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{field} names token {token}, but the vocabulary has {vocab_size} tokens", param=prefix + field
                )


def _check_bias(params: SamplingParams, prefix: str) -> None:
    bias = params.logit_bias or {}
    if len(bias) > limits.MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(bias)} entries, at most {limits.MAX_LOGIT_BIAS}", param=prefix + "logit_bias"
        )
    for token, value in bias.items():
        if not (math.isfinite(value) and abs(value) <= limits.LOGIT_BIAS_RANGE):
            raise InvalidRequest(
                f"logit_bias[{token}] must be in [-{limits.LOGIT_BIAS_RANGE:g}, {limits.LOGIT_BIAS_RANGE:g}], got {value}",
                param=prefix + "logit_bias",
            )


def _normalise(name: str, value: Any, where: str) -> Any:
    """Give a field the one shape that SamplingParams holds."""
    if name in ("stop", "stop_regex"):
        return [value] if isinstance(value, str) else value
    if name == "stop_token_ids":
        ids = [value] if isinstance(value, int) else value
        return [i for i in ids if i is not None] if isinstance(ids, list) else ids
    if name == "json_schema" and isinstance(value, dict | bool):
        return json_text(value, where)
    if name == "json_schema" and value == ANY_JSON:
        return "{}"
    if name == "structural_tag" and isinstance(value, dict):
        return json_text(value, where)
    if name == "choices" and isinstance(value, str):
        return [value]
    if name == "seed" and isinstance(value, float):
        raise InvalidRequest(f"seed must be an integer, got {value}", param=where)
    return value


def json_text(value: Any, where: str) -> str:
    """A schema that came as JSON data, as the text that is compiled; order kept, integers of any size.

    Raises InvalidRequest naming `where`.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{where} can't be written as JSON: {error}", param=where) from None


def _field_of(message: str) -> str:
    """The field that a msgspec message is about (`... - at `$.top_p``)."""
    tail = message.rpartition("`$.")[2]
    return tail.split("`")[0].split("[")[0].split(".")[0] if tail != message else "sampling_params"


def _shorten(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
