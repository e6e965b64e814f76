"""The prover with its real worker: what it proves, remembers and refuses, and that nothing a grammar does gets further."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from fakes.byte_tokenizer import EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from fakes.tiny_hf import tiny_config
from radixcast.actors.grammar import prover as proving
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.jobs import Done, Frames, FromWorker, Job, Start, Started, frame
from radixcast.actors.grammar.outlines_index import index_file
from radixcast.actors.grammar.prover import Prover
from radixcast.protocols.errors import InvalidRequest, Overloaded
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs

SLOW = GrammarSpec(kind="regex", text="|".join(f"w{n:05}" for n in range(9000)), backend="llguidance")
"""Takes about a second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec(
        name="bytes",
        path="bytes",
        config=tiny_config(vocab_size=VOCAB_SIZE),
        weight_files=(),
        weight_format="random",
        tokenizer_file=str(write_byte_tokenizer(tmp_path_factory.mktemp("bytes"))),
        eos_token_ids=(EOS_ID,),
    )


@asynccontextmanager
async def running(model: ModelSpec, run_dir: Path, seconds: float = 30.0) -> AsyncIterator[Prover]:
    prover = Prover(model, ServerArgs(grammar_timeout=seconds), run_dir)
    try:
        yield prover
    finally:
        await prover.close()


def regex(text: str, backend: str = "auto") -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text, backend=backend)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.005)


async def worker_of(prover: Prover) -> psutil.Process:
    """The worker process."""
    await prover.prove(regex("warm"))
    worker = prover._worker
    assert worker is not None
    return psutil.Process(worker._process.pid)


async def test_good_ones_pass_and_bad_ones_are_400s(model: ModelSpec, tmp_path: Path) -> None:
    async with running(model, tmp_path) as prover:
        await prover.prove(regex("a+b"))
        await prover.prove(GrammarSpec(kind="json_schema", text='{"type":"object"}'))
        await prover.prove(GrammarSpec(kind="choices", text='["a","b"]'))
        await prover.prove(GrammarSpec(kind="ebnf", text='root ::= "a"'))
        assert prover.stats()["grammars_proven"] == 4
        for spec, code in (
            (regex("(ab"), "invalid_regex"),
            (GrammarSpec(kind="json_schema", text='{"enum":["' + 600_000 * "x" + '"]}'), "grammar_too_large"),
            (GrammarSpec(kind="json_schema", text="{"), "invalid_schema"),
            (GrammarSpec(kind="ebnf", text="root ::= root"), "invalid_grammar"),
        ):
            with pytest.raises(GrammarError) as caught:
                await prover.prove(spec)
            assert isinstance(caught.value, InvalidRequest)
            assert (caught.value.info.status, caught.value.info.code) == (400, code)


async def test_the_worker_stands_back_and_never_compiles_itself(model: ModelSpec, tmp_path: Path) -> None:
    async with running(model, tmp_path) as prover:
        worker = await worker_of(prover)
        assert worker.nice() == 19
        assert worker.num_threads() == 1
        before = worker.memory_info().rss
        for number in range(40):
            await prover.prove(GrammarSpec(kind="json_schema", text=f'{{"enum":[{number}]}}'))
        assert worker.memory_info().rss < before + (8 << 20)
        assert worker.children() == []


async def test_automata_of_expressions_lie_in_the_run_folder(model: ModelSpec, tmp_path: Path) -> None:
    async with running(model, tmp_path) as prover:
        for backend, made in (("outlines", True), ("llguidance", False)):
            spec = regex("[ab]{2}", backend)
            await prover.prove(spec)
            assert index_file(tmp_path, spec.key).exists() == made


async def test_what_is_known_needs_no_worker(model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model, tmp_path) as prover:
        await prover.prove(regex("ab"))
        with pytest.raises(GrammarError):
            await prover.prove(regex("(ab"))
        monkeypatch.setattr(proving, "MAX_WAITING", -proving.WORKERS)  # nothing more is let in
        await prover.prove(regex("ab"))
        with pytest.raises(GrammarError, match="position 0"):
            await prover.prove(regex("(ab"))
        with pytest.raises(Overloaded):
            await prover.prove(regex("abc"))


async def test_equal_ones_are_compiled_once(model: ModelSpec, tmp_path: Path) -> None:
    async with running(model, tmp_path) as prover:
        await prover.prove(regex("warm"))
        asked = [asyncio.create_task(prover.prove(SLOW)) for _ in range(20)]
        await asyncio.sleep(0)
        assert prover.stats()["grammars_proving"] == 1
        asked[0].cancel()  # the others still get theirs
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [None] * 19


async def test_a_slow_one_is_a_400_that_is_not_remembered_and_harms_no_other(model: ModelSpec, tmp_path: Path) -> None:
    async with running(model, tmp_path, seconds=2.0) as prover:
        worker = await worker_of(prover)
        for _ in range(2):
            slow = asyncio.create_task(prover.prove(SLOW))
            await until(worker.children)
            worker.children()[0].suspend()  # so it is too slow on any machine
            await prover.prove(regex("fast", "llguidance"))
            with pytest.raises(GrammarError, match="--grammar-timeout") as caught:
                await slow
            assert (caught.value.info.status, caught.value.info.code) == (400, "grammar_timeout")
        assert worker.is_running()
        await prover.prove(regex("then"))
        assert await worker_of(prover) == worker


async def test_a_worker_that_is_killed_costs_its_jobs_only(model: ModelSpec, tmp_path: Path) -> None:
    async with running(model, tmp_path) as prover:
        worker = await worker_of(prover)
        slow = asyncio.create_task(prover.prove(SLOW))
        await until(worker.children)
        child = worker.children()[0]
        worker.kill()
        with pytest.raises(GrammarError):
            await slow
        await prover.prove(regex("again"))
        await prover.prove(SLOW)  # not remembered as a bad one
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_a_child_that_dies_is_its_grammars_end_only(model: ModelSpec, tmp_path: Path) -> None:
    async with running(model, tmp_path) as prover:
        worker = await worker_of(prover)
        slow = asyncio.create_task(prover.prove(SLOW))
        await until(worker.children)
        worker.children()[0].send_signal(signal.SIGSEGV)
        with pytest.raises(GrammarError, match="SIGSEGV"):
            await slow
        await prover.prove(regex("again"))
        assert await worker_of(prover) == worker


async def test_a_full_queue_refuses(model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "MAX_WAITING", 3)
    async with running(model, tmp_path) as prover:
        tasks = [asyncio.create_task(prover.prove(regex(f"x{n}"))) for n in range(30)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, Overloaded) for result in results)
        assert results[0] is None
        await prover.prove(regex("later"))


async def test_closing_ends_everything(model: ModelSpec, tmp_path: Path) -> None:
    prover = Prover(model, ServerArgs(), tmp_path)
    worker = await worker_of(prover)
    slow = asyncio.create_task(prover.prove(SLOW))
    await asyncio.sleep(0.05)
    await prover.close()
    with pytest.raises(Overloaded):
        await slow
    assert not worker.is_running()
    with pytest.raises(Overloaded):
        await prover.prove(regex("more"))


async def test_warming_up_starts_the_worker(model: ModelSpec, tmp_path: Path) -> None:
    async with running(model, tmp_path) as prover:
        prover.warm()
        await until(lambda: prover._worker)
        assert prover._worker is not None
        assert prover._worker.alive


async def test_a_model_without_a_tokenizer_has_no_constraints(model: ModelSpec, tmp_path: Path) -> None:
    async with running(msgspec.structs.replace(model, tokenizer_file=None), tmp_path) as prover:
        prover.warm()
        for _ in range(2):
            with pytest.raises(GrammarError, match="no tokenizer"):
                await prover.prove(regex("a"))


async def test_a_tokenizer_that_cant_be_read(model: ModelSpec, tmp_path: Path) -> None:
    async with running(msgspec.structs.replace(model, tokenizer_file=str(tmp_path / "none.json")), tmp_path) as prover:
        with pytest.raises(GrammarError, match=r"none\.json"):
            await prover.prove(regex("a"))


# ------------------------------------------------------------------ the worker alone


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "radixcast.actors.grammar.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def read(process: subprocess.Popen[bytes], frames: Frames) -> FromWorker:
    assert process.stdout is not None
    while True:
        payloads = frames.feed(os.read(process.stdout.fileno(), 1))
        if payloads:
            return msgspec.msgpack.decode(payloads[0], type=FromWorker)


def test_memory_is_limited_and_the_end_of_stdin_is_the_end(
    worker: subprocess.Popen[bytes], model: ModelSpec, tmp_path: Path
) -> None:
    assert worker.stdin is not None
    frames = Frames()
    worker.stdin.write(frame(Start(model=model, run_dir=str(tmp_path))))
    worker.stdin.flush()
    assert read(worker, frames) == Started()
    for number, memory in ((1, 8 << 20), (2, 1 << 30)):
        worker.stdin.write(frame(Job(id=number, spec=SLOW, seconds=30.0, memory=memory)))
        worker.stdin.flush()
        done = read(worker, frames)
        assert isinstance(done, Done)
        assert done.id == number
        if number == 1:
            assert done.error is not None
            assert done.error.code == "grammar_too_large"
        else:
            assert done.error is None
    worker.stdin.close()
    assert worker.wait(10) == 0


def test_frames_come_whole_however_they_are_cut() -> None:
    sent = [Done(id=number) for number in range(5)]
    data = b"".join(frame(message) for message in sent)
    for size in (1, 3, 7, len(data)):
        frames = Frames()
        payloads = [p for start in range(0, len(data), size) for p in frames.feed(data[start : start + size])]
        assert [msgspec.msgpack.decode(payload, type=Done) for payload in payloads] == sent
    with pytest.raises(ValueError, match="frame"):
        Frames().feed(b"\xff\xff\xff\xff")


@pytest.mark.slow
async def test_thousands_of_schemas_leave_no_trace(smollm2_spec: ModelSpec, tmp_path: Path) -> None:
    async with running(smollm2_spec, tmp_path) as prover:
        worker = await worker_of(prover)
        before = worker.memory_info().rss
        for number in range(2000):
            text = f'{{"type":"object","properties":{{"p{number}":{{"type":"string","maxLength":{number + 1}}}}}}}'
            await prover.prove(GrammarSpec(kind="json_schema", text=text))
        assert worker.memory_info().rss < before + (16 << 20)
        assert psutil.Process().children() == [worker]
