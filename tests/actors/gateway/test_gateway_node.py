"""HTTP through a whole node in one loop: every real actor, around a runner that costs nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from fakes.byte_tokenizer import CHATML, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from fakes.dialling import eventually
from fakes.gateway_app import SPEC, HttpClient
from radixcast.actors.detokenizer.actor import DetokenizerActor
from radixcast.actors.gateway.actor import GatewayActor
from radixcast.actors.local import LocalNode, local_setup
from radixcast.actors.model_runner.actor import ModelRunnerActor
from radixcast.actors.scheduler.actor import SchedulerActor
from radixcast.actors.setup import GATEWAY
from radixcast.actors.tokenizer.actor import TokenizerActor
from radixcast.protocols.server_args import ServerArgs

ACTORS = [TokenizerActor, SchedulerActor, ModelRunnerActor, DetokenizerActor, GatewayActor]
CONTEXT = 4096


@pytest_asyncio.fixture
async def http(tmp_path: Path) -> AsyncIterator[HttpClient]:
    model = msgspec.structs.replace(
        SPEC,
        config=msgspec.structs.replace(SPEC.config, vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT),
        weight_format="free",
        tokenizer_file=str(write_byte_tokenizer(tmp_path)),
        chat_template=CHATML,
        eos_token_ids=(EOS_ID,),
        context_length=CONTEXT,
    )
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        setup = local_setup(ServerArgs(max_total_tokens=20_000), model)
        async with LocalNode(setup, ACTORS, listen_fd=sock.fileno()) as node, HttpClient(sock.getsockname()[1]) as client:
            client.node = node
            await client.until_ready()
            yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "The harbour was quiet and", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}


async def metric(http: HttpClient, name: str) -> float:
    lines = (await http.get("/metrics")).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"sglang:{name} ", f"sglang:{name}{{")))


async def runs(http: HttpClient, wanted: bool) -> bool:
    return bool(await metric(http, "num_running_reqs")) == wanted


@pytest.mark.parametrize("temperature", [0, 1])
async def test_streams_equal_plain_answers_on_every_route(http: HttpClient, temperature: float) -> None:
    fields = body(temperature=temperature, seed=7)
    chat = {**fields, "messages": [{"role": "user", "content": "x"}]}
    del chat["prompt"]
    native = {"text": fields["prompt"], "sampling_params": {k: v for k, v in fields.items() if k != "prompt"}}
    whole = (await http.post("/v1/completions", fields)).json["choices"][0]
    events = (await http.post("/v1/completions", {**fields, "stream": True})).events
    assert "".join(e["choices"][0]["text"] for e in events) == whole["text"]
    chat_whole = (await http.post("/v1/chat/completions", chat)).json["choices"][0]["message"]["content"]
    chat_events = (await http.post("/v1/chat/completions", {**chat, "stream": True})).events
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in chat_events) == chat_whole
    native_whole = (await http.post("/generate", native)).json
    native_events = (await http.post("/generate", {**native, "stream": True})).events
    assert native_events[-1]["text"] == native_whole["text"] == whole["text"]
    assert native_events[-1]["output_ids"] == native_whole["output_ids"]
    assert native_whole["meta_info"]["completion_tokens"] == 24


async def test_n_choices_and_cached_prefix(http: HttpClient) -> None:
    answer = (await http.post("/v1/completions", body(prompt=["Red", "Green sea"], n=2, temperature=1, seed=1))).json
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert len({c["text"] for c in answer["choices"]}) == 4
    assert answer["usage"]["prompt_tokens"] == len("RedGreen sea")
    again = (await http.post("/v1/completions", body(prompt=["Red", "Green sea"], n=2, temperature=1, seed=1))).json
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len("ReGreen se")
    assert (await http.post("/flush_cache", {})).status == 200
    flushed = (await http.post("/v1/completions", body(prompt="Green sea"))).json
    assert flushed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_refusals_of_the_tokenizer_come_before_the_first_byte(http: HttpClient) -> None:
    for fields in ({"max_tokens": CONTEXT}, {"logit_bias": {"9999": 1}}, {"prompt": ""}, {"prompt": [99999]}, {"regex": "(ab"}):
        for stream in (False, True):
            answer = await http.post("/v1/completions", body(stream=stream, **fields))
            assert answer.status == 400, fields
            assert not (answer.error["param"] or "").startswith("sampling_params")


async def test_echo_scores_the_prompt(http: HttpClient) -> None:
    answer = (await http.post("/v1/completions", body(prompt="Two. é", max_tokens=0, echo=True, logprobs=1))).json
    choice = answer["choices"][0]
    assert choice["text"] == "Two. é"
    assert len(choice["logprobs"]["token_logprobs"]) == answer["usage"]["prompt_tokens"] == 7
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5, 5]


async def test_a_client_that_leaves_frees_its_requests(http: HttpClient) -> None:
    task = asyncio.create_task(http.post("/v1/completions", body(max_tokens=CONTEXT - 100, stream=True)))
    await http.until(partial(runs, http, True))
    task.cancel()
    await http.until(partial(runs, http, False))
    assert await metric(http, "generation_tokens_total") < CONTEXT - 100


async def test_abort_by_id_then_use_the_id_again(http: HttpClient) -> None:
    long = {"text": "x", "sampling_params": {"max_new_tokens": CONTEXT - 100, "ignore_eos": True}, "rid": "job"}
    task = asyncio.create_task(http.post("/generate", long))
    await http.until(partial(runs, http, True))
    assert (await http.post("/abort_request", {"rid": "job"})).status == 200
    answer = await asyncio.wait_for(task, 10)
    assert answer.status == 200
    assert answer.json["meta_info"]["finish_reason"]["type"] == "abort"
    again = await http.post("/generate", {**long, "sampling_params": {"max_new_tokens": 4}})
    assert again.json["meta_info"]["completion_tokens"] <= 4


async def test_stock_client_health_and_tokens(http: HttpClient) -> None:
    async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as api:
        answer = await api.chat.completions.create(model="default", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3
    assert (await http.get("/health_generate")).status == 200
    ids = (await http.post("/tokenize", {"prompt": "Hé"})).json
    assert ids["tokens"] == [72, 195, 169]
    assert (await http.post("/detokenize", {"tokens": ids["tokens"]})).json == {"text": "Hé"}
    chat = (await http.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})).json
    assert chat["count"] == answer.usage.prompt_tokens
    info = (await http.get("/server_info")).json
    assert info["max_total_num_tokens"] == 20_000
    assert {a["name"] for a in info["actors"]} == {a.name for a in ACTORS}


async def test_a_lost_gateway_comes_back_on_the_same_socket(http: HttpClient) -> None:
    before = http.node.actor(GATEWAY)
    http.node.supervisor.kill(GATEWAY)
    await eventually(lambda: http.node.actor(GATEWAY) is not before)
    await http.until_ready()
    assert (await http.post("/v1/completions", body())).status == 200
