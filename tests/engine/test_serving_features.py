"""The real model through the real server: prefix sharing, streams that equal plain answers, stock clients, clean ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

import radixcast
from fakes.server import Server
from radixcast.protocols.model import ModelSpec

REFERENCE = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl").read_text().splitlines()
]
PARIS = "The capital of France is"


@pytest.fixture(scope="module")
def server(smollm2_spec: ModelSpec) -> Any:
    with Server() as running:
        yield running


def prefix(n: int, salt: int) -> list[int]:
    """n ordinary token ids, different for every salt."""
    return [1000 + (i * 7919 + salt * 104729) % 40000 for i in range(n)]


def test_second_request_hits_the_shared_prefix(server: Server) -> None:
    for n in (5, 64, 300):
        shared = prefix(n, n)
        sampling = {"temperature": 0, "max_new_tokens": 2}
        server.post("/generate", {"input_ids": [*shared, 11, 12], "sampling_params": sampling})
        second = server.post("/generate", {"input_ids": [*shared, 21, 22, 23], "sampling_params": sampling})
        assert second["meta_info"]["cached_tokens"] >= n - 1


def test_eight_together_compute_their_prefix_once(server: Server) -> None:
    shared = prefix(512, 4242)
    sampling = {"temperature": 0, "max_new_tokens": 4}

    def one(i: int) -> Any:
        return server.post("/generate", {"input_ids": [*shared, 30 + i, 31 + i], "sampling_params": sampling})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    assert sum(a["meta_info"]["cached_tokens"] for a in answers) >= 7 * 511


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 1, "top_p": 0.9, "seed": 8}]
)
@pytest.mark.parametrize("stop", [None, ["\n", " the"]])
def test_streamed_equals_plain(server: Server, sampling: dict[str, Any], stop: list[str] | None) -> None:
    body = {"prompt": PARIS, "max_tokens": 40, "stop": stop, **sampling}
    plain = server.post("/v1/completions", body)
    events = list(server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == plain["choices"][0]["text"]
    finishes = [e["choices"][0]["finish_reason"] for e in events if e["choices"] and e["choices"][0]["finish_reason"]]
    assert finishes == [plain["choices"][0]["finish_reason"]]
    usage = events[-1]["usage"]
    assert {k: usage[k] for k in ("prompt_tokens", "completion_tokens")} == {
        k: plain["usage"][k] for k in ("prompt_tokens", "completion_tokens")
    }
    native = {"text": PARIS, "sampling_params": {"max_new_tokens": 40, "stop": stop, **sampling}}
    whole = server.post("/generate", native)
    last = list(server.stream("/generate", native))[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert whole["text"] == plain["choices"][0]["text"]
    assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_text_does_not_depend_on_company(server: Server) -> None:
    body = {"prompt": PARIS, "max_tokens": 24, "temperature": 1, "seed": 5}
    alone = server.post("/v1/completions", body)["choices"][0]["text"]
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(server.post, "/v1/completions", {**body, "seed": s}) for s in range(100, 105)]
        again = server.post("/v1/completions", body)["choices"][0]["text"]
        assert len({f.result()["choices"][0]["text"] for f in others}) > 1
    assert again == alone


def test_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    case = next(c for c in REFERENCE if c["kind"] == "chat")
    messages: Any = case["messages"]
    plain = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=64)
    assert plain.choices[0].message.content == case["output_text"]
    stream = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=64, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == case["output_text"]
    assert [m.id for m in client.models.list()] == ["smollm2"]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smollm2", prompt=PARIS, temperature=-1)


async def test_zmq_client(server: Server) -> None:
    case = REFERENCE[0]
    async with radixcast.EngineClient(server.zmq_endpoint) as client:
        output = await client.generate(case["prompt"], {"temperature": 0, "max_new_tokens": 64})
        assert output.text == case["output_text"]
        many = await asyncio.gather(
            *(client.generate(c["prompt_ids"], {"temperature": 0, "max_new_tokens": 8}) for c in REFERENCE[:6])
        )
        assert [list(o.token_ids) for o in many] == [c["output_ids"][:8] for c in REFERENCE[:6]]


def test_article_curl_call(server: Server) -> None:
    answer = server.post("/generate", {"text": "用一句话介绍SGLang", "sampling_params": {"max_tokens": 100}})
    assert answer["text"]
    assert answer["meta_info"]["completion_tokens"] <= 100


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(smollm2_spec: ModelSpec, how: signal.Signals) -> None:
    server = Server()
    with server:
        children = server.children()
        assert len(children) >= 5
        server.post("/generate", {"text": PARIS, "sampling_params": {"max_new_tokens": 2}})
        status = server.stop(how)
    assert status == (0 if how is not signal.SIGKILL else -signal.SIGKILL)
    end = time.monotonic() + 5
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert left == []


CASES = Path(__file__).parents[1] / "data" / "cases"
LATER_AREAS = {"tool-calls", "multimodal"}


def cases(needs: str) -> str:
    """Ids of the open cases that this server can run, for `--only`."""
    rows = [json.loads(line) for line in (CASES / "cases_open.jsonl").read_text().splitlines()]
    return ",".join(r["id"] for r in rows if r["area"] not in LATER_AREAS and any(needs in n for n in r.get("needs", [""])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs", "flags", "options"),
    [
        ("", (), ()),
        ("max_", ("--max-running-requests", "2", "--max-queued-requests", "2"), ("--provides", "max_running=2,max_queued=2")),
        (
            "api_key",
            ("--api-key", "k-1", "--admin-api-key", "a-1"),
            ("--api-key", "k-1", "--admin-key", "a-1", "--provides", "api_key,admin_key"),
        ),
    ],
    ids=["default", "small-queue", "keys"],
)
def test_open_cases(smollm2_spec: ModelSpec, needs: str, flags: tuple[str, ...], options: tuple[str, ...]) -> None:
    assert smollm2_spec.tokenizer_file
    folder = Path(smollm2_spec.tokenizer_file).parent
    with Server(*flags) as server:
        command = [
            sys.executable,
            str(CASES / "run_cases.py"),
            "--base-url",
            server.url,
            "--cases",
            str(CASES / "cases_open.jsonl"),
        ]
        command += ["--only", cases(needs), "--tokenizer", str(folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
