"""/v1/completions over HTTP: batches, echo, legacy logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.gateway_app import serving


def body(prompt: Any = "Red", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, **fields}


async def test_whole_answer_and_default_length() -> None:
    async with serving() as http:
        answer = await http.post("/v1/completions", body("abcdefghijklmnopqrstuvwxyz"))
    reply = answer.json
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [
        {"index": 0, "text": "zyxwvutsrqponmlk", "logprobs": None, "finish_reason": "length", "matched_stop": None}
    ]
    assert reply["usage"]["completion_tokens"] == 16


async def test_batches_are_prompt_major() -> None:
    prompts = ["Red", "Green sea", "Blue"]
    async with serving() as http:
        whole = await http.post("/v1/completions", body(prompts, n=2, temperature=1, seed=1, max_tokens=6))
        streamed = await http.post("/v1/completions", body(prompts, n=2, temperature=1, seed=1, max_tokens=6, stream=True))
    choices = whole.json["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3, 4, 5]
    assert [c["text"][1:3] for c in choices] == ["de", "de", "ae", "ae", "eu", "eu"]
    assert whole.json["usage"]["prompt_tokens"] == sum(map(len, prompts))
    texts = [""] * 6
    for event in streamed.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in choices]
    rids = [r.rid for r in http.engine.seen[:6]]
    assert len(set(rids)) == 6
    assert len({r.group for r in http.engine.seen[:6]}) == 1


async def test_prompts_as_ids() -> None:
    async with serving() as http:
        one = await http.post("/v1/completions", body([72, 105]))
        two = await http.post("/v1/completions", body([[72, 105], [72]], echo=True))
    assert [c["text"] for c in one.json["choices"]] == ["iH"]
    assert [c["text"] for c in two.json["choices"]] == ["HiiH", "HH"]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_and_no_output(stream: bool) -> None:
    async with serving() as http:
        answer = await http.post("/v1/completions", body("Two.", max_tokens=0, echo=True, logprobs=1, stream=stream))
    choice = answer.events[0]["choices"][0] if stream else answer.json["choices"][0]
    assert choice["text"] == "Two."
    assert choice["logprobs"]["tokens"] == ["T", "w", "o", "."]
    assert choice["logprobs"]["token_logprobs"] == [None, -1, -1, -1]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["top_logprobs"] == [None, {"w": -1}, {"o": -1}, {".": -1}]


async def test_echo_with_logprobs_joins_prompt_and_output() -> None:
    fields = {"max_tokens": 2, "echo": True, "logprobs": 2}
    async with serving() as http:
        whole = await http.post("/v1/completions", body("abc", **fields))
        streamed = await http.post("/v1/completions", body("abc", stream=True, **fields))
    choice = whole.json["choices"][0]
    assert choice["text"] == "abccb"
    assert choice["logprobs"]["tokens"] == list("abccb")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["token_logprobs"] == [None, -1, -1, -1, -1]
    pieces = [e["choices"][0] for e in streamed.events]
    assert "".join(p["text"] for p in pieces) == "abccb"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for p in pieces for x in p["logprobs"][name]] == choice["logprobs"][name]


async def test_logprobs_zero_has_no_candidates() -> None:
    async with serving() as http:
        answer = await http.post("/v1/completions", body("abc", logprobs=0))
    assert answer.json["choices"][0]["logprobs"]["top_logprobs"] is None
    assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == 3


async def test_stop_string() -> None:
    async with serving() as http:
        whole = await http.post("/v1/completions", body("abcdef", stop=["cb"]))
        streamed = await http.post(
            "/v1/completions", body("abcdef", stop=["cb"], stream=True, stream_options={"include_usage": True})
        )
    choice = whole.json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("fed", "stop", "cb")
    assert "".join(c["text"] for e in streamed.events for c in e["choices"]) == "fed"
    assert streamed.events[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [-5]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["x"] * 2049}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"prompt": ["x", "y"], "rid": ["a", "a"]}, "rid"),
    ],
)
async def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    async with serving() as http:
        answer = await http.post("/v1/completions", body(**fields))
    assert answer.status == 400
    assert answer.error["param"] == param
    assert not http.engine.open
