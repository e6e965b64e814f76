"""Where actors run: placement is configuration, not code. `Tasks` here, `process.Processes` for children of their own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from radixcast.actors.actor import Actor
from radixcast.actors.setup import DETOKENIZER, GATEWAY, MODEL_RUNNER, SCHEDULER, TOKENIZER, NodeSetup
from radixcast.protocols.errors import StartupError


@dataclass(frozen=True)
class ActorSpec:
    """One actor of a node."""

    name: str
    module: str = ""
    """What `python -m` runs; default: radixcast.actors.<name>."""
    group: str = ""
    """Actors of one group are restarted together; default: alone."""
    listens: bool = False
    """Gets the supervisor's listening socket."""
    actor: type[Actor] | None = None
    """The class, for placement as a task."""

    @property
    def target(self) -> str:
        """The module to run."""
        return self.module or f"radixcast.actors.{self.name}"

    @property
    def domain(self) -> str:
        """Name of what is restarted together."""
        return self.group or self.name


def node_specs(*, gateway: bool = True) -> list[ActorSpec]:
    """The actors of a whole node. The scheduler and the runner share what is in flight, so they live and die together."""
    specs = [
        ActorSpec(TOKENIZER),
        ActorSpec(SCHEDULER, group="engine"),
        ActorSpec(MODEL_RUNNER, group="engine"),
        ActorSpec(DETOKENIZER),
    ]
    return [*specs, ActorSpec(GATEWAY, listens=True)] if gateway else specs


class Exit(Exception):
    """How an actor ended. `status` as subprocess has it: negative for a signal."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Running(Protocol):
    """One running actor."""

    @property
    def pid(self) -> int:
        """Process id."""

    async def wait(self) -> Exit:
        """Wait until it has ended. May be awaited by several."""

    def kill(self) -> None:
        """End it at once. Idempotent."""

    def dump(self) -> None:
        """Have it print where it is (before it is killed for a hang)."""


class Placement(Protocol):
    """Starts actors."""

    async def launch(self, spec: ActorSpec, epoch: int) -> Running:
        """Start one. Raises StartupError when that is impossible."""

    def close(self) -> None:
        """Release what all of them shared; they have ended."""


class Tasks:
    """Actors as tasks of the running loop, over inproc:// (or any other) sockets of one context."""

    def __init__(self, setup: NodeSetup, context: zmq.Context[Any], listen_fd: int | None = None) -> None:
        self._setup = setup
        self._context = context
        self._listen_fd = listen_fd
        self.actors: dict[str, Actor] = {}
        """The latest incarnation of each, for tests and notebooks to look at."""

    async def launch(self, spec: ActorSpec, epoch: int) -> Running:
        """Start one as a task."""
        if spec.actor is None:
            raise StartupError(f"{spec.name}: no class given, it can't run as a task")
        actor = self.actors[spec.name] = spec.actor(self._setup, epoch)
        actor.listen_fd = self._listen_fd if spec.listens else None
        return _Task(asyncio.get_running_loop().create_task(actor.run(self._context), name=spec.name))

    def close(self) -> None:
        """Nothing is shared."""


class _Task:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    @property
    def pid(self) -> int:
        return 0

    async def wait(self) -> Exit:
        await asyncio.wait({self._task})
        if self._task.cancelled():
            return Exit(-9, "was killed")
        error = self._task.exception()
        return Exit(0, "stopped") if error is None else Exit(1, f"ended with {type(error).__name__}: {error}")

    def kill(self) -> None:
        self._task.cancel()

    def dump(self) -> None:
        self._task.print_stack()
