"""A whole node in one loop over inproc://: the same actors, unchanged, for tests, notebooks and the smallest deployments."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import zmq

from radixcast.actors.actor import Actor
from radixcast.actors.placement import ActorSpec, Tasks
from radixcast.actors.setup import MODEL_RUNNER, SCHEDULER, Endpoints, NodeSetup
from radixcast.actors.supervisor import Supervisor
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs

_numbers = itertools.count(1)


def local_setup(args: ServerArgs, model: ModelSpec, run_dir: str = "") -> NodeSetup:
    """A setup with inproc endpoints that no other node of this process has. `run_dir` is not written to."""
    prefix = f"inproc://radixcast-{os.getpid()}-{next(_numbers)}"
    names = ("public_in", "public_out", "scheduler", "supervisor")
    endpoints = Endpoints(*(f"{prefix}/{name}" for name in names))
    return NodeSetup(args=args, model=model, endpoints=endpoints, run_dir=run_dir or tempfile.gettempdir())


class LocalNode:
    """Actors as tasks of the running loop, under a supervisor of their own::

        async with LocalNode(local_setup(args, model), [Tokenizer, Scheduler, FreeRunner, Detokenizer]) as node:
            client = Dealer(node.context, node.setup.endpoints.public_in, ...)
            node.actor("scheduler")     # look inside
            node.supervisor.kill("model_runner")

    Leaving drains for at most `drain_seconds`. Raises StartupError on entering when an actor does.
    """

    def __init__(
        self,
        setup: NodeSetup,
        actors: Sequence[type[Actor]],
        *,
        context: zmq.Context[Any] | None = None,
        drain_seconds: float = 0.0,
        listen_fd: int | None = None,
    ) -> None:
        self.setup = setup
        self.context: zmq.Context[Any] = context or zmq.Context()
        self._own_context = context is None
        self._drain_seconds = drain_seconds
        self._tasks = Tasks(setup, self.context, listen_fd)
        engine = (SCHEDULER, MODEL_RUNNER)
        specs = [ActorSpec(a.name, actor=a, group="engine" if a.name in engine else "", listens=True) for a in actors]
        self.supervisor = Supervisor(setup, specs, placement=self._tasks, context=self.context)

    def actor(self, name: str) -> Actor:
        """The latest incarnation of an actor."""
        return self._tasks.actors[name]

    async def start(self) -> None:
        """Start all and wait until each is ready. Raises StartupError."""
        try:
            await self.supervisor.start()
        except BaseException:
            self._close()
            raise

    async def stop(self) -> None:
        """End all, in order."""
        await self.supervisor.shutdown(drain=True, timeout=self._drain_seconds)
        self._close()

    def _close(self) -> None:
        if self._own_context:
            self.context.destroy(linger=0)

    async def __aenter__(self) -> LocalNode:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
