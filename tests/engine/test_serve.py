"""`launch_server` as a process: what it prints, how it ends, and that nothing is left. With a model that costs nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import radixcast
from fakes.free_model import write_free_model
from fakes.server import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_free_model(tmp_path_factory.mktemp("model") / "free")


def wait_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those of `processes` that still live after a while."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server("--model-path", str(folder)) as running:
        yield running


def long_request(server: Server, answers: list[Any], tokens: int) -> threading.Thread:
    """A request that runs in a thread; its (status, body) goes to `answers`."""
    body = {"text": "x", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "seed": 1}}

    def ask() -> None:
        try:
            answers.append(server.request("/generate", body))
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def wait_running(server: Server) -> None:
    """Until a request runs."""

    async def poll() -> None:
        async with radixcast.EngineClient(server.zmq_endpoint) as client:
            while not (await client.stats()).running:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(poll(), 20))


def test_it_says_where_it_is(server: Server) -> None:
    server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
    text = server.log.read_text()
    assert f"http://127.0.0.1:{server.port}" in text
    assert server.zmq_endpoint in text
    assert "ready to roll" in text
    assert "WITHOUT A KEY" not in text
    assert len(server.children()) == 5


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_drain_lets_running_requests_end(server: Server, how: signal.Signals) -> None:
    children = server.children()
    answers: list[Any] = []
    thread = long_request(server, answers, 1500)
    wait_running(server)
    assert server.stop(how) == 0
    thread.join()
    status, answer = answers[0]
    assert status == 200, answer
    assert answer["meta_info"]["completion_tokens"] == 1500
    assert wait_gone(children) == []


def test_second_signal_ends_at_once(server: Server) -> None:
    children = server.children()
    answers: list[Any] = []
    thread = long_request(server, answers, 8000)
    wait_running(server)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
    thread.join()
    assert wait_gone(children) == []


def test_killed_parent_takes_its_children_along(server: Server) -> None:
    children = server.children()
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    assert wait_gone(children) == []


def test_a_node_that_gives_up_says_why(folder: Path) -> None:
    with Server("--model-path", str(folder), "--max-restarts", "0") as server:
        children = server.children()
        victim = next(p for p in children if "radixcast.actors.detokenizer" in " ".join(p.cmdline()))
        victim.kill()
        assert server.process is not None
        assert server.process.wait(20) == 1
        assert "radixcast: detokenizer died" in server.log.read_text()
        assert wait_gone(children) == []


def test_stopped_while_it_starts(folder: Path) -> None:
    server = Server("--model-path", str(folder))
    server.start()
    assert server.process is not None
    while not server.log.read_text() and not psutil.Process(server.process.pid).children():
        time.sleep(0.01)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop(signal.SIGTERM) in (0, 128 + signal.SIGTERM)
    assert "Traceback" not in server.log.read_text()
    assert wait_gone(children) == []


def launch(*flags: str, **environ: str) -> subprocess.Popen[str]:
    """A server with its output in a pipe."""
    command = [sys.executable, "-P", "-m", "radixcast.launch_server", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environ})


def test_port_0_picks_one_and_an_open_door_is_warned_about(folder: Path) -> None:
    process = launch("--model-path", str(folder), "--port", "0", "--host", "0.0.0.0")
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if "HTTP" in line:
            port = int(line.split("http://0.0.0.0:")[1].split()[0])
            socket.create_connection(("127.0.0.1", port)).close()
            process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert "WITHOUT A KEY" in seen
    assert port > 0


def test_tcp_endpoint_with_the_printed_key(folder: Path) -> None:
    process = launch("--model-path", str(folder), "--port", "0", "--zmq-endpoint", "tcp://127.0.0.1:0", RADIXCAST_API_KEY="k")
    assert process.stdout is not None
    endpoint = key = ""
    for line in process.stdout:
        if "tcp://" in line:
            endpoint = line.split()[-1]
        if "server key" in line:
            key = line.split()[-1]
        if "ready to roll" in line:
            break

    async def ask() -> str:
        async with radixcast.EngineClient(endpoint, curve_server_public=key) as client:
            return (await client.generate("x", {"max_new_tokens": 4, "ignore_eos": True})).text

    assert asyncio.run(ask())
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    process.stdout.close()
