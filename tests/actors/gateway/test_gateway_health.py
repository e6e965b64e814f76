"""/health, /ready, /health_generate, the information routes and /metrics."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.fake_client import FakeEngine
from fakes.gateway_app import SPEC, Answer, node_state, serving
from radixcast.actors.gateway import health
from radixcast.actors.gateway.service import Gateway
from radixcast.protocols.server_args import ServerArgs


def samples(answer: Answer) -> dict[str, float]:
    """Sample name -> sum over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


async def test_health_follows_the_supervisor() -> None:
    async with serving(state=None) as http:
        for path in ("/health", "/healthz", "/ready", "/readyz"):
            assert (await http.get(path)).status == 503
        assert (await http.get("/livez")).status == 200
        for state, is_healthy, is_ready in (
            (node_state("starting"), False, False),
            (node_state("ready"), True, True),
            (node_state("ready", age=30.0), False, False),
            (node_state("ready", actor="dead"), False, False),
            (node_state("ready", actor="starting"), True, True),
            (node_state("draining"), True, False),
            (node_state("stopping"), False, False),
        ):
            http.gateway.note_state(state)
            assert ((await http.get("/health")).status == 200) == is_healthy, state
            answer = await http.get("/ready")
            assert (answer.status == 200) == is_ready, state
            if not is_ready:
                assert answer.error["message"]
        http.gateway.note_state(node_state("ready"))
        http.engine.connected = False
        assert (await http.get("/ready")).status == 503
        assert not http.engine.seen


async def test_health_notices_a_silent_supervisor() -> None:
    now = 100.0
    gateway = Gateway(ServerArgs(), SPEC, FakeEngine(), clock=lambda: now)
    gateway.note_state(node_state())
    assert gateway.unhealthy() is None
    now = 109.0
    assert gateway.unhealthy() is None
    now = 111.0
    assert "supervisor" in (gateway.unhealthy() or "")


async def test_health_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    async with serving(engine) as http:
        good = await http.get("/health_generate")
        assert good.status == 200
        assert engine.seen[0].sampling.max_new_tokens == 1
        assert not engine.open
        monkeypatch.setattr(health, "PROBE_TIMEOUT", 0.1)
        engine.hold = asyncio.Event()
        stuck = await http.get("/health_generate")
        assert stuck.status == 503
        assert not engine.open
        probe = asyncio.create_task(http.get("/health_generate"))
        await http.opened(1)
        engine.numbers = msgspec.structs.replace(engine.numbers, steps=9)
        assert (await probe).status == 200, "a busy engine that makes progress is healthy"


async def test_information_routes() -> None:
    async with serving() as http:
        root, models, model = await http.get("/"), await http.get("/v1/models"), await http.get("/v1/models/tiny")
        missing = await http.get("/v1/models/none-such")
        info, server = await http.get("/model_info"), await http.get("/get_server_info")
    assert b"running" in root.body
    card = models.json["data"][0]
    assert models.json["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert model.json == card
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert info.json["model_path"] == "/models/tiny"
    assert info.json["is_generation"] is True
    assert info.json["architectures"] == ["LlamaForCausalLM"]
    assert server.json["max_total_num_tokens"] == 1000
    assert server.json["schedule_policy"] == "fcfs"
    assert server.json["internal_states"][0]["memory_usage"]["token_capacity"] == 1000
    assert server.json["status"] == "ready"


async def test_model_names_with_slashes() -> None:
    async with serving(served_model_name="org/model-1") as http:
        assert (await http.get("/v1/models/org/model-1")).json["id"] == "org/model-1"
        assert (await http.get("/v1/models/org%2Fmodel-1")).json["id"] == "org/model-1"


async def test_metrics() -> None:
    async with serving() as http:
        before = samples(await http.get("/metrics"))
        await http.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "heliotrope"}], "user": "heliotrope"})
        await http.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcdef"}], "stream": True})
        await http.post("/v1/chat/completions", {"model": "nope-model", "messages": [{"role": "user", "content": "x"}]})
        await http.get("/heliotrope")
        await http.request("HELIOTROPE", "/health")
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"heliotrope" not in answer.body.lower()
    assert b"nope-model" not in answer.body
    assert b'endpoint="unmatched"' in answer.body
    assert b'sglang:num_running_reqs{model_name="tiny"}' in answer.body
    after = samples(answer)
    assert after["sglang:generation_tokens_total"] == 7
    assert after["sglang:token_usage"] == 0.01
    assert after["sglang:e2e_request_latency_seconds_count"] == 2
    assert after["sglang:time_to_first_token_seconds_count"] == 1
    assert after["sglang:inter_token_latency_seconds_count"] > 0
    assert after["sglang:http_requests_total"] == before["sglang:http_requests_total"] + 5
    assert after["sglang:http_requests_active"] == 1
    assert b'status_code="404"' in answer.body
    for name in (
        "num_queue_reqs",
        "num_used_tokens",
        "cache_hit_rate",
        "gen_throughput",
        "max_total_num_tokens",
        "num_retracted_reqs",
    ):
        assert f"sglang:{name}" in after
    for name in ("prompt_tokens", "cached_tokens", "num_requests", "num_aborted_requests", "evicted_tokens"):
        assert f"sglang:{name}_total" in after


async def test_metrics_show_the_last_numbers_when_the_engine_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixcast.actors.gateway.service.STATS_TIMEOUT", 0.05)
    async with serving() as http:
        await http.get("/metrics")

        async def silent() -> None:
            await asyncio.sleep(60)

        monkeypatch.setattr(http.engine, "stats", silent)
        assert samples(await http.get("/metrics"))["sglang:generation_tokens_total"] == 7
