"""Engine with real actors in real processes and a model that costs nothing."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import radixcast
from fakes.free_model import write_free_model
from radixcast.engine import Engine
from radixcast.protocols.errors import DuplicateRequest, InvalidRequest, LinkClosed, RequestAborted, StartupError
from radixcast.protocols.sampling import SamplingParams

SEEDED: dict[str, Any] = {"max_new_tokens": 40, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_free_model(tmp_path_factory.mktemp("model") / "free")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(model_path=str(folder), max_total_tokens=20_000) as running:
        yield running


def children() -> list[psutil.Process]:
    """Live child processes of this one."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


# ------------------------------------------------------------------ generate


def test_one_prompt(engine: Engine) -> None:
    answer = engine.generate("hello", SEEDED)
    assert set(answer) == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 40)
    assert meta["finish_reason"] == {"type": "length", "length": 40}
    assert meta["e2e_latency"] > 0
    again = engine.generate(input_ids=list(b"hello"), sampling_params=SamplingParams(**SEEDED))
    assert (again["text"], again["output_ids"]) == (answer["text"], answer["output_ids"])
    assert again["meta_info"]["cached_tokens"] == 4


def test_batch_n_and_arrays(engine: Engine) -> None:
    alone = [engine.generate(p, SEEDED)["output_ids"] for p in ("ab", "cd")]
    batch = engine.generate(["ab", "cd"], SEEDED)
    assert [a["output_ids"] for a in batch] == alone
    arrays = engine.generate(input_ids=[np.frombuffer(b"ab", np.uint8), np.frombuffer(b"cd", np.uint8)], sampling_params=SEEDED)
    assert [a["output_ids"] for a in arrays] == alone
    assert engine.generate(input_ids=np.frombuffer(b"ab", np.uint8), sampling_params=SEEDED)["output_ids"] == alone[0]
    choices = engine.generate(["ab", "cd"], {**SEEDED, "n": 2}, rid="job")
    assert [c["meta_info"]["id"] for c in choices] == ["job_0", "job_0_1", "job_1", "job_1_1"]
    assert [choices[0]["output_ids"], choices[2]["output_ids"]] == alone
    assert choices[0]["output_ids"] != choices[1]["output_ids"]
    own = engine.generate(["ab", "cd"], [{"max_new_tokens": 1}, {"max_new_tokens": 2}])
    assert [len(o["output_ids"]) for o in own] == [1, 2]


def test_stream_ends_with_the_plain_answer(engine: Engine) -> None:
    plain = engine.generate("hello", SEEDED)
    pieces = list(engine.generate("hello", SEEDED, stream=True))
    assert (pieces[-1]["text"], pieces[-1]["output_ids"]) == (plain["text"], plain["output_ids"])
    assert pieces[-1]["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
    assert all(p["meta_info"]["finish_reason"] is None for p in pieces[:-1])
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(pieces))
    assert "index" not in pieces[0]


def test_stream_of_a_batch_has_an_index(engine: Engine) -> None:
    plain = engine.generate(["ab", "cd"], SEEDED)
    last: dict[int, Any] = {}
    for piece in engine.generate(["ab", "cd"], SEEDED, stream=True):
        last[piece["index"]] = piece
    assert [last[i]["text"] for i in range(2)] == [p["text"] for p in plain]


def test_stream_left_early_is_aborted(engine: Engine) -> None:
    stream = engine.generate("hello", {"max_new_tokens": 8000, "ignore_eos": True}, rid="left", stream=True)
    next(stream)
    stream.close()
    again = engine.generate("hello", {**SEEDED, "max_new_tokens": 1}, rid="left")
    assert again["meta_info"]["id"] == "left"
    wait_idle(engine)


def wait_idle(engine: Engine) -> None:
    """Until no request runs and every KV slot is free or cached."""
    for _ in range(400):
        stats = engine.get_server_info()["internal_states"][0]
        if stats["running"] == stats["queued"] == stats["locked_tokens"] == 0:
            assert stats["free_tokens"] + stats["cached_tokens"] == stats["total_tokens"]
            return
        time.sleep(0.01)
    raise AssertionError(stats)


def test_logprobs(engine: Engine) -> None:
    meta = engine.generate("hey", {"max_new_tokens": 3, "ignore_eos": True}, return_logprob=True, logprob_start_len=0)[
        "meta_info"
    ]
    assert [t[1] for t in meta["input_token_logprobs"]] == list(b"hey")
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["output_token_logprobs"]) == meta["output_token_logprobs_length"] == 3


@pytest.mark.parametrize(
    ("prompt", "sampling", "fields", "param"),
    [
        ("", {}, {}, "text"),
        ("x", {"temprature": 1}, {}, "sampling_params.temprature"),
        ("x", {"temperature": float("nan")}, {}, "sampling_params.temperature"),
        ("x", {}, {"no_such_field": 1}, "no_such_field"),
        ("x", {}, {"prompt": "y"}, None),
        (None, {}, {"input_ids": [5000]}, "input_ids"),
        ("x" * 9000, {}, {}, None),
    ],
)
def test_wrong_requests_raise(engine: Engine, prompt: Any, sampling: Any, fields: Any, param: str | None) -> None:
    with pytest.raises((InvalidRequest, TypeError)) as refused:
        engine.generate(prompt, sampling, **fields)
    if param is not None:
        assert isinstance(refused.value, InvalidRequest)
        assert refused.value.info.param == param


def test_one_wrong_prompt_fails_the_batch_and_harms_nobody(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        engine.generate(input_ids=[[1, 2], [5000]], sampling_params={"max_new_tokens": 4000, "ignore_eos": True})
    with pytest.raises(DuplicateRequest):
        engine.generate(["a", "b"], {}, rid=["r", "r"])
    wait_idle(engine)
    assert engine.generate("hello", SEEDED)["text"]


async def test_a_burst_is_neither_refused_nor_lost(engine: Engine) -> None:
    many = await engine.async_generate([f"p{i}" for i in range(1500)], {"max_new_tokens": 2, "ignore_eos": True})
    assert {m["meta_info"]["completion_tokens"] for m in many} == {2}
    wrong = (engine.async_generate(input_ids=[5000], sampling_params={"max_new_tokens": 2}) for _ in range(1500))
    assert {type(e) for e in await asyncio.gather(*wrong, return_exceptions=True)} == {InvalidRequest}
    wait_idle(engine)


def test_an_id_may_be_used_again_after_its_abort(engine: Engine) -> None:
    long = {"max_new_tokens": 8000, "ignore_eos": True, "n": 2}
    for _ in range(3):
        stream = engine.generate("hello", long, rid="job-31", stream=True)
        next(stream)
        engine.abort("job-31")
        with pytest.raises(RequestAborted):
            list(stream)
        engine.abort("job-31")
        again = engine.generate("hello", {**SEEDED, "n": 2}, rid="job-31")
        assert [a["meta_info"]["completion_tokens"] for a in again] == [40, 40]
    wait_idle(engine)


def test_a_length_that_nobody_asked_for_is_cut_to_what_fits(engine: Engine) -> None:
    answer = engine.generate("x" * 8185, {"ignore_eos": True})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
    with pytest.raises(InvalidRequest):
        engine.generate("x" * 8185, {"ignore_eos": True, "max_new_tokens": 128})


def test_abort_from_another_thread(engine: Engine) -> None:
    timer = threading.Timer(0.2, engine.abort, ["job-31"])
    timer.start()
    with pytest.raises(RequestAborted):
        engine.generate("hello", {"max_new_tokens": None, "ignore_eos": True}, rid="job-31")
    timer.join()
    wait_idle(engine)


def test_calls_from_many_threads(engine: Engine) -> None:
    alone = {i: engine.generate(f"p{i}", SEEDED)["text"] for i in range(8)}
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: engine.generate(f"p{i}", SEEDED)["text"]})) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


async def test_async_and_sync_calls_inside_a_running_loop(engine: Engine) -> None:
    plain = engine.generate("hello", SEEDED)
    assert (await engine.async_generate("hello", SEEDED))["text"] == plain["text"]
    many = await asyncio.gather(*(engine.async_generate(f"p{i}", SEEDED) for i in range(4)))
    assert len({m["text"] for m in many}) == 4
    pieces = [piece async for piece in await engine.async_generate("hello", SEEDED, stream=True)]
    assert pieces[-1]["text"] == plain["text"]
    with pytest.raises(InvalidRequest):
        await engine.async_generate("x", {"n": 0})
    task = asyncio.create_task(engine.async_generate("hello", {"max_new_tokens": 8000, "ignore_eos": True}))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_idle(engine)


# ------------------------------------------------------------------ questions


def test_tokenize_and_back(engine: Engine) -> None:
    assert engine.tokenize("hé") == [104, 195, 169]
    assert engine.tokenize(["a", "b"]) == [[97], [98]]
    assert engine.detokenize([104, 195, 169]) == "hé"
    assert engine.detokenize([[97], [98]]) == ["a", "b"]


def test_information(engine: Engine, folder: Path) -> None:
    model = engine.get_model_info()
    assert (model["model_path"], model["served_model_name"], model["vocab_size"]) == (str(folder), "free", 261)
    info = engine.get_server_info()
    assert (info["version"], info["max_total_num_tokens"]) == (radixcast.__version__, 20_000)
    assert "api_key" in info


def test_flush(engine: Engine) -> None:
    wait_idle(engine)
    engine.generate("flush me", SEEDED)
    assert engine.flush_cache()
    assert engine.generate("flush me", SEEDED)["meta_info"]["cached_tokens"] == 0


def test_other_clients_may_dial(engine: Engine) -> None:
    async def ask() -> str:
        async with radixcast.EngineClient(engine.get_server_info()["endpoint"]) as client:
            return (await client.generate("hello", SEEDED)).text

    assert asyncio.run(ask()) == engine.generate("hello", SEEDED)["text"]


# ------------------------------------------------------------------ life


@pytest.mark.parametrize("actor", ["tokenizer", "detokenizer", "scheduler", "model_runner"])
def test_stream_goes_on_when_an_actor_dies(folder: Path, actor: str) -> None:
    sampling = {"max_new_tokens": 600, "seed": 3, "ignore_eos": True}
    with Engine(model_path=str(folder)) as engine:
        plain = engine.generate("hello", sampling)
        killed, last = False, None
        for last in engine.generate("hello", sampling, stream=True):
            if not killed and len(last["output_ids"]) > 50:
                engine._loop.call_soon_threadsafe(engine._supervisor.kill, actor)
                killed = True
        assert killed
        assert last is not None
        assert (last["text"], last["output_ids"]) == (plain["text"], plain["output_ids"])
        assert last["meta_info"]["completion_tokens"] == 600


def test_shutdown_leaves_nothing(folder: Path) -> None:
    before = set(children())
    engine = Engine(model_path=str(folder))
    mine = [p for p in children() if p not in before]
    assert len(mine) == 4
    run_dir = Path(engine._supervisor.setup.run_dir)
    assert run_dir.exists()
    stream = engine.generate("x", {"max_new_tokens": 8000, "ignore_eos": True}, stream=True)
    next(stream)
    engine.shutdown()
    engine.shutdown()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in mine)
    assert not run_dir.exists()
    with pytest.raises((LinkClosed, RequestAborted)):
        list(stream)
    with pytest.raises(LinkClosed):
        engine.generate("x")
    with pytest.raises(LinkClosed):
        engine.get_model_info() and engine.tokenize("x")


def test_failing_start_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    before = {p.pid for p in children()}
    threads = threading.active_count()
    with pytest.raises(StartupError):
        Engine(model_path=str(tmp_path / "nowhere"))
    with pytest.raises(StartupError, match="did you mean page_size"):
        Engine(model_path=str(folder), pagesize=1)
    (tmp_path / "broken").mkdir()
    broken = write_free_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "version": "9"}')
    with pytest.raises(StartupError):
        Engine(model_path=str(broken))
    assert {p.pid for p in children()} <= before
    assert threading.active_count() <= threads + 1


async def test_async_context(folder: Path) -> None:
    async with Engine(model_path=str(folder)) as engine:
        assert (await engine.async_generate("x", SEEDED))["text"]


def run_script(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a user's script to its end."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)


def test_script_without_a_main_guard_and_without_shutdown(folder: Path, tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        f"""
        import psutil, radixcast as sgl
        engine = sgl.Engine(model_path={str(folder)!r})
        print(engine.generate("x", {{"max_new_tokens": 3, "ignore_eos": True}})["meta_info"]["completion_tokens"])
        print(*[p.pid for p in psutil.Process().children(recursive=True)])
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    count, pids = done.stdout.splitlines()
    assert count == "3"
    assert len(pids.split()) == 4
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.split())


def test_script_that_fails_ends(folder: Path, tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        f"""
        import psutil, radixcast
        engine = radixcast.Engine(model_path={str(folder)!r})
        print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
        raise SystemExit(7)
        """,
    )
    assert done.returncode == 7
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())
