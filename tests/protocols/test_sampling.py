"""Client input becomes checked SamplingParams, or an error that names the field as the client spelled it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcast.protocols import limits
from radixcast.protocols.errors import InvalidRequest
from radixcast.protocols.sampling import SamplingParams, check_vocabulary, parse, says_length


def test_nothing_given_is_the_default() -> None:
    assert parse({}) == SamplingParams()
    assert parse({f: None for f in SamplingParams.__struct_fields__ if f != "max_new_tokens"}) == SamplingParams()


def test_null_max_new_tokens_means_to_the_end() -> None:
    assert parse({"max_new_tokens": None}).max_new_tokens is None
    assert parse({"max_new_tokens": 5, "max_tokens": None}).max_new_tokens == 5


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"max_tokens": 5}, "max_new_tokens", 5),
        ({"max_completion_tokens": 6}, "max_new_tokens", 6),
        ({"min_tokens": 2}, "min_new_tokens", 2),
        ({"sampling_seed": 9}, "seed", 9),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"stop_regex": "a|b"}, "stop_regex", ("a|b",)),
        ({"stop_token_ids": 7}, "stop_token_ids", (7,)),
        ({"stop_token_ids": [7, None]}, "stop_token_ids", (7,)),
        ({"logit_bias": {"5": 1}}, "logit_bias", {5: 1.0}),
        ({"temperature": 0}, "temperature", 0.0),
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type":"object"}'),
        ({"json_schema": "$$ANY$$"}, "json_schema", "{}"),
        ({"json_schema": True}, "json_schema", "true"),
        ({"structural_tag": {"format": {}}}, "structural_tag", '{"format":{}}'),
        ({"choices": ["b", "a"]}, "choices", ("b", "a")),
        ({"choices": "b"}, "choices", ("b",)),
        ({"json_whitespace": "compact"}, "json_whitespace", "compact"),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
    ],
)
def test_spellings(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(parse(given), field) == value


def test_same_thing_twice() -> None:
    assert parse({"max_tokens": 5, "max_new_tokens": 5}).max_new_tokens == 5
    with pytest.raises(InvalidRequest, match="same thing"):
        parse({"max_tokens": 5, "max_new_tokens": 6})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 2.5}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": limits.MAX_N + 1}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x" * (limits.MAX_STOP_CHARS + 1)]}, "stop"),
        ({"stop": ["x"] * (limits.MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop_regex": [""]}, "stop_regex"),
        ({"stop_regex": "x" * (limits.MAX_STOP_REGEX_CHARS + 1)}, "stop_regex"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(limits.MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": math.nan}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(limits.MAX_LOGIT_BIAS + 1)}}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ],
)
def test_wrong_values_name_the_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(given, prefix="p.")
    assert refused.value.info.param is not None
    assert refused.value.info.param.startswith("p." + param)
    assert len(str(refused.value)) < 400


def test_unknown_name_has_its_code() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse({"temprature": 1})
    assert refused.value.info.code == "unknown_parameter"


def test_vocabulary() -> None:
    check_vocabulary(parse({"logit_bias": {"4": 1}, "stop_token_ids": [0]}), 5)
    for bad in ({"logit_bias": {"5": 1}}, {"stop_token_ids": [5]}, {"stop_token_ids": [-1]}):
        with pytest.raises(InvalidRequest):
            check_vocabulary(parse(bad), 5)


def test_greedy() -> None:
    assert parse({"temperature": 0}).greedy
    assert parse({"top_k": 1}).greedy
    assert not parse({}).greedy


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*SamplingParams.__struct_fields__, "max_tokens", "x"]), values, max_size=4))
def test_any_json_gives_params_or_an_invalid_request(given: dict[str, Any]) -> None:
    try:
        params = parse(given)
    except InvalidRequest:
        return
    assert all(math.isfinite(v) for v in (params.temperature, params.top_p, params.min_p))


@pytest.mark.parametrize(
    ("given", "asks"),
    [(None, False), ({}, False), ({"min_tokens": 1}, False), ({"max_new_tokens": 128}, True), ({"max_tokens": None}, True)],
)
def test_whether_a_length_is_asked_for(given: dict[str, Any] | None, asks: bool) -> None:
    assert says_length(given) is asks
