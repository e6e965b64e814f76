"""The serving benchmark against a fake OpenAI server on a real socket."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.openai_server import FakeOpenAI
from radixcast.bench.client import Sample
from radixcast.bench.report import percentile, summarise
from radixcast.bench.workloads import WORKLOADS
from radixcast.bench_serving import main
from radixcast.protocols.model import ModelSpec


async def bench(server: FakeOpenAI, *options: str) -> int:
    """The command, in a thread: it brings its own event loop."""
    return await asyncio.to_thread(main, ["--base-url", server.url, "--warmup", "0", *options])


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


async def test_single_sends_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI() as server:
        assert await bench(server, "--workload", "single") == 0
    out, err = capsys.readouterr()
    (figures,) = lines(out)
    assert [path for path, _ in server.requests] == ["/v1/completions"] * 4
    assert server.most_running == 1
    assert all(len(body["prompt"].split()) == 128 and body["max_tokens"] == 128 for _, body in server.requests)
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["stream"] for _, body in server.requests)
    assert figures["requests"] == 4
    assert figures["errors"] == 0
    assert figures["model"] == "fake"
    assert figures["prompt_tokens"] == 4 * 128
    assert figures["completion_tokens"] == 4 * 128
    assert figures["cache_hit_rate"] < 0.05
    assert figures["usage_reported"]
    assert figures["exact_prompts"]
    assert figures["finish_reasons"] == {"length": 4}
    assert all(figures[f"ttft_ms_p{q}"] > 0 for q in (50, 90, 99))
    assert figures["itl_ms_p50"] is not None
    assert figures["tpot_ms_p50"] is not None
    assert figures["e2e_ms_p99"] > 0
    assert "TTFT p90" in err
    assert "output rate" in err


async def test_words_that_are_several_tokens_are_left_out() -> None:
    async with FakeOpenAI() as server:
        await bench(server, "--workload", "single", "--num-prompts", "2")
    assert not any("c" in body["prompt"] for _, body in server.requests)


async def test_batch16_runs_sixteen_at_once() -> None:
    async with FakeOpenAI(hold=16) as server:
        assert await bench(server, "--workload", "batch16") == 0
    assert len(server.requests) == 64
    assert server.most_running == 16
    assert len({body["prompt"] for _, body in server.requests}) == 64


async def test_shared_has_eight_groups_of_common_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI(hold=8) as server:
        assert await bench(server, "--workload", "shared") == 0
    prompts = [body["prompt"].split() for _, body in server.requests]
    assert len(prompts) == 64
    assert all(len(prompt) == 512 + 32 for prompt in prompts)
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 8
    (figures,) = lines(capsys.readouterr().out)
    assert figures["cache_hit_rate"] > 0.5


async def test_multiturn_conversations_grow(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI(hold=8) as server:
        assert await bench(server, "--workload", "multiturn") == 0
    bodies = [body for path, body in server.requests if path == "/v1/chat/completions"]
    assert len(bodies) == 48
    assert server.most_running == 8
    by_start: dict[str, list[Any]] = {}
    for body in bodies:
        by_start.setdefault(body["messages"][0]["content"], []).append(body["messages"])
    assert len(by_start) == 8
    for turns in by_start.values():
        assert [len(messages) for messages in turns] == [1, 3, 5, 7, 9, 11]
        for before, after in itertools.pairwise(turns):
            assert after[: len(before)] == before
        assert turns[1][1] == {"role": "assistant", "content": "".join(f"w{i} " for i in range(48))}
    (figures,) = lines(capsys.readouterr().out)
    assert figures["completion_tokens"] == 48 * 48
    assert figures["cache_hit_rate"] > 0.5


async def test_prompts_depend_on_seed_and_run_alone(tmp_path: Path) -> None:
    async def prompts(*options: str) -> list[str]:
        async with FakeOpenAI() as server:
            assert await bench(server, "--workload", "batch16", "--num-prompts", "6", *options) == 0
        return [body["prompt"] for _, body in server.requests]

    first, again, other = await prompts(), await prompts(), await prompts("--seed", "1")
    assert sorted(first) == sorted(again)
    assert not set(first) & set(other)
    out = tmp_path / "runs.jsonl"
    twice = await prompts("--repeat", "2", "--output-file", str(out))
    assert len(set(twice)) == 12
    assert [run["run"] for run in lines(out.read_text())] == [1, 2]


async def test_failures_are_counted_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI(fail_every=4) as server:
        assert await bench(server, "--workload", "batch16", "--num-prompts", "8") == 1
    out, err = capsys.readouterr()
    (figures,) = lines(out)
    assert figures["errors"] == 2
    assert figures["completion_tokens"] == 6 * 64
    assert "503" in figures["first_error"]
    assert "503" in err


async def test_a_stream_cut_short_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI(cut_every=2) as server:
        assert await bench(server, "--workload", "single") == 1
    (figures,) = lines(capsys.readouterr().out)
    assert figures["errors"] == 2


async def test_servers_without_usage_and_tokenize(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI(usage=False, tokenize=False) as server:
        assert await bench(server, "--workload", "single", "--num-prompts", "1") == 0
    out, err = capsys.readouterr()
    (figures,) = lines(out)
    assert figures["completion_tokens"] == 128
    assert not figures["usage_reported"]
    assert not figures["exact_prompts"]
    assert figures["cache_hit_rate"] is None
    assert "no usage" in err
    assert "a word is taken for a token" in err


async def test_extra_body_model_and_base_url_with_v1() -> None:
    async with FakeOpenAI() as server:
        url, server.url = server.url, server.url + "/v1/"
        extra = ["--extra-request-body", '{"seed": 7}', "--model", "other"]
        assert await bench(server, "--workload", "single", "--num-prompts", "1", *extra) == 0
        assert url in server.url
    (_, body) = server.requests[0]
    assert body["seed"] == 7
    assert body["model"] == "other"


async def test_a_local_tokenizer_gives_exact_counts(smollm2_spec: ModelSpec) -> None:
    from tokenizers import Tokenizer

    assert smollm2_spec.tokenizer_file is not None
    tokenizer = Tokenizer.from_file(smollm2_spec.tokenizer_file)
    async with FakeOpenAI(tokenize=False) as server:
        options = ["--workload", "single", "--tokenizer", str(Path(smollm2_spec.tokenizer_file).parent)]
        assert await bench(server, *options) == 0
    assert [len(tokenizer.encode(body["prompt"]).ids) for _, body in server.requests] == [128] * 4


def test_no_server_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("bench_serving: ")
    assert "127.0.0.1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("options", [["--workload", "x"], ["--num-prompts", "0"], ["--extra-request-body", "[]"]])
def test_wrong_options_end_with_status_2(options: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2


def test_scaling_keeps_whole_conversations() -> None:
    assert WORKLOADS["multiturn"].scaled(13).requests == 12
    assert WORKLOADS["multiturn"].scaled(1).requests == 6
    assert WORKLOADS["batch16"].scaled(None) is WORKLOADS["batch16"]
    assert WORKLOADS["shared"].scaled(16).groups == 2
    assert WORKLOADS["shared"].scaled(3).groups == 1


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_lie_within_the_values(values: list[float], q: float) -> None:
    found = percentile(values, q)
    assert found is not None
    assert min(values) <= found <= max(values)
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


def test_figures_of_known_samples() -> None:
    sample = Sample(start=0.0, end=1.0, arrivals=[0.2, 0.4, 0.8], prompt_tokens=10, completion_tokens=3, cached_tokens=5)
    figures = summarise([sample, Sample(error="x")], 2.0)
    assert figures["requests"] == 2
    assert figures["errors"] == 1
    assert figures["output_throughput"] == 1.5
    assert figures["input_throughput"] == 5
    assert figures["request_throughput"] == 0.5
    assert figures["ttft_ms_p50"] == 200
    assert figures["tpot_ms_p50"] == 300
    assert figures["itl_ms_p50"] == 300
    assert figures["cache_hit_rate"] == 0.5
    assert figures["e2e_ms_p50"] == 1000
    assert percentile([], 50) is None


@pytest.mark.parametrize(("workload", "compact"), [("json", False), ("json-fixed", True)])
async def test_schemas_are_compared_with_no_schema(capsys: pytest.CaptureFixture[str], workload: str, compact: bool) -> None:
    async with FakeOpenAI(forced=5) as server:
        assert await bench(server, "--workload", workload, "--num-prompts", "12") == 0
    out, err = capsys.readouterr()
    plain, schema, jump = lines(out)
    assert [run["variant"] for run in (plain, schema, jump)] == ["plain", "schema", "schema+jump"]
    assert [run["requests"] for run in (plain, schema, jump)] == [12, 12, 12]
    assert plain["completion_tokens"] == schema["completion_tokens"]
    assert schema["output_throughput_vs_plain"] > 0
    assert jump["request_throughput_vs_no_jump"] > 0
    assert (jump["forced_tokens"], jump["same_text_as_no_jump"], jump["json_valid"]) == (12 * 5, 12, 0)
    assert "output rate / plain" in err
    bodies = [body for _, body in server.requests[1:]]  # the first one asks what the server can
    with_schema = [body for body in bodies if "response_format" in body]
    assert len(with_schema) == 24
    assert all(body["response_format"]["json_schema"]["schema"]["type"] == "object" for body in with_schema)
    assert sum(body["jump_forward"] for body in with_schema) == 12
    assert all((body.get("json_whitespace") == "compact") == compact for body in with_schema)
    assert len({body["cache_salt"] for body in bodies}) == 3
    assert len({json.dumps(body["messages"]) for body in bodies}) == 12


async def test_a_server_without_jump_forward_has_two_variants(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI() as server:
        assert await bench(server, "--workload", "json", "--num-prompts", "3") == 0
    assert [run["variant"] for run in lines(capsys.readouterr().out)] == ["plain", "schema"]
