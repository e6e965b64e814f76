"""/generate, /tokenize, /detokenize, /abort_request and /flush_cache over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from fakes.fake_client import FakeEngine
from fakes.gateway_app import serving

GREEDY = {"temperature": 0, "max_new_tokens": 4}


async def test_generate() -> None:
    async with serving() as http:
        for method in ("POST", "PUT"):
            answer = await http.request(method, "/generate", json={"text": "Hello", "sampling_params": GREEDY, "rid": "r1"})
        reply = answer.json
        batch = await http.post("/generate", {"text": ["ab", "cd"], "sampling_params": {**GREEDY, "n": 2}})
        by_max_tokens = await http.post("/generate", {"text": "Hello", "sampling_params": {"max_tokens": 2, "temperature": 0}})
    assert reply["text"] == "olle"
    assert reply["output_ids"] == list(b"olle")
    assert reply["meta_info"]["id"] == "r1"
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert reply["meta_info"]["cached_tokens"] == 0
    assert [r["text"] for r in batch.json] == ["ba", "ba", "dc", "dc"]
    assert by_max_tokens.json["text"] == "ol"


async def test_generate_streams_cumulative_text() -> None:
    async with serving() as http:
        streamed = await http.post("/generate", {"text": "Hello", "sampling_params": {"temperature": 0}, "stream": True})
        batch = await http.post("/generate", {"text": ["ab", "cd"], "sampling_params": GREEDY, "stream": True})
    events = streamed.events
    assert [e["text"] for e in events] == ["oll", "olleH", "olleH"]
    assert events[-1]["output_ids"] == list(b"olleH")
    assert [e["meta_info"]["finish_reason"] for e in events] == [None, None, {"type": "stop", "matched": 0}]
    last = {e["index"]: e["text"] for e in batch.events}
    assert last == {0: "ba", 1: "dc"}


async def test_generate_refuses_what_it_does_not_know() -> None:
    async with serving() as http:
        key = await http.post("/generate", {"text": "x", "sampling_params": {"temprature": 1}})
        type_ = await http.post("/generate", {"text": "x", "sampling_params": {"top_p": "all"}})
        long = await http.post("/generate", {"text": "x" * 300})
        streamed = await http.post("/generate", {"text": "x" * 300, "stream": True})
        none = await http.post("/generate", {})
    assert (key.status, key.error["param"]) == (400, "sampling_params.temprature")
    assert (type_.status, type_.error["param"]) == (400, "sampling_params.top_p")
    assert long.error["code"] == streamed.error["code"] == "context_length_exceeded"
    assert none.status == 400


async def test_an_abort_ends_with_what_there_is() -> None:
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    async with serving(engine) as http:
        work = [
            asyncio.create_task(http.post("/generate", {"text": "Hello", "rid": "job", "stream": True})),
            asyncio.create_task(
                http.post("/v1/completions", {"prompt": ["Hello", "World"], "rid": "pair", "temperature": 0, "stream": True})
            ),
        ]
        await http.opened(3)
        await asyncio.sleep(0.05)
        for rid in ("job", "pair", "never-was"):
            assert (await http.post("/abort_request", {"rid": rid})).status == 200
        native, pair = [await w for w in work]
        assert native.events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert [c["finish_reason"] for e in pair.events for c in e["choices"] if c["finish_reason"]] == ["abort", "abort"]
        everything = await http.post("/abort_request", {"abort_all": True})
        wrong = await http.post("/abort_request", {"rid": 3})
        empty = await http.request("POST", "/abort_request")
    assert everything.status == empty.status == 200
    assert wrong.error["param"] == "rid"
    assert engine.aborts == [("job", False), ("pair", False), ("never-was", False), ("", True)]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_requests(stream: bool) -> None:
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    body = {"prompt": ["Hello", "World"], "n": 2, "temperature": 0, "stream": stream}
    async with serving(engine) as http:
        task = asyncio.create_task(http.post("/v1/completions", body))
        await http.opened(4)
        await asyncio.sleep(0.05)
        task.cancel()
        await http.opened(0)
        assert len(engine.cancelled) == 4
        assert (await http.get("/health")).status == 200
        assert http.gateway.running == 0


async def test_tokenize_and_back() -> None:
    async with serving() as http:
        one = await http.post("/tokenize", {"prompt": "Hi"})
        two = await http.post("/v1/tokenize", {"prompt": ["Hi", "a"]})
        chat = await http.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
        text = await http.post("/detokenize", {"tokens": [72, 105]})
        texts = await http.post("/v1/detokenize", {"tokens": [[72], [105], []]})
        bad = [
            await http.post("/tokenize", {}),
            await http.post("/tokenize", {"prompt": 3}),
            await http.post("/tokenize", {"prompt": []}),
            await http.post("/tokenize", {"messages": []}),
            await http.post("/detokenize", {"tokens": "x"}),
            await http.post("/detokenize", {"tokens": [1, [2]]}),
            await http.post("/detokenize", {"tokens": [-1]}),
        ]
    assert one.json == {"tokens": [72, 105], "count": 2, "max_model_len": 256}
    assert two.json["tokens"] == [[72, 105], [97]]
    assert two.json["count"] == [2, 1]
    assert chat.json["tokens"] == [72, 105]
    assert text.json == {"text": "Hi"}
    assert texts.json == {"text": ["H", "i", ""]}
    assert all(a.status == 400 and a.error for a in bad)


async def test_flush_cache() -> None:
    async with serving() as http:
        for method in ("GET", "POST"):
            assert (await http.request(method, "/flush_cache")).status == 200
        assert (await http.post("/flush_cache", {})).status == 200
        http.engine.flush_ok = False
        busy = await http.post("/flush_cache", {})
        waited = asyncio.create_task(http.get("/flush_cache?timeout=5"))
        await asyncio.sleep(0.05)
        http.engine.flush_ok = True
        assert (await waited).status == 200
        assert (await http.get("/flush_cache?timeout=x")).status == 400
    assert (busy.status, busy.error["code"]) == (400, "cache_in_use")
