"""Actors as child processes: `python -P -m radixcast.actors.<name>`, never through multiprocessing.

So a script without a main guard and a notebook can start a node. Each child is the leader of a session of its own: ^C in a
terminal does not reach it, and what it starts is killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping

from radixcast.actors.placement import ActorSpec, Exit, Running
from radixcast.protocols.errors import StartupError


class Processes:
    """Starts actors as children. `listen_fd` is handed to those that listen; `env` is added to the environment."""

    def __init__(self, run_dir: str, listen_fd: int | None = None, env: Mapping[str, str] | None = None) -> None:
        self._run_dir = run_dir
        self._listen_fd = listen_fd
        self._env = {**os.environ, **(env or {})}
        # Children see its end of file when this process is gone, however it went.
        self._parent_read, self._parent_write = os.pipe()

    async def launch(self, spec: ActorSpec, epoch: int) -> Running:
        """Start one. Raises StartupError when the interpreter can't be run."""
        command = [sys.executable, "-P", "-m", spec.target, "--run-dir", self._run_dir, "--epoch", str(epoch)]
        command += ["--parent-fd", str(self._parent_read)]
        inherited = [self._parent_read]
        if spec.listens and self._listen_fd is not None:
            command += ["--listen-fd", str(self._listen_fd)]
            inherited.append(self._listen_fd)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,
                env=self._env,
            )
        except OSError as error:
            raise StartupError(f"{spec.name} can't be started: {error}") from error
        return _Child(process)

    def close(self) -> None:
        """Close the pipe that children watch: any that is left ends."""
        for fd in (self._parent_read, self._parent_write):
            with contextlib.suppress(OSError):
                os.close(fd)


class _Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> Exit:
        status = await self._process.wait()
        self._signal_group(signal.SIGKILL)  # helpers that it started and left behind
        return Exit(status, describe(status))

    def kill(self) -> None:
        self._signal_group(signal.SIGKILL)

    def dump(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
