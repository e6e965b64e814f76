"""OpenAI bodies: parsing, what is ignored, what is refused, and the sampling parameters that come of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcast.protocols import limits
from radixcast.protocols.errors import InvalidRequest
from radixcast.protocols.openai import (
    ChatRequest,
    CompletionRequest,
    check_supported,
    parse_chat,
    parse_completion,
    prompts_of,
    sampling_of,
)
from radixcast.protocols.sampling import SamplingParams

HELLO = [{"role": "user", "content": "x"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"messages": HELLO, **fields})[0]


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"prompt": "x", **fields})[0]


def test_lengths() -> None:
    assert sampling_of(chat(), {}).max_new_tokens is None
    assert sampling_of(chat(max_tokens=5), {}).max_new_tokens == 5
    assert sampling_of(chat(max_tokens=5, max_completion_tokens=7), {}).max_new_tokens == 7
    assert sampling_of(chat(max_completion_tokens=0), {}).max_new_tokens == 0
    assert sampling_of(completion(), {}).max_new_tokens == 16
    assert sampling_of(completion(max_tokens=None), {}).max_new_tokens == 16
    assert sampling_of(completion(max_tokens=0), {}).max_new_tokens == 0


def test_nulls_are_defaults() -> None:
    names = [n for n in ChatRequest.__struct_fields__ if n != "messages"]
    request, ignored = parse_chat({"messages": HELLO} | dict.fromkeys(names))
    assert not ignored
    assert sampling_of(request, {}) == SamplingParams(max_new_tokens=None)


def test_model_defaults() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 3}
    params = sampling_of(chat(temperature=0.2), defaults)
    assert (params.temperature, params.top_p, params.max_new_tokens) == (0.2, 0.9, None)


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "integer"}}}, '{"type":"integer"}'),
    ],
)
def test_response_format(response_format: dict[str, Any], schema: str | None) -> None:
    assert sampling_of(chat(response_format=response_format), {}).json_schema == schema


def test_constraints() -> None:
    assert sampling_of(chat(regex="(yes|no)"), {}).regex == "(yes|no)"
    assert sampling_of(chat(regex="", ebnf=""), {}).constraint is None
    assert sampling_of(completion(json_schema={"type": "string"}), {}).json_schema == '{"type":"string"}'
    tag = {"type": "structural_tag", "structures": [], "triggers": []}
    assert sampling_of(chat(response_format=tag), {}).constraint == "structural_tag"
    assert sampling_of(chat(choices=["yes", "no"]), {}).choices == ("yes", "no")
    assert sampling_of(chat(choices=[], json_schema=""), {}).constraint is None
    assert sampling_of(completion(json_schema={}), {}).json_schema == "{}"
    assert sampling_of(completion(json_schema="$$ANY$$"), {}).json_schema == "{}"


def test_both_forms_of_a_structural_tag() -> None:
    older = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
    newer = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    for tag in (older, newer):
        assert json.loads(sampling_of(chat(response_format=tag), {}).structural_tag or "") == tag
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "structures"),
        ({"structures": []}, "triggers"),
        ({"format": "x"}, "structures"),
    ]
    for tag, param in bad:
        with pytest.raises(InvalidRequest) as error:
            sampling_of(chat(response_format={"type": "structural_tag", **tag}), {})
        assert error.value.info.param == f"response_format.{param}"


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a", "response_format": {"type": "json_object"}},
        {"json_schema": {"type": "string"}, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"json_schema": {}, "ebnf": 'root ::= "a"'},
        {"choices": ["a"], "regex": "a"},
    ],
)
def test_two_constraints_are_one_too_many(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="only one constraint"):
        sampling_of(chat(**fields), {})
    with pytest.raises(InvalidRequest, match="only one constraint"):
        sampling_of(completion(**fields), {})


def test_a_format_of_text_is_no_constraint() -> None:
    assert sampling_of(chat(regex="a", response_format={"type": "text"}), {}).constraint == "regex"


def test_a_schema_keeps_its_order_and_its_numbers() -> None:
    schema = {"properties": {"z": {"maximum": 10**30}, "a": {"multipleOf": 0.1}, "Ü": {}}, "type": "object"}
    text = sampling_of(chat(json_schema=schema), {}).json_schema
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert text == sampling_of(chat(response_format=wrapped), {}).json_schema
    assert text == '{"properties":{"z":{"maximum":1' + "0" * 30 + '},"a":{"multipleOf":0.1},"Ü":{}},"type":"object"}'


def test_whitespace_and_jump_forward_of_one_request() -> None:
    params = sampling_of(chat(json_schema={}, json_whitespace="compact", jump_forward=False), {})
    assert (params.json_whitespace, params.jump_forward) == ("compact", False)
    with pytest.raises(InvalidRequest) as error:
        sampling_of(chat(json_whitespace="none"), {})
    assert error.value.info.param == "json_whitespace"


def test_ignored_fields_are_listed_once_and_only_when_set() -> None:
    _, ignored = parse_chat({"messages": HELLO, "user": "u", "store": True, "x_hint": 1, "y": None, "prediction": {}})
    assert ignored == ["x_hint", "prediction"]


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": ""}])
def test_harmless_values_pass(fields: dict[str, Any]) -> None:
    check_supported(completion(**fields))
    check_supported(chat(tool_choice="auto", modalities=["text"]))


def test_limits() -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_chat({"messages": HELLO * (limits.MAX_MESSAGES + 1)})
    assert error.value.info.param == "messages"
    with pytest.raises(InvalidRequest):
        chat(logprobs=True, top_logprobs=limits.MAX_TOP_LOGPROBS + 1)
    with pytest.raises(InvalidRequest):
        chat(top_logprobs=1)


def test_namespaces_differ() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("b", "a")]
    assert len({chat(cache_salt=s, extra_key=k).namespace for s, k in pairs}) == len(pairs)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__) | st.text(max_size=8), json_values, max_size=5)


@given(fields)
def test_any_chat_body_is_parsed_or_refused_with_a_message(body: dict[str, Any]) -> None:
    refused: InvalidRequest | None = None
    try:
        request, _ = parse_chat({"messages": HELLO} | body)
        check_supported(request)
        msgspec.json.encode(sampling_of(request, {}))
    except InvalidRequest as error:
        refused = error
    assert refused is None or (refused.info.message and refused.info.status == 400)


@given(json_values)
def test_any_prompt_is_parsed_or_refused(prompt: Any) -> None:
    try:
        prompts = prompts_of(parse_completion({"prompt": prompt})[0].prompt)
    except InvalidRequest:
        return
    assert prompts
    assert len({type(p) for p in prompts}) == 1


def test_prompts() -> None:
    assert prompts_of("a") == ["a"]
    assert prompts_of(["a", "b"]) == ["a", "b"]
    assert prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of([[1], [2, 3]]) == [[1], [2, 3]]
