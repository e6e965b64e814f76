"""A real server in a real process, for end-to-end tests: `with Server("--chunked-prefill-size", "16") as s: …`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`python -m radixcast.launch_server` with `flags`, ready when the block is entered."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None, timeout: float = 90.0) -> None:
        self.flags = flags
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(tempfile.mkstemp(prefix="radixcast-test-", suffix=".log")[1])
        self.socket_dir = tempfile.TemporaryDirectory(prefix="rc-test-")
        self.zmq_endpoint = f"ipc://{self.socket_dir.name}/in"
        self._env = {**os.environ, **(env or {})}
        self._timeout = timeout
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and return at once."""
        command = [sys.executable, "-P", "-m", "radixcast.launch_server", "--port", str(self.port)]
        command += ["--zmq-endpoint", self.zmq_endpoint, *self.flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._env)

    def wait_ready(self) -> None:
        """Wait until /ready says 200; fails with the log's end when the process dies first."""
        assert self.process is not None
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                if self.get("/ready")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"server not ready (status {self.process.poll()}):\n{self.log.read_text()[-4000:]}")

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout: float = 40.0) -> int:
        """Signal the process, wait for its end and return its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"server did not stop:\n{self.log.read_text()[-4000:]}") from None
        self.socket_dir.cleanup()
        return status

    def children(self) -> list[psutil.Process]:
        """The actor processes."""
        assert self.process is not None
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def request(self, path: str, body: Any = None, timeout: float = 300.0, **headers: str) -> tuple[int, Any]:
        """One request (POST when there is a body) -> (status, parsed JSON or text)."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        request = urllib.request.Request(self.url + path, data=data, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()

    def get(self, path: str) -> tuple[int, Any]:
        """GET -> (status, body)."""
        return self.request(path, timeout=10.0)

    def post(self, path: str, body: Any) -> Any:
        """POST that must answer 200 -> body."""
        status, answer = self.request(path, body)
        assert status == 200, answer
        return answer

    def stream(self, path: str, body: Any, timeout: float = 300.0) -> Iterator[Any]:
        """POST with stream=true -> the JSON events; asserts that [DONE] ends them."""
        data = json.dumps({**body, "stream": True}).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            done = False
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                assert not done, "events after [DONE]"
                if line.strip() == b"data: [DONE]":
                    done = True
                else:
                    yield json.loads(line[6:])
            assert done, "no [DONE]"
