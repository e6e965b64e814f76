"""The native request shape (SGLang's /generate): JSON in, Generate messages out, and Outputs back into JSON. Pure.

Used by the gateway's route and by `Engine.generate`, so both understand and answer the same. One body holds one prompt or
a batch of them; with `n` > 1 each prompt gives n outputs. The reply of a batch, or of n > 1, is a list: prompt after
prompt, choice after choice.
"""

from __future__ import annotations

import difflib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from radixcast.actors.collect import LogprobEntry, Output, choice_rid, logprob_positions
from radixcast.protocols import limits, sampling
from radixcast.protocols.buffers import pack_ids
from radixcast.protocols.errors import DuplicateRequest, InvalidRequest
from radixcast.protocols.public import Finish, Generate, Logprobs
from radixcast.protocols.sampling import SamplingParams

T = TypeVar("T")

_INT32_MAX = 2**31 - 1


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FIELDS = _names(
    "text input_ids sampling_params stream rid return_logprob logprob_start_len top_logprobs_num token_ids_logprob "
    "return_text_in_logprobs return_prompt_token_ids priority cache_salt extra_key"
)
_IGNORED = _names("log_metrics no_logs custom_labels conversation_id model user")
"""Accepted whatever they hold: they don't change the answer."""
_NEUTRAL = _names(
    "input_embeds image_data video_data audio_data modalities lora_path session_params session_id return_hidden_states "
    "return_routed_experts routed_experts_start_len return_indexer_topk return_entropy return_sampling_mask "
    "return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 custom_logit_processor require_reasoning "
    "max_thinking_tokens background routed_dp_rank data_parallel_rank disagg_prefill_dp_rank bootstrap_host "
    "bootstrap_port bootstrap_room routing_key mm_hashes mm_content_hashes external_trace_header"
)
"""Known to SGLang's clients but not served here: accepted only when they ask for nothing."""


class NativeItem(NamedTuple):
    """One prompt of a body: its outputs are `first` … `first + n - 1` of the reply."""

    first: int
    request: Generate
    n: int


@dataclass(frozen=True)
class NativeRequest:
    """A checked body."""

    requests: list[NativeItem]
    stream: bool
    is_list: bool
    """Whether the reply is a list (chunks of a stream then carry `index`)."""

    @property
    def outputs(self) -> int:
        """Outputs in the reply."""
        return sum(item.n for item in self.requests)


def parse_native(body: Mapping[str, Any]) -> NativeRequest:
    """Body of /generate -> its requests, with request ids drawn where none are given.

    Raises InvalidRequest whose `param` names the field; code `unknown_parameter` for a key that is none.
    """
    _check_keys(body)
    prompts, is_batch = _prompts(body)
    count = len(prompts)
    take = _Fields(body, count, is_batch)
    stream = _bool(False if body.get("stream") is None else body["stream"], "stream")
    samplings, clips = _samplings(body.get("sampling_params"), count, is_batch)
    outputs = sum(params.n for params in samplings)
    if outputs > limits.MAX_BATCH:
        raise InvalidRequest(f"prompts x n is {outputs}, at most {limits.MAX_BATCH}", param="sampling_params.n")
    rids, group = _rids(body.get("rid"), [params.n for params in samplings], is_batch)
    with_logprobs = take("return_logprob", _bool, False)
    starts, tops = take("logprob_start_len", _start, -1), take("top_logprobs_num", _top, 0)
    asked = _asked_ids(body.get("token_ids_logprob"), count, is_batch)
    texts = take("return_text_in_logprobs", _bool, False)
    with_prompt_ids, priorities = take("return_prompt_token_ids", _bool, False), take("priority", _int, 0)
    salts, keys = take("cache_salt", _salt, ""), take("extra_key", _salt, "")
    items, index = [], 0
    for i, prompt in enumerate(prompts):
        logprobs = with_logprobs[i]
        request = Generate(
            rid=rids[i],
            group=group or rids[i],
            text=prompt if isinstance(prompt, str) else None,
            input_ids=prompt if isinstance(prompt, bytes) else None,
            sampling=samplings[i],
            stream=stream,
            logprobs=logprobs,
            logprob_start=starts[i] if logprobs else -1,
            top_logprobs=tops[i] if logprobs else 0,
            logprob_token_ids=asked[i] if logprobs else (),
            priority=priorities[i],
            cache_salt=_namespace(salts[i], keys[i]),
            return_prompt_ids=with_prompt_ids[i],
            return_text_in_logprobs=texts[i],
            clip=clips[i],
        )
        items.append(NativeItem(index, request, samplings[i].n))
        index += samplings[i].n
    return NativeRequest(items, stream, is_batch or outputs > count)


def native_dict(
    output: Output, request: Generate, *, weight_version: str = "default", e2e_latency: float = 0.0
) -> dict[str, Any]:
    """One output as /generate shows it (so far, when it has no finish): plain JSON data.

    `request` is the Generate that it answers, `e2e_latency` seconds since it was submitted.
    """
    usage = output.usage
    meta: dict[str, Any] = {
        "id": output.rid,
        "finish_reason": _finish_reason(output.finish, usage.completion_tokens),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "forced_tokens": usage.forced_tokens,
        "num_retractions": usage.retractions,
        "weight_version": weight_version,
        "e2e_latency": e2e_latency,
    }
    if request.logprobs:
        meta["output_token_logprobs_length"] = len(output.logprobs.ids) // 4 if output.logprobs else 0
        for side, logprobs in (("input", output.prompt_logprobs), ("output", output.logprobs)):
            _add_logprobs(meta, side, logprobs, request)
    if output.prompt_ids is not None:
        meta["prompt_token_ids"] = output.prompt_ids
    return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}


def _finish_reason(finish: Finish | None, completion_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.reason == "length":
        return {"type": "length", "length": completion_tokens}
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    error = finish.error
    return {
        "type": finish.reason,
        "message": error.message if error else "Aborted",
        "status_code": error.status if error else None,
        "err_type": error.type if error else None,
    }


def _add_logprobs(meta: dict[str, Any], side: str, logprobs: Logprobs | None, request: Generate) -> None:
    """The columns `<side>_token_logprobs`, `<side>_top_logprobs`, `<side>_token_ids_logprobs` of meta_info."""
    positions = list(logprob_positions(logprobs)) if logprobs is not None else []
    with_text = request.return_text_in_logprobs

    def triple(entry: LogprobEntry) -> list[Any]:
        return [entry.logprob, entry.token_id, entry.text if with_text else None]

    meta[f"{side}_token_logprobs"] = [triple(p.token) for p in positions]
    if request.top_logprobs:
        meta[f"{side}_top_logprobs"] = [[triple(e) for e in p.top] or None for p in positions]
    if request.logprob_token_ids:
        meta[f"{side}_token_ids_logprobs"] = [
            None
            if p.token.logprob is None
            else [[v, token, None] for v, token in zip(p.asked, request.logprob_token_ids, strict=False)]
            for p in positions
        ]


# ------------------------------------------------------------------ fields


def _check_keys(body: Mapping[str, Any]) -> None:
    for key, value in body.items():
        if key in _FIELDS or key in _IGNORED:
            continue
        if key in _NEUTRAL:
            if value is None or value is False or value == [] or value == -1:
                continue
            raise InvalidRequest(f"{key} is not supported by this server", param=key, code="unsupported_parameter")
        near = difflib.get_close_matches(str(key), _FIELDS, 1)
        if key in SamplingParams.__struct_fields__:
            hint = "; it belongs into sampling_params"
        else:
            hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequest(f"unknown parameter {key!r}{hint}", param=str(key), code="unknown_parameter")


def _prompts(body: Mapping[str, Any]) -> tuple[list[str | bytes], bool]:
    """The prompts (text, or packed ids) and whether they came as a batch."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidRequest("give exactly one of text and input_ids", param="text" if ids is None else "input_ids")
    if text is not None:
        if isinstance(text, list):
            _check_batch(text, "text")
            return [_text(t, f"text[{i}]") for i, t in enumerate(text)], True
        return [_text(text, "text")], False
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        _check_batch(ids, "input_ids")
        return [_ids(row, f"input_ids[{i}]") for i, row in enumerate(ids)], True
    return [_ids(ids, "input_ids")], False


def _check_batch(prompts: list[Any], name: str) -> None:
    if not prompts:
        raise InvalidRequest(f"{name} is an empty list", param=name)
    if len(prompts) > limits.MAX_BATCH:
        raise InvalidRequest(f"{name} has {len(prompts)} prompts, at most {limits.MAX_BATCH}", param=name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {type(value).__name__}", param=name)
    if not value:
        raise InvalidRequest(f"{name} is empty", param=name)
    return value


def _ids(value: Any, name: str) -> bytes:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a list of token ids, got {type(value).__name__}", param=name)
    if not value:
        raise InvalidRequest(f"{name} is empty", param=name)
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= _INT32_MAX:
            raise InvalidRequest(f"{name}[{i}] must be a token id, got {_shown(token)}", param=name)
    return pack_ids(value)


def _samplings(value: Any, count: int, is_batch: bool) -> tuple[list[SamplingParams], list[bool]]:
    """For each prompt: its parameters, and whether their length is a default (then it is clipped to what fits)."""
    if isinstance(value, list):
        if not is_batch or len(value) != count:
            raise InvalidRequest(
                f"sampling_params is a list of {len(value)} for {count} prompt{'s' * (count > 1)}"
                + ("" if is_batch else ", which is no batch"),
                param="sampling_params",
            )
        pairs = [_sampling(v, f"sampling_params[{i}]") for i, v in enumerate(value)]
    else:
        pairs = [_sampling(value, "sampling_params")] * count
    return [params for params, _ in pairs], [clip for _, clip in pairs]


def _sampling(value: Any, name: str) -> tuple[SamplingParams, bool]:
    if isinstance(value, SamplingParams):
        sampling.check(value, prefix=name + ".")
        return value, value.max_new_tokens == SamplingParams().max_new_tokens
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be an object, got {type(value).__name__}", param=name)
    return sampling.parse(value or {}, prefix=name + "."), not sampling.says_length(value)


def _rids(value: Any, choices: list[int], is_batch: bool) -> tuple[list[str], str]:
    """A request id for each prompt, and the group when one id was given for a batch ('' else)."""
    count = len(choices)
    if value is None:
        return [uuid.uuid4().hex for _ in choices], ""
    if isinstance(value, list):
        if not is_batch or len(value) != count:
            raise InvalidRequest(f"rid is a list of {len(value)} for {count} prompts", param="rid")
        rids, group = [_rid(v, f"rid[{i}]") for i, v in enumerate(value)], ""
    elif is_batch:
        group = _rid(value, "rid")
        rids = [f"{group}_{i}" for i in range(count)]
    else:
        rids, group = [_rid(value, "rid")], ""
    seen: set[str] = set()
    for rid, n in zip(rids, choices, strict=True):
        for name in (choice_rid(rid, c) for c in range(n)):
            if name in seen:
                raise DuplicateRequest(f"request id {name!r} is there twice", param="rid")
            seen.add(name)
    return rids, group


def _rid(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {type(value).__name__}", param="rid")
    if not 0 < len(value) <= limits.MAX_RID_CHARS:
        raise InvalidRequest(f"{name} must have 1 to {limits.MAX_RID_CHARS} characters, got {len(value)}", param="rid")
    return value


def _asked_ids(value: Any, count: int, is_batch: bool) -> list[tuple[int, ...]]:
    name = "token_ids_logprob"
    if isinstance(value, list) and is_batch and any(isinstance(v, list) for v in value):
        if len(value) != count:
            raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", param=name)
        return [_id_tuple(v, f"{name}[{i}]") for i, v in enumerate(value)]
    return [_id_tuple(value, name)] * count


def _id_tuple(value: Any, name: str) -> tuple[int, ...]:
    if value is None or value == []:
        return ()
    _ids(value, name)
    if len(value) > limits.MAX_LOGPROB_TOKEN_IDS:
        raise InvalidRequest(f"{name} has {len(value)} ids, at most {limits.MAX_LOGPROB_TOKEN_IDS}", param=name)
    return tuple(value)


class _Fields:
    """Reads fields that are one value for all prompts or, in a batch, a list with one for each."""

    def __init__(self, body: Mapping[str, Any], count: int, is_batch: bool) -> None:
        self._body, self._count, self._is_batch = body, count, is_batch

    def __call__(self, name: str, check: Callable[[Any, str], T], default: T) -> list[T]:
        value = self._body.get(name)
        if self._is_batch and isinstance(value, list):
            if len(value) != self._count:
                raise InvalidRequest(f"{name} has {len(value)} entries for {self._count} prompts", param=name)
            return [default if v is None else check(v, f"{name}[{i}]") for i, v in enumerate(value)]
        return [default if value is None else check(value, name)] * self._count


def _bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {_shown(value)}", param=name)
    return value


def _int(value: Any, name: str) -> int:
    if type(value) is not int or not -(2**31) <= value <= _INT32_MAX:
        raise InvalidRequest(f"{name} must be a 32-bit integer, got {_shown(value)}", param=name)
    return value


def _start(value: Any, name: str) -> int:
    if _int(value, name) < -1:
        raise InvalidRequest(f"{name} must be -1 (output only) or >= 0, got {value}", param=name)
    return int(value)


def _top(value: Any, name: str) -> int:
    if not 0 <= _int(value, name) <= limits.MAX_TOP_LOGPROBS_NATIVE:
        raise InvalidRequest(f"{name} must be in [0, {limits.MAX_TOP_LOGPROBS_NATIVE}], got {value}", param=name)
    return int(value)


def _salt(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {_shown(value)}", param=name)
    if len(value) > limits.MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(f"{name} has {len(value)} characters, at most {limits.MAX_CACHE_SALT_CHARS}", param=name)
    return value


def _namespace(salt: str, key: str) -> str:
    """Salt and extra key as one salt, so that no two pairs give the same."""
    return json.dumps([salt, key]) if key else salt


def _shown(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
