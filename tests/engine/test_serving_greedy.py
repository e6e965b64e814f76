"""The real model through the real server: greedy text equals transformers' (fp32), however it is computed.

tests/data/smollm2_greedy.jsonl holds 20 prompts with the ids that transformers 5.24 generates from the same weights.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fakes.server import Server
from radixcast.protocols.model import ModelSpec

REFERENCE = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl").read_text().splitlines()
]
GREEDY = {"temperature": 0, "max_new_tokens": 64}


def generate(server: Server, case: dict[str, Any]) -> dict[str, Any]:
    """One /generate call by ids."""
    answer = server.post("/generate", {"input_ids": case["prompt_ids"], "sampling_params": GREEDY})
    assert isinstance(answer, dict)
    return answer


def check(answers: list[dict[str, Any]]) -> None:
    """All 20 equal the reference: ids, text and finish reason."""
    wrong = [c["id"] for c, a in zip(REFERENCE, answers, strict=True) if a["output_ids"] != c["output_ids"]]
    assert wrong == []
    for case, answer in zip(REFERENCE, answers, strict=True):
        assert answer["text"] == case["output_text"]
        assert answer["meta_info"]["finish_reason"]["type"] == case["finish_reason"]
        assert answer["meta_info"]["completion_tokens"] == len(case["output_ids"])


def together(server: Server) -> list[dict[str, Any]]:
    """All 20 at once, as 20 requests."""
    with ThreadPoolExecutor(len(REFERENCE)) as pool:
        return list(pool.map(lambda case: generate(server, case), REFERENCE))


@pytest.fixture(scope="module")
def server(smollm2_spec: ModelSpec) -> Any:
    with Server() as running:
        yield running


def test_alone_then_warm_then_in_one_batch(server: Server) -> None:
    check([generate(server, case) for case in REFERENCE])
    warm = server.post("/generate", {"input_ids": [c["prompt_ids"] for c in REFERENCE], "sampling_params": GREEDY})
    check(warm)
    for case, answer in zip(REFERENCE, warm, strict=True):
        assert answer["meta_info"]["cached_tokens"] >= len(case["prompt_ids"]) - 1
    assert server.request("/flush_cache", {})[0] == 200
    cold = together(server)
    check(cold)


def test_prompt_text_and_chat_give_the_reference_ids(server: Server) -> None:
    for case in REFERENCE[:3]:
        answer = server.post("/generate", {"text": case["prompt_text"], "sampling_params": {**GREEDY, "max_new_tokens": 4}})
        assert answer["output_ids"] == case["output_ids"][:4]
        assert answer["meta_info"]["prompt_tokens"] == len(case["prompt_ids"])
    chats = [c for c in REFERENCE if c["kind"] == "chat"][:2]
    for case in chats:
        body = {"messages": case["messages"], "temperature": 0, "max_tokens": 64}
        answer = server.post("/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == case["output_text"]
        assert answer["usage"]["prompt_tokens"] == len(case["prompt_ids"])


@pytest.mark.parametrize(
    "flags",
    [
        ("--chunked-prefill-size", "16"),
        ("--disable-overlap-schedule",),
        ("--force-retract-interval", "7"),
        ("--disable-radix-cache", "--page-size", "4"),
        ("--page-size", "16", "--max-total-tokens", "1024"),
    ],
    ids=lambda flags: " ".join(flags),
)
def test_other_ways_to_compute_the_same(smollm2_spec: ModelSpec, flags: tuple[str, ...]) -> None:
    with Server(*flags) as server:
        answers = together(server)
        check(answers)
        if "--force-retract-interval" in flags:
            assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0
