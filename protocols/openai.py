"""The OpenAI dialect, what comes in: request bodies as typed structs. What goes out is in `openai_answers`.

Requests hold what OpenAI's chat and completions routes define plus the extras that SGLang users know (`top_k`, `min_p`,
`regex`, `rid`, `cache_salt`, …). A body is parsed in three steps, each of which refuses with the field's name:

    parse_chat / parse_completion    dict -> ChatRequest / CompletionRequest (types; fields that mean nothing here are
                                     listed, not refused: clients send vendors' extras)
    check_supported                  fields that we know and can't honour
    sampling_of                      -> SamplingParams (ranges; one set of rules for every way in)

Knows nothing of HTTP and nothing of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from radixcast.protocols import limits, sampling
from radixcast.protocols.errors import InvalidRequest
from radixcast.protocols.sampling import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""`max_tokens` of /v1/completions when the body has none (OpenAI's default)."""

_SILENT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "store",
        "stream_reasoning",
        "user",
    }
)
"""Fields that every OpenAI client may send and that need no effect here: accepted without a word."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "min_tokens",
    "stop",
    "stop_regex",
    "stop_token_ids",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "regex",
    "ebnf",
    "json_schema",
    "structural_tag",
    "choices",
    "jump_forward",
    "json_whitespace",
)

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What generation_config.json may set for a request that leaves it out."""


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None
    """One more chunk before [DONE], with empty `choices` and the usage."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes share. None always means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: int | list[int | None] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    choices: list[str] | None = None
    """The output is exactly one of these texts."""
    jump_forward: bool | None = None
    json_whitespace: str | None = None
    response_format: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    """SGLang's name for a second part of the cache namespace."""
    lora_path: str | list[str | None] | None = None
    session_params: dict[str, Any] | None = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool | str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def namespace(self) -> str:
        """`cache_salt` and `extra_key` as one salt; different pairs never give the same one (as in /generate)."""
        if self.extra_key:
            return json.dumps([self.cache_salt or "", self.extra_key])
        return self.cache_salt or ""


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """Wins over `max_tokens`, as OpenAI says."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    input_ids: list[int] | None = None
    """Token ids in place of the rendered template."""
    rid: str | None = None
    modalities: list[str] | None = None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template that the request sets."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return kwargs


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is a text, ids, or a list of either; see `prompts_of`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    rid: str | list[str] | None = None


R = TypeVar("R", ChatRequest, CompletionRequest)


def parse_chat(body: Mapping[str, Any]) -> tuple[ChatRequest, list[str]]:
    """Body -> (request, names of fields without effect). Raises InvalidRequest naming the field."""
    if not body.get("messages") and body.get("input_ids") is None:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    request, ignored = _parse({"messages": [], **body} if body.get("messages") is None else body, ChatRequest)
    if len(request.messages) > limits.MAX_MESSAGES:
        count = len(request.messages)
        raise InvalidRequest(f"messages has {count} entries, at most {limits.MAX_MESSAGES}", param="messages")
    for index, message in enumerate(request.messages):
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequest(f"messages[{index}].role must be a string", param=f"messages[{index}].role")
    _check_top_logprobs(request.top_logprobs, "top_logprobs")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return request, ignored


def parse_completion(body: Mapping[str, Any]) -> tuple[CompletionRequest, list[str]]:
    """Body -> (request, names of fields without effect). Raises InvalidRequest naming the field."""
    if body.get("prompt") is None:
        raise InvalidRequest("prompt is missing", param="prompt")
    request, ignored = _parse(body, CompletionRequest)
    _check_top_logprobs(request.logprobs, "logprobs")
    return request, ignored


def check_supported(request: ChatRequest | CompletionRequest) -> None:
    """Refuse what we know and can't do, so that nobody believes it was done. Raises InvalidRequest."""

    def refuse(when: bool, field: str) -> None:
        if when:
            raise InvalidRequest(f"{field} is not supported yet", param=field, code="unsupported_parameter")

    refuse(bool(request.lora_path), "lora_path")
    refuse(bool(request.session_params), "session_params")
    refuse(bool(request.custom_logit_processor), "custom_logit_processor")
    refuse(bool(request.return_hidden_states), "return_hidden_states")
    if isinstance(request, ChatRequest):
        refuse(isinstance(request.tool_choice, dict) or request.tool_choice == "required", "tool_choice")
        if request.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice must be none, auto, required or a function", param="tool_choice")
        refuse(any(m != "text" for m in request.modalities or ()), "modalities")
    else:
        refuse(bool(request.suffix), "suffix")
        refuse(request.best_of is not None and request.best_of != (request.n or 1), "best_of")


def sampling_of(request: ChatRequest | CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Checked sampling parameters; `defaults` are the model's, for fields that the request leaves out.

    Raises InvalidRequest whose `param` is the field as the body spells it.
    """
    given: dict[str, Any] = {k: defaults[k] for k in _MODEL_DEFAULTS if k in defaults}
    given.update((k, v) for k in _SAMPLING if (v := getattr(request, k)) is not None)
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            given["max_completion_tokens"] = request.max_completion_tokens
        else:
            given["max_tokens"] = request.max_tokens
    else:
        given["max_tokens"] = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    for name in sampling.CONSTRAINTS:
        if given.get(name) in ("", []):
            del given[name]
    for name, text in _constraint_of(request.response_format).items():
        if set_ := next((other for other in sampling.CONSTRAINTS if other in given), None):
            raise InvalidRequest(f"only one constraint may be set, got {set_} and response_format", param="response_format")
        given[name] = text
    return sampling.parse(given, prefix="")


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a completion body, in order. Raises InvalidRequest for an empty or mixed list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    ids = [p for p in prompt if isinstance(p, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts: list[str | list[int]] = [p for p in prompt if isinstance(p, str)]
    lists: list[str | list[int]] = [p for p in prompt if isinstance(p, list)]
    for prompts in (texts, lists):
        if len(prompts) == len(prompt):
            if len(prompts) > limits.MAX_BATCH:
                raise InvalidRequest(f"prompt has {len(prompts)} entries, at most {limits.MAX_BATCH}", param="prompt")
            return prompts
    raise InvalidRequest("prompt must be a text, token ids, or a list of one of both kinds", param="prompt")


def field_of(error: msgspec.ValidationError) -> str | None:
    """The field that a msgspec error is about ("… - at `$.messages[0].role`" -> "messages[0].role")."""
    _, found, tail = str(error).rpartition("`$.")
    return tail.rstrip("`") if found else None


def _parse(body: Mapping[str, Any], kind: type[R]) -> tuple[R, list[str]]:
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=field_of(error)) from None
    known = kind.__struct_fields__
    return request, [k for k, v in body.items() if k not in known and k not in _SILENT and v is not None]


def _check_top_logprobs(value: int | None, field: str) -> None:
    if value is not None and not 0 <= value <= limits.MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{field} must be in [0, {limits.MAX_TOP_LOGPROBS}], got {value}", param=field)


def _constraint_of(response_format: Mapping[str, Any] | None) -> dict[str, str]:
    """`response_format` as a field of SamplingParams. Raises InvalidRequest."""
    if response_format is None:
        return {}
    kind, where = response_format.get("type"), "response_format"
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type":"object"}'}
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
        where = "response_format.json_schema.schema"
        if not isinstance(schema, Mapping | bool):
            raise InvalidRequest(f"{where} must be a JSON schema", param=where)
        return {"json_schema": sampling.json_text(schema, where)}
    if kind == "structural_tag":
        _check_structural_tag(response_format)
        return {"structural_tag": sampling.json_text(response_format, where)}
    raise InvalidRequest(f"{where}.type must be text, json_object, json_schema or structural_tag", param=f"{where}.type")


def _check_structural_tag(tag: Mapping[str, Any]) -> None:
    """Either SGLang's older `structures` and `triggers`, or a `format` tree; what is in them is the grammar's to check."""
    if isinstance(tag.get("format"), Mapping):
        return
    for name in ("structures", "triggers"):
        if not isinstance(tag.get(name), list):
            where = f"response_format.{name}"
            raise InvalidRequest(f"a structural_tag has a format, or structures and triggers; {where} is no list", param=where)
