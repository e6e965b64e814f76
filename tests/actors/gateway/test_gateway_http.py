"""The HTTP shell: bodies, methods, paths, ids, limits, broken HTTP; every error in the one shape."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from fakes.fake_client import FakeEngine
from fakes.gateway_app import serving
from radixcast.actors.gateway.auth import Level
from radixcast.actors.gateway.body import decode_object
from radixcast.actors.gateway.errors import for_openai
from radixcast.actors.gateway.http import Route, Table
from radixcast.actors.gateway.info import root
from radixcast.protocols import limits
from radixcast.protocols.errors import ErrorInfo, InvalidRequest, Overloaded

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("data", "headers", "status"),
    [
        (b"", JSON, 400),
        (b"not json", JSON, 400),
        (b"[1]", JSON, 400),
        (b'"text"', JSON, 400),
        (b"null", JSON, 400),
        (b'{"prompt":"\xff\xfe"}', JSON, 400),
        (b'{"prompt":"\\ud800"}', JSON, 400),
        (b'{"prompt":"x","temperature":NaN}', JSON, 400),
        (b'{"prompt":"x","temperature":Infinity}', JSON, 400),
        (b'{"prompt":"x","temperature":1e999}', JSON, 400),
        (b"[" * 200_000, JSON, 400),
        (b'{"prompt":"x"}', {"Content-Type": "text/plain"}, 415),
        (b'{"prompt":"x"}', {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b'{"prompt":"x"}', {"Content-Type": "application/json; charset=utf-16"}, 415),
        (b'{"prompt":"x"}', {"Content-Type": ""}, 400),
        (gzip.compress(b'{"prompt":"x"}'), JSON | {"Content-Encoding": "gzip"}, 415),
        (b'{"prompt":"x"}', {"Content-Type": "application/json; charset=utf-8"}, 200),
        (b'{"prompt":"x"}', {"Content-Type": "application/vnd.api+json"}, 200),
    ],
)
async def test_bodies(data: bytes, headers: dict[str, str], status: int) -> None:
    async with serving() as http:
        answer = await http.request("POST", "/v1/completions", data=data, headers=headers)
        assert answer.status == status
        if status != 200:
            assert answer.error["type"] == "invalid_request_error"
        assert (await http.get("/health")).status == 200


def test_nan_names_its_field() -> None:
    with pytest.raises(InvalidRequest, match=r"NaN .*temperature"):
        decode_object(b'{"model":"m","temperature":NaN}')


async def test_a_body_over_the_limit() -> None:
    async with serving() as http:
        known = await http.request("POST", "/generate", data=b"x" * (limits.MAX_BODY_BYTES + 1), headers=JSON)

        async def chunks() -> Any:
            for _ in range(limits.MAX_BODY_BYTES // (1 << 20) + 2):
                yield b"x" * (1 << 20)

        unknown = await http.request("POST", "/generate", data=chunks(), headers=JSON)
    assert known.status == unknown.status == 413
    assert known.error["code"] == unknown.error["code"] == "payload_too_large"


async def test_unknown_routes_and_methods() -> None:
    async with serving() as http:
        for path in ("/nope", "/v1", "/v1/", "/v1/models/", "/health/", "//health", "/v1/chat/completions/x"):
            answer = await http.get(path)
            assert answer.status == 404, path
            assert answer.error["type"] == "not_found_error"
        wrong = await http.get("/generate")
        assert wrong.status == 405
        assert wrong.headers["allow"] == "POST, PUT"
        assert wrong.error["code"] == "method_not_allowed"
        assert (await http.request("DELETE", "/v1/models")).status == 405
        assert (await http.request("OPTIONS", "/v1/models")).status == 405
        head = await http.request("HEAD", "/health")
        assert (head.status, head.body) == (200, b"")


async def test_request_ids() -> None:
    async with serving() as http:
        kept = await http.get("/health", headers={"X-Request-Id": "abc-1.2:3_X"})
        made = await http.get("/health")
        for bad in ("a b", "x" * 129, "<script>"):
            assert (await http.get("/health", headers={"X-Request-Id": bad})).headers["x-request-id"] != bad
        error = await http.get("/nope", headers={"X-Request-Id": "e1"})
        stream = await http.post("/v1/completions", {"prompt": "x", "stream": True}, headers={"X-Request-Id": "s1"})
    assert kept.headers["x-request-id"] == "abc-1.2:3_X"
    assert len(made.headers["x-request-id"]) == 32
    assert error.headers["x-request-id"] == "e1"
    assert stream.headers["x-request-id"] == "s1"


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"h" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"p" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: nine\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_no_http(data: bytes) -> None:
    async with serving() as http:
        answer = await http.raw(data)
        assert (await http.get("/health")).status == 200
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] in (b"400", b"431")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_pipelined_and_kept_alive() -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving() as http:
        answer = await http.raw(one + one + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200") == 3


async def test_overload_says_when_to_retry() -> None:
    engine = FakeEngine()
    engine.fail_after_first = Overloaded("the queue is full", retry_after=0.2)
    async with serving(engine) as http:
        answer = await http.post("/v1/completions", {"prompt": "x"})
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.error["type"] == "overloaded_error"


async def test_too_many_connections() -> None:
    async with serving(max_connections=1) as http:
        _, idle = await asyncio.open_connection("127.0.0.1", http.port)
        await asyncio.sleep(0.05)
        answer = await http.post("/v1/completions", {"prompt": "x"})
        alive = await http.get("/health")
        idle.close()
    assert answer.status == 503
    assert answer.error["code"] == "too_many_connections"
    assert answer.headers["retry-after"] == "1"
    assert alive.status == 200


async def test_draining_refuses_new_work_and_finishes_the_old() -> None:
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    async with serving(engine) as http:
        running = asyncio.create_task(http.post("/v1/completions", {"prompt": "Hello", "temperature": 0, "stream": True}))
        await http.opened(1)
        http.gateway.start_draining()
        drained = asyncio.create_task(http.gateway.drained())
        refused = await http.post("/generate", {"text": "x"})
        ready, alive = await http.get("/ready"), await http.get("/health")
        assert not drained.done()
        engine.hold.set()
        answer = await running
        await asyncio.wait_for(drained, 5)
    assert refused.status == 503
    assert "retry-after" in refused.headers
    assert (ready.status, alive.status) == (503, 200)
    assert "".join(c["text"] for e in answer.events for c in e["choices"]) == "olleH"


async def test_before_the_engine_is_there() -> None:
    engine = FakeEngine()
    engine.welcome = None
    engine.connected = False
    async with serving(engine, state="starting") as http:
        for path, body in (("/generate", {"text": "x"}), ("/tokenize", {"prompt": "x"}), ("/flush_cache", {})):
            answer = await http.post(path, body)
            assert answer.status == 503
            assert "retry-after" in answer.headers
        assert (await http.get("/v1/models")).json["data"][0]["max_model_len"] == 256
        assert (await http.get("/metrics")).status == 200


async def test_a_fault_of_ours_is_a_500_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeEngine):
        async def tokenize(self, texts: Any, *, add_special_tokens: bool = True) -> Any:
            raise ZeroDivisionError("secret detail")

    async with serving(Broken()) as http:
        answer = await http.post("/tokenize", {"prompt": "x"})
        assert (await http.get("/health")).status == 200
    assert answer.status == 500
    assert answer.error["type"] == "internal_error"
    assert b"secret" not in answer.body


def test_the_table_refuses_two_handlers_for_one_route() -> None:
    route = Route(("GET",), "/x", Level.OPEN, root)
    with pytest.raises(ValueError, match="two routes"):
        Table([route, route])


def test_openai_bodies_are_told_their_own_field_names() -> None:
    for ours, theirs in (
        ("text", "prompt"),
        ("sampling_params.max_new_tokens", "max_tokens"),
        ("sampling_params.top_p", "top_p"),
        ("messages[0].role", "messages[0].role"),
    ):
        assert for_openai(ErrorInfo("wrong", param=ours)).param == theirs
    assert for_openai(ErrorInfo("wrong")).param is None
