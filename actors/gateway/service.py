"""What all handlers of one gateway share: the engine, who we serve, and whether new work is taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from radixcast.actors.gateway.auth import Guard
from radixcast.actors.gateway.metrics import Metrics
from radixcast.actors.gateway.ports import EnginePort
from radixcast.actors.gateway.work import Work
from radixcast.protocols.errors import NotFound, Overloaded, RadixcastError
from radixcast.protocols.internal import ActorState, NodeState
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.public import Generate, SchedulerStats, Welcome
from radixcast.protocols.server_args import ServerArgs

HEARTBEAT_LIMIT = 10.0
"""Seconds without a sign of life after which an actor (or the supervisor) counts as gone."""

STATS_TIMEOUT = 1.0
"""Seconds that /metrics and /server_info wait for fresh numbers before they show the last ones."""

_ANY_MODEL = ("", "default")
"""Model names that mean: the one you serve. `default` is what SGLang's clients send."""


class Gateway:
    """State of one gateway. Handlers get it with each call; only the actor changes it."""

    def __init__(
        self, args: ServerArgs, model: ModelSpec, engine: EnginePort, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.args = args
        self.model = model
        self.engine = engine
        self.guard = Guard(args)
        self.served = args.served_model_name or model.name
        self.metrics = Metrics(self.served)
        self.created = int(time.time())
        self.open_connections: Callable[[], int] = lambda: 0
        self._clock = clock
        self._state: NodeState | None = None
        self._state_at = clock()
        self._draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.probe = asyncio.Lock()
        """Held by /health_generate: one probe at a time."""

    # -- the node

    def note_state(self, state: NodeState) -> None:
        """The supervisor told how the node is."""
        self._state, self._state_at = state, self._clock()
        self.metrics.node.state = state

    @property
    def state(self) -> str:
        """starting | ready | draining | stopping, as the supervisor sees it."""
        if self._draining:
            return "draining"
        return self._state.state if self._state else "starting"

    def unhealthy(self) -> str | None:
        """Why the node is not alive; None when it is. Looks only at what is known: no engine is asked."""
        if self._state is None:
            return "no word from the supervisor yet"
        age = self._clock() - self._state_at
        if age > HEARTBEAT_LIMIT:
            return f"no word from the supervisor for {age:.0f} s"
        if self._state.state in ("starting", "stopping"):
            return f"the node is {self._state.state}"
        for actor in self._state.actors:
            if actor.state == "dead":
                return f"{actor.name} is dead"
            if actor.heartbeat_age + age > HEARTBEAT_LIMIT:
                return f"{actor.name} gave no sign of life for {actor.heartbeat_age + age:.0f} s"
        return None

    def unready(self) -> str | None:
        """Why new requests would not be served; None when they would."""
        if self.state != "ready":
            return f"the node is {self.state}"
        if not self.engine.connected:
            return "the engine is not connected"
        return self.unhealthy()

    def actors(self) -> list[ActorState]:
        """The actors as the supervisor last told."""
        return self._state.actors if self._state else []

    @property
    def welcome(self) -> Welcome | None:
        """What the node said that it serves."""
        return self.engine.welcome

    @property
    def context_length(self) -> int:
        """Tokens of prompt plus output."""
        return self.engine.welcome.context_length if self.engine.welcome else self.model.context_length

    @property
    def weight_version(self) -> str:
        """Label of the weights."""
        return self.engine.welcome.weight_version if self.engine.welcome else self.model.weight_version

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's own sampling defaults, for OpenAI bodies."""
        return self.engine.welcome.sampling_defaults if self.engine.welcome else self.model.sampling_defaults

    async def fresh_stats(self) -> SchedulerStats:
        """The scheduler's numbers; the last known ones when it does not answer in time."""
        if self.engine.welcome is not None:
            try:
                async with asyncio.timeout(STATS_TIMEOUT):
                    self.metrics.node.stats = await self.engine.stats()
            except (TimeoutError, RadixcastError):
                pass
        return self.metrics.node.stats

    # -- work

    def check_model(self, name: str | None) -> None:
        """Raises NotFound when a body asks for a model that is not served."""
        if name is None or name in _ANY_MODEL or name == self.served or self.args.allow_any_model:
            return
        if self.args.served_model_name is None and name == self.model.path:
            return
        raise NotFound(
            f"the model {name[:200]!r} does not exist; this server serves {self.served!r}",
            param="model",
            code="model_not_found",
        )

    def ready_engine(self) -> EnginePort:
        """The engine. Raises Overloaded before it was ever reached."""
        if self.engine.welcome is None:
            raise Overloaded("the server is starting", code="starting", retry_after=2)
        return self.engine

    @asynccontextmanager
    async def work(self, requests: Sequence[tuple[Generate, int]]) -> AsyncIterator[Work]:
        """Submit the requests of a body, each with its n. Raises Overloaded while the node takes no new work."""
        if self.state in ("draining", "stopping"):
            raise Overloaded("the server is shutting down and takes no new requests", retry_after=5)
        self.ready_engine()
        self._running += 1
        self._idle.clear()
        try:
            async with Work(self.engine, self.metrics, [(self._seeded(r), n) for r, n in requests]) as work:
                yield work
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _seeded(self, request: Generate) -> Generate:
        """With --random-seed, a request that brings no seed gets that one."""
        if self.args.random_seed is None or request.sampling.seed is not None:
            return request
        sampling = msgspec.structs.replace(request.sampling, seed=self.args.random_seed)
        return msgspec.structs.replace(request, sampling=sampling)

    @property
    def running(self) -> int:
        """Bodies in progress."""
        return self._running

    def start_draining(self) -> None:
        """Refuse new work from now on; what runs goes on."""
        self._draining = True

    async def drained(self) -> None:
        """Wait for the end of what runs."""
        await self._idle.wait()
