"""The native shape: what it accepts, what it refuses and names, and how an output looks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcast.actors.collect import Output
from radixcast.actors.native import native_dict, parse_native
from radixcast.protocols import limits
from radixcast.protocols.buffers import pack_floats, pack_ids, unpack_ids
from radixcast.protocols.errors import DuplicateRequest, InvalidRequest, RequestAborted
from radixcast.protocols.public import Finish, Generate, Logprobs, Usage
from radixcast.protocols.sampling import SamplingParams


def one(body: dict[str, Any]) -> Generate:
    """The only request of a body."""
    (item,) = parse_native(body).requests
    return item.request


def test_single_text() -> None:
    parsed = parse_native({"text": "hi", "sampling_params": {"max_tokens": 5, "temperature": 0, "stop": None}})
    (item,) = parsed.requests
    assert (item.first, item.n, parsed.stream, parsed.is_list, parsed.outputs) == (0, 1, False, False, 1)
    request = item.request
    assert (request.text, request.input_ids, request.sampling.max_new_tokens) == ("hi", None, 5)
    assert request.rid
    assert request.group == request.rid


def test_ids_and_logprob_fields() -> None:
    request = one(
        {
            "input_ids": [1, 2, 3],
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "token_ids_logprob": [4, 5],
            "return_text_in_logprobs": True,
            "return_prompt_token_ids": True,
            "priority": -3,
            "stream": True,
        }
    )
    assert request.input_ids is not None
    assert unpack_ids(request.input_ids).tolist() == [1, 2, 3]
    assert (request.logprobs, request.logprob_start, request.top_logprobs) == (True, 0, 2)
    assert request.logprob_token_ids == (4, 5)
    assert (request.return_text_in_logprobs, request.return_prompt_ids, request.priority, request.stream) == (
        True,
        True,
        -3,
        True,
    )


def test_logprob_fields_mean_nothing_without_return_logprob() -> None:
    request = one({"text": "x", "logprob_start_len": 0, "top_logprobs_num": 5, "token_ids_logprob": [1]})
    assert (request.logprobs, request.logprob_start, request.top_logprobs, request.logprob_token_ids) == (False, -1, 0, ())


def test_batch_spreads_single_values_and_lists() -> None:
    parsed = parse_native(
        {
            "text": ["a", "b", "c"],
            "sampling_params": [{"n": 1}, {"n": 2}, {"temperature": 0.5}],
            "return_logprob": [True, False, None],
            "top_logprobs_num": 3,
            "token_ids_logprob": [[1], None, []],
            "cache_salt": ["s", "t", "u"],
            "rid": "job",
        }
    )
    assert parsed.is_list
    assert [(i.first, i.n) for i in parsed.requests] == [(0, 1), (1, 2), (3, 1)]
    requests = [i.request for i in parsed.requests]
    assert [r.rid for r in requests] == ["job_0", "job_1", "job_2"]
    assert {r.group for r in requests} == {"job"}
    assert [r.logprobs for r in requests] == [True, False, False]
    assert [r.top_logprobs for r in requests] == [3, 0, 0]
    assert [r.logprob_token_ids for r in requests] == [(1,), (), ()]
    assert [r.cache_salt for r in requests] == ["s", "t", "u"]
    assert [r.text for r in requests] == ["a", "b", "c"]


def test_batch_of_one_and_n_answer_lists() -> None:
    assert parse_native({"text": ["a"]}).is_list
    assert parse_native({"input_ids": [[1]]}).is_list
    several = parse_native({"text": "a", "sampling_params": {"n": 3}, "rid": "r"})
    assert (several.is_list, several.outputs, several.requests[0].request.rid) == (True, 3, "r")


def test_own_ids_of_a_batch() -> None:
    parsed = parse_native({"input_ids": [[1], [2]], "rid": ["x", "y"]})
    assert [(i.request.rid, i.request.group) for i in parsed.requests] == [("x", "x"), ("y", "y")]


def test_salt_and_extra_key_do_not_collide() -> None:
    salts = {one({"text": "x", "cache_salt": s, "extra_key": k}).cache_salt for s, k in (("ab", "c"), ("a", "bc"), ("abc", ""))}
    assert len(salts) == 3


def test_what_asks_for_nothing_is_accepted() -> None:
    body = {"text": "x", "lora_path": None, "return_hidden_states": False, "routed_experts_start_len": -1}
    assert one({**body, "log_metrics": True, "image_data": [], "session_params": None}).text == "x"


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": "x", "input_ids": [1]}, "input_ids"),
    ({"text": ""}, "text"),
    ({"text": 5}, "text"),
    ({"text": ["a", ""]}, "text[1]"),
    ({"text": []}, "text"),
    ({"text": ["a"] * (limits.MAX_BATCH + 1)}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": "1"}, "input_ids"),
    ({"input_ids": [1, True]}, "input_ids"),
    ({"input_ids": [1.0]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [2**31]}, "input_ids"),
    ({"input_ids": [10**30]}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids[1]"),
    ({"input_ids": [[1], 2]}, "input_ids[1]"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"text": "x", "sampling_params": []}, "sampling_params"),
    ({"text": "x", "sampling_params": 3}, "sampling_params"),
    ({"text": "x", "sampling_params": {"temperature": math.nan}}, "sampling_params.temperature"),
    ({"text": "x", "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    ({"text": "x", "sampling_params": {"max_tokens": 1.5}}, "sampling_params.max_tokens"),
    ({"text": "x", "sampling_params": {"max_tokens": True}}, "sampling_params.max_tokens"),
    ({"text": "x", "sampling_params": {"n": 10**6}}, "sampling_params.n"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 0}]}, "sampling_params[1].top_p"),
    ({"text": ["a"] * limits.MAX_BATCH, "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"text": "x", "stream": 1}, "stream"),
    ({"text": "x", "stream": "true"}, "stream"),
    ({"text": "x", "rid": 5}, "rid"),
    ({"text": "x", "rid": ""}, "rid"),
    ({"text": "x", "rid": "r" * 300}, "rid"),
    ({"text": "x", "rid": ["r"]}, "rid"),
    ({"text": ["x", "y"], "rid": ["r"]}, "rid"),
    ({"text": "x", "return_logprob": 1}, "return_logprob"),
    ({"text": "x", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "x", "logprob_start_len": True}, "logprob_start_len"),
    ({"text": "x", "top_logprobs_num": 10**4}, "top_logprobs_num"),
    ({"text": "x", "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "x", "top_logprobs_num": [1]}, "top_logprobs_num"),
    ({"text": ["x", "y"], "top_logprobs_num": [1]}, "top_logprobs_num"),
    ({"text": "x", "token_ids_logprob": [1.5]}, "token_ids_logprob"),
    ({"text": "x", "token_ids_logprob": list(range(limits.MAX_LOGPROB_TOKEN_IDS + 1))}, "token_ids_logprob"),
    ({"text": ["x", "y"], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
    ({"text": "x", "priority": 1.0}, "priority"),
    ({"text": "x", "priority": 2**40}, "priority"),
    ({"text": "x", "cache_salt": 5}, "cache_salt"),
    ({"text": "x", "cache_salt": "s" * 600}, "cache_salt"),
    ({"text": "x", "image_data": "http://x"}, "image_data"),
    ({"text": "x", "txet": "y"}, "txet"),
    ({"text": "x", "temperature": 0}, "temperature"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{p}" for i, (_, p) in enumerate(BAD)])
def test_bad_bodies_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_native(body)
    assert refused.value.info.param == param
    assert refused.value.info.status == 400


def test_unknown_keys_hint() -> None:
    with pytest.raises(InvalidRequest, match="belongs into sampling_params") as refused:
        parse_native({"text": "x", "top_p": 1})
    assert refused.value.info.code == "unknown_parameter"
    with pytest.raises(InvalidRequest, match="did you mean 'input_ids'"):
        parse_native({"input_id": [1]})


@pytest.mark.parametrize(
    "body",
    [
        {"text": ["a", "b"], "rid": ["r", "r"]},
        {"text": ["a", "b"], "rid": ["r", "r_1"], "sampling_params": {"n": 2}},
    ],
)
def test_ids_twice_in_a_body(body: dict[str, Any]) -> None:
    with pytest.raises(DuplicateRequest):
        parse_native(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["text", "input_ids", "sampling_params", "stream", "rid", "return_logprob", "token_ids_logprob", "priority", "x"]


@given(st.dictionaries(st.sampled_from(KEYS), json_values, max_size=5))
def test_any_json_is_parsed_or_refused(body: dict[str, Any]) -> None:
    try:
        parsed = parse_native(body)
    except InvalidRequest:
        return
    assert parsed.requests


# ------------------------------------------------------------------ answers

USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, retractions=4)


def test_answer() -> None:
    output = Output(rid="r", text="ab", token_ids=[7, 8], usage=USAGE, finish=Finish(reason="stop", matched="b"))
    answer = native_dict(output, Generate(rid="r"), weight_version="v2", e2e_latency=0.5)
    assert answer == {
        "text": "ab",
        "output_ids": [7, 8],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": "b"},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "forced_tokens": 0,
            "num_retractions": 4,
            "weight_version": "v2",
            "e2e_latency": 0.5,
        },
    }


@pytest.mark.parametrize(
    ("finish", "shown"),
    [
        (None, None),
        (Finish(reason="length"), {"type": "length", "length": 2}),
        (Finish(reason="stop", matched=5), {"type": "stop", "matched": 5}),
        (
            Finish(reason="abort", error=RequestAborted("gone").info),
            {"type": "abort", "message": "gone", "status_code": 499, "err_type": "aborted"},
        ),
        (Finish(reason="abort"), {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}),
    ],
)
def test_finish_reasons(finish: Finish | None, shown: Any) -> None:
    output = Output(rid="r", usage=USAGE, finish=finish)
    assert native_dict(output, Generate(rid="r"))["meta_info"]["finish_reason"] == shown


def test_logprobs_in_an_answer() -> None:
    request = Generate(
        rid="r", logprobs=True, logprob_start=0, top_logprobs=1, logprob_token_ids=(4, 5), return_prompt_ids=True
    )
    prompt = Logprobs(
        values=pack_floats([math.nan, -1.0]),
        ids=pack_ids([1, 2]),
        top_n=1,
        top_values=pack_floats([math.nan, -0.5]),
        top_ids=pack_ids([0, 9]),
        asked_values=pack_floats([math.nan, math.nan, -2.0, -3.0]),
    )
    out = Logprobs(
        values=pack_floats([-0.25]),
        ids=pack_ids([7]),
        top_n=1,
        top_values=pack_floats([-0.25]),
        top_ids=pack_ids([7]),
        asked_values=pack_floats([-4.0, -5.0]),
        token_texts=["a"],
        top_texts=["a"],
    )
    output = Output(rid="r", logprobs=out, prompt_logprobs=prompt, prompt_ids=[1, 2])
    meta = native_dict(output, request)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 1, None], [-1.0, 2, None]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 9, None]]]
    assert meta["input_token_ids_logprobs"] == [None, [[-2.0, 4, None], [-3.0, 5, None]]]
    assert meta["output_token_logprobs"] == [[-0.25, 7, None]]
    assert meta["output_top_logprobs"] == [[[-0.25, 7, None]]]
    assert meta["output_token_ids_logprobs"] == [[[-4.0, 4, None], [-5.0, 5, None]]]
    assert meta["output_token_logprobs_length"] == 1
    assert meta["prompt_token_ids"] == [1, 2]
    json.dumps(meta, allow_nan=False)
    with_text = Generate(rid="r", logprobs=True, return_text_in_logprobs=True)
    assert native_dict(output, with_text)["meta_info"]["output_token_logprobs"] == [[-0.25, 7, "a"]]


def test_logprobs_asked_but_not_there_yet() -> None:
    meta = native_dict(Output(rid="r"), Generate(rid="r", logprobs=True))["meta_info"]
    assert meta["output_token_logprobs"] == meta["input_token_logprobs"] == []


@pytest.mark.parametrize(
    ("params", "clips"),
    [
        (None, [True, True]),
        ({"temperature": 0}, [True, True]),
        ({"max_new_tokens": 128}, [False, False]),
        ([{"max_tokens": 4}, {}], [False, True]),
        (SamplingParams(), [True, True]),
        (SamplingParams(max_new_tokens=5), [False, False]),
    ],
)
def test_a_length_that_nobody_asked_for_may_be_clipped(params: Any, clips: list[bool]) -> None:
    native = parse_native({"text": ["a", "b"], "sampling_params": params})
    assert [item.request.clip for item in native.requests] == clips
