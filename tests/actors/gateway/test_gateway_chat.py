"""/v1/chat/completions over HTTP, whole and streamed, in front of a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.fake_client import FakeEngine
from fakes.gateway_app import serving
from radixcast.protocols.errors import InternalError

HELLO = [{"role": "user", "content": "Hello"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, **fields}


async def test_whole_answer() -> None:
    async with serving() as http:
        http.engine.cached = 3
        answer = await http.post("/v1/chat/completions", body(max_tokens=3))
    assert answer.status == 200
    reply = answer.json
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "tiny"
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "oll"
    assert (choice["finish_reason"], choice["matched_stop"], choice["logprobs"]) == ("length", None, None)
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"forced_tokens": 0},
        "reasoning_tokens": 0,
    }
    assert reply["metadata"] == {"weight_version": "default"}
    assert http.engine.seen[0].sampling.max_new_tokens == 3
    assert not http.engine.cancelled


async def test_cached_tokens_are_there_when_nothing_was_cached() -> None:
    async with serving() as http:
        answer = await http.post("/v1/chat/completions", body())
    assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert http.engine.seen[0].sampling.max_new_tokens is None


async def test_stream_equals_whole() -> None:
    async with serving() as http:
        whole = await http.post("/v1/chat/completions", body(logprobs=True, top_logprobs=2))
        streamed = await http.post("/v1/chat/completions", body(logprobs=True, top_logprobs=2, stream=True))
    events = streamed.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {(e["id"], e["created"], e["model"], e["object"]) for e in events} == {
        (events[0]["id"], events[0]["created"], "tiny", "chat.completion.chunk")
    }
    deltas = [e["choices"][0] for e in events]
    assert "".join(d["delta"].get("content") or "" for d in deltas) == whole.json["choices"][0]["message"]["content"]
    entries = [e for d in deltas if d["logprobs"] for e in d["logprobs"]["content"]]
    assert entries == whole.json["choices"][0]["logprobs"]["content"]
    assert [d["finish_reason"] for d in deltas if d["finish_reason"]] == ["stop"]
    assert deltas[-1]["delta"] == {}
    assert deltas[-1]["matched_stop"] == 0
    assert all(e["usage"] is None for e in events)


async def test_logprobs_are_finite() -> None:
    async with serving() as http:
        answer = await http.post("/v1/chat/completions", body(logprobs=True, top_logprobs=3))
    entry = answer.json["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == "o"
    assert entry["bytes"] == [ord("o")]
    assert entry["logprob"] == -1.0
    assert [t["logprob"] for t in entry["top_logprobs"]] == [-1.0, -9999.0, -9999.0]


async def test_usage_chunk_and_continuous_usage() -> None:
    async with serving() as http:
        asked = await http.post("/v1/chat/completions", body(stream=True, stream_options={"include_usage": True}))
        empty = await http.post("/v1/chat/completions", body(stream=True, stream_options={}))
        always = await http.post("/v1/chat/completions", body(stream=True, stream_options={"continuous_usage_stats": True}))
    assert [e["usage"] is not None for e in asked.events].count(True) == 1
    assert asked.events[-1]["choices"] == []
    assert asked.events[-1]["usage"]["total_tokens"] == 10
    assert all(e["usage"] is None for e in empty.events)
    assert all(e["usage"]["completion_tokens"] >= 1 for e in always.events)
    assert always.events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_n_choices_count_the_prompt_once() -> None:
    async with serving() as http:
        whole = await http.post("/v1/chat/completions", body(n=3, temperature=1, seed=4, max_tokens=4))
        streamed = await http.post(
            "/v1/chat/completions",
            body(n=3, temperature=1, seed=4, max_tokens=4, stream=True, stream_options={"include_usage": True}),
        )
    choices = whole.json["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert len({c["message"]["content"] for c in choices}) == 3
    assert whole.json["usage"]["prompt_tokens"] == 5
    assert whole.json["usage"]["completion_tokens"] == 12
    texts = ["", "", ""]
    for event in streamed.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [c["message"]["content"] for c in choices]
    assert streamed.events[-1]["usage"] == whole.json["usage"]


async def test_a_refusal_before_the_first_byte_is_an_ordinary_error() -> None:
    async with serving() as http:
        answer = await http.post("/v1/chat/completions", body(stream=True, max_tokens=5000))
        several = await http.post("/v1/chat/completions", body(stream=True, max_tokens=5000, n=3))
    for a in (answer, several):
        assert a.status == 400
        assert a.headers["content-type"].startswith("application/json")
        assert a.error["code"] == "context_length_exceeded"
    assert not http.engine.open


async def test_an_error_in_mid_stream_is_the_last_event() -> None:
    engine = FakeEngine()
    engine.fail_after_first = InternalError("the runner died")
    async with serving(engine) as http:
        answer = await http.post("/v1/chat/completions", body(stream=True))
        whole = await http.post("/v1/chat/completions", body())
    assert answer.status == 200
    assert answer.events[-1]["error"]["message"] == "the runner died"
    assert whole.status == 500
    assert whole.error["type"] == "internal_error"


async def test_a_fault_of_ours_in_mid_stream_is_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as http:
        monkeypatch.setattr("radixcast.actors.gateway.work.Tally.usage", lambda self: 1 // 0)
        answer = await http.post("/v1/chat/completions", body(stream=True, stream_options={"include_usage": True}))
    assert answer.status == 200
    assert answer.events[-1]["error"]["type"] == "internal_error"
    assert not http.engine.open


async def test_what_the_engine_is_asked() -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with serving() as http:
        first = await http.post(
            "/v1/chat/completions",
            body(
                messages=messages,
                tools=tools,
                max_tokens=9,
                max_completion_tokens=4,
                temperature=None,
                top_k=7,
                min_p=0.1,
                stop="!",
                seed=5,
                logit_bias={"3": 1},
                chat_template_kwargs={"enable_thinking": False},
                rid="job-1",
                priority=2,
                cache_salt="s",
            ),
        )
        await http.post("/v1/chat/completions", body(tools=tools, tool_choice="none", continue_final_message=True))
        await http.post("/v1/chat/completions", body(messages=[], input_ids=[72, 105]))
    assert first.status == 200, first.body
    assert first.json["id"] == "job-1"
    asked, without_tools, ids = http.engine.seen
    assert asked.chat is not None
    assert asked.chat.messages[0]["role"] == "system"
    assert asked.chat.tools == tools
    assert asked.chat.template_kwargs == {"enable_thinking": False}
    sampling = asked.sampling
    assert (sampling.max_new_tokens, sampling.top_k, sampling.min_p, sampling.stop) == (4, 7, 0.1, ("!",))
    assert (sampling.seed, sampling.logit_bias, sampling.temperature) == (5, {3: 1.0}, 1.0)
    assert (asked.priority, asked.cache_salt) == (2, "s")
    assert without_tools.chat is not None
    assert without_tools.chat.tools is None
    assert without_tools.chat.continue_final_message
    assert not without_tools.chat.add_generation_prompt
    assert ids.chat is None
    assert ids.input_ids is not None


async def test_fields_of_vendors_are_accepted_and_reported() -> None:
    known = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}
    async with serving() as http:
        quiet = await http.post("/v1/chat/completions", body(**known, stream_options=None))
        told = await http.post("/v1/chat/completions", body(x_vendor_hint="blue", **{"evil\r\nheader": 1}, stream=True))
    assert quiet.status == 200
    assert "x-radixcast-ignored-fields" not in quiet.headers
    assert told.headers["x-radixcast-ignored-fields"] == "x_vendor_hint,evil??header"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"top_k": -9}, "top_k"),
        ({"min_p": 3}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 200000}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"logit_bias": {"apple": 1}}, "logit_bias"),
        ({"logit_bias": {"4": 1e6}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "whatever"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"lora_path": "x"}, "lora_path"),
        ({"rid": ""}, "rid"),
        ({"input_ids": [-1]}, "input_ids"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
            "messages[0].content",
        ),
    ],
)
async def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    async with serving() as http:
        answer = await http.post("/v1/chat/completions", body(**fields))
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert not http.engine.open


async def test_models() -> None:
    async with serving() as http:
        wrong = await http.post("/v1/chat/completions", body(model="no-such-model"))
        for name in ("tiny", "default", "/models/tiny", "", None):
            assert (await http.post("/v1/chat/completions", body(model=name))).status == 200
    assert wrong.status == 404
    assert wrong.error["code"] == "model_not_found"
    assert "tiny" in wrong.error["message"]
    async with serving(allow_any_model=True, served_model_name="mine") as http:
        answer = await http.post("/v1/chat/completions", body(model="no-such-model"))
    assert answer.json["model"] == "mine"


async def test_max_tokens_zero() -> None:
    async with serving() as http:
        answer = await http.post("/v1/chat/completions", body(max_tokens=0))
        streamed = await http.post("/v1/chat/completions", body(max_tokens=0, stream=True))
    assert answer.json["usage"]["completion_tokens"] == 0
    assert streamed.events[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_request_id_in_use_is_refused() -> None:
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    async with serving(engine) as http:
        first = asyncio.create_task(http.post("/v1/chat/completions", body(rid="a", stream=True)))
        await http.opened(1)
        second = await http.post("/v1/chat/completions", body(rid="a"))
        engine.hold.set()
        assert (await first).status == 200
    assert second.status == 400
    assert second.error["code"] == "duplicate_request_id"


async def test_model_defaults_fill_what_is_left_out() -> None:
    engine = FakeEngine()
    async with serving(engine, random_seed=77) as http:
        assert engine.welcome is not None
        engine.welcome.sampling_defaults.update({"temperature": 0.6, "top_p": 0.9, "unknown": 1})
        try:
            await http.post("/v1/chat/completions", {"messages": HELLO, "top_p": 0.5})
        finally:
            engine.welcome.sampling_defaults.clear()
    sampling = engine.seen[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.6, 0.5, 77)
