"""Owns the actors of a node: start order, readiness, heartbeats, restart with a new epoch, drain, exit.

Usable in the server's main process and inside a user's program, on any loop of any thread: it touches no signal handler and no
global; the caller turns SIGTERM into `shutdown(drain=True)` and a second one into `shutdown(drain=False)`::

    folder = RunFolder()
    supervisor = Supervisor(process_setup(args, model, folder), node_specs(), folder=folder, listener=socket)
    await supervisor.start()            # every actor is ready; StartupError with the actor's own words otherwise
    status = await supervisor.wait()    # 0 after shutdown; 1 when the node gave up, and `cause` says why

Death is seen by the process sentinel, a hang by heartbeats: busy without progress, or no heartbeat at all, for
`watchdog_timeout`. Who dies is replaced, together with its group (`ActorSpec.group`), under a greater epoch; beyond
`max_restarts` in `restart_window` seconds the node ends. During start-up any failure ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any

import zmq

from radixcast.actors.placement import ActorSpec, Placement, Running
from radixcast.actors.process import Processes
from radixcast.actors.run_folder import RunFolder
from radixcast.actors.setup import DETOKENIZER, GATEWAY, MODEL_RUNNER, SCHEDULER, TOKENIZER, NodeSetup
from radixcast.actors.transport import Router
from radixcast.protocols.errors import StartupError
from radixcast.protocols.internal import (
    ActorState,
    ActorToSupervisor,
    Failed,
    Heartbeat,
    NodeState,
    Ready,
    Shutdown,
)

logger = logging.getLogger("supervisor")

DRAIN_ORDER = (GATEWAY, SCHEDULER, DETOKENIZER, TOKENIZER, MODEL_RUNNER)
"""Who is asked to drain after whom: the door first, then who holds the requests, then who serves those."""
STOP_SECONDS = 3.0
"""Grace for an actor to end once it has nothing to do; then it is killed."""
START_PATIENCE = 4.0
"""An actor that starts may be silent for so many times --watchdog-timeout."""
STARTING, READY, DRAINING, STOPPING = "starting", "ready", "draining", "stopping"
_DEAD = "dead"


class Child:
    """One incarnation of an actor, as the supervisor knows it."""

    def __init__(self, spec: ActorSpec, epoch: int, running: Running) -> None:
        self.spec = spec
        self.epoch = epoch
        self.running = running
        self.state = STARTING
        self.heard_at = time.monotonic()
        self.progress = -1
        self.progress_at = self.heard_at
        self.busy = False
        self.stats: dict[str, float] = {}
        self.info: dict[str, Any] = {}
        self.failure = ""
        self.replaced = False
        """Ended on purpose, for a restart of its group: its death is no news."""

    def beat(self, beat: Heartbeat) -> None:
        """Take a heartbeat."""
        self.heard_at = time.monotonic()
        if beat.progress != self.progress or not beat.busy:
            self.progress_at = self.heard_at
        self.progress, self.busy, self.stats = beat.progress, beat.busy, beat.stats

    def stuck_for(self, now: float) -> float:
        """Seconds without a sign of progress, for an actor that should show one."""
        if self.state == STARTING:  # loading may hold the loop for long
            return (now - self.heard_at) / START_PATIENCE
        if self.state != READY:
            return 0.0
        return max(now - self.heard_at, now - self.progress_at if self.busy else 0.0)

    def view(self, now: float) -> ActorState:
        """What the others are told."""
        return ActorState(
            name=self.spec.name,
            epoch=self.epoch,
            state=self.state,
            pid=self.running.pid,
            heartbeat_age=round(now - self.heard_at, 3),
            stats=self.stats,
        )


class Supervisor:
    """Starts `specs` where `placement` says (default: child processes) and keeps them running.

    `listener` is a bound and listening socket for the actor that listens; it stays open while that one is replaced, so
    connections queue. `folder` is removed when the node has ended.
    """

    def __init__(
        self,
        setup: NodeSetup,
        specs: Iterable[ActorSpec],
        *,
        placement: Placement | None = None,
        listener: socket.socket | None = None,
        folder: RunFolder | None = None,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self.setup = setup
        self.cause = ""
        """Why the node ended by itself; empty: it did not."""
        self._specs = {spec.name: spec for spec in specs}
        self._placement = placement
        self._listener = listener
        self._folder = folder
        self._own_context = context is None
        self._context: zmq.Context[Any] = zmq.Context() if context is None else context
        self._children: dict[str, Child] = {}
        self._state = STARTING
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._status = 0
        self._epoch = 0
        self._restarts: dict[str, deque[float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._closing = asyncio.Lock()
        self._started_once = False
        self._router = Router(
            self._context,
            setup.endpoints.supervisor,
            epoch=time.time_ns() // 1000,
            inboxes=dict.fromkeys(self._specs, ActorToSupervisor),
            on_message=self._on_message,
            on_up=self._on_up,
            on_down=lambda peer, reason: None,
        )

    # ------------------------------------------------------------------ for the owner

    @property
    def state(self) -> str:
        """starting | ready | draining | stopping."""
        if self._state in (STARTING, READY):
            alive = [c.state for c in self._children.values()]
            return READY if len(alive) == len(self._specs) and set(alive) == {READY} else STARTING
        return self._state

    def actors(self) -> dict[str, ActorState]:
        """The actors as last heard."""
        now = time.monotonic()
        return {name: child.view(now) for name, child in self._children.items()}

    def info(self, name: str) -> dict[str, Any]:
        """What the actor said in its Ready."""
        return self._children[name].info

    async def start(self) -> None:
        """Start all at once and wait until each is ready. Raises StartupError, with everything stopped, when one can't."""
        begun = time.monotonic()
        try:
            self._router.open()
            if self._placement is None:
                self.setup.write()
                fd = None if self._listener is None else self._listener.fileno()
                self._placement = Processes(self.setup.run_dir, fd)
            await asyncio.gather(*(self._launch(spec) for spec in self._specs.values()))
            self._spawn(self._watch_health(), "health")
            while self.state != READY and self._state == STARTING:
                await self._change()
        except BaseException as error:
            self.cause = self.cause or str(error)
            await self._end(1)
            if isinstance(error, OSError | zmq.ZMQError):
                raise StartupError(f"the node can't start: {error}") from error
            raise
        if self._state != STARTING:
            await self._ended.wait()
            raise StartupError(self.cause or "stopped before it was ready")
        self._state = READY
        self._started_once = True
        logger.info("%d actors ready in %.2f s", len(self._children), time.monotonic() - begun)

    async def wait(self) -> int:
        """Wait until the node has ended. 0: it was asked to; 1: it gave up (`cause`)."""
        await self._ended.wait()
        return self._status

    async def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109 - told to actors
        """End the node. With `drain`, what runs may finish within `timeout` seconds (default: --shutdown-timeout).

        A call with drain=False during another one cuts it short: everything is killed at once.
        """
        if not drain:
            self._state = STOPPING
            self._kill_all()
            await self._end(self._status)
            return
        if self._state in (STARTING, READY):
            self._state = DRAINING
            self._tell_all()
            seconds = self.setup.args.shutdown_timeout if timeout is None else timeout
            async with self._closing:
                await self._drain(seconds)
            await self._end(self._status)
        await self._ended.wait()

    def kill(self, name: str) -> None:
        """End one actor as a crash would (for tests and for operators); it is replaced like any that dies."""
        self._children[name].running.kill()

    # ------------------------------------------------------------------ life of one actor

    async def _launch(self, spec: ActorSpec) -> None:
        assert self._placement is not None
        # Seconds since 1970, so that a node started later on the same endpoint has greater epochs, too.
        self._epoch = max(self._epoch + 1, int(time.time()))
        running = await self._placement.launch(spec, self._epoch)
        child = self._children[spec.name] = Child(spec, self._epoch, running)
        self._spawn(self._watch(child), f"watch {spec.name}")
        self._tell_all()

    async def _watch(self, child: Child) -> None:
        ended = await child.running.wait()
        self._router.drain(1 << 20)  # its last words
        child.state = _DEAD
        self._tell_all()
        if child.replaced or self._state in (DRAINING, STOPPING):
            return
        why = child.failure or f"{child.spec.name} {ended.text}"
        logger.error("%s (pid %d) is dead: %s", child.spec.name, child.running.pid, why)
        if not self._started_once:
            self._give_up(why if child.failure else f"{why} before it was ready")
        else:
            await self._replace(child, why)

    async def _replace(self, dead: Child, why: str) -> None:
        """Restart the whole group of `dead`, unless that is done already or the budget is spent."""
        domain = dead.spec.domain
        async with self._locks.setdefault(domain, asyncio.Lock()):
            if self._children.get(dead.spec.name) is not dead or self._state != READY:
                return
            number = self._count_restart(domain)
            if number > self.setup.args.max_restarts:
                window = self.setup.args.restart_window
                self._give_up(f"{domain} died {number} times within {window:g} s; the last time: {why}")
                return
            group = [c for c in self._children.values() if c.spec.domain == domain]
            for child in group:  # the old one is dead for certain before a new one can speak
                child.replaced = True
                child.running.kill()
            await asyncio.gather(*(child.running.wait() for child in group))
            await asyncio.sleep(min(0.1 * 2 ** (number - 2), 5.0) if number > 1 else 0.0)
            if self._state == READY:
                logger.warning("restarting %s (%d of %d)", domain, number, self.setup.args.max_restarts)
                await asyncio.gather(*(self._launch(child.spec) for child in group))

    def _count_restart(self, domain: str) -> int:
        now = time.monotonic()
        times = self._restarts.setdefault(domain, deque())
        while times and now - times[0] > self.setup.args.restart_window:
            times.popleft()
        times.append(now)
        return len(times)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for child in list(self._children.values()):
                stuck = child.stuck_for(now)
                if stuck > self.setup.args.watchdog_timeout and not child.failure:
                    child.failure = f"{child.spec.name} showed no progress for {stuck:.0f} s"
                    child.running.dump()
                    await asyncio.sleep(0.2)  # let it print
                    child.running.kill()
            self._tell(GATEWAY, self._node_state())

    # ------------------------------------------------------------------ the end

    def _give_up(self, cause: str) -> None:
        if self._state == STOPPING:
            return
        self._state = STOPPING
        self.cause = cause
        self._status = 1
        logger.error("the node ends: %s", cause)
        self._spawn(self._end(1), "end")
        self._signal_change()

    async def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        order = [name for name in DRAIN_ORDER if name in self._children]
        order += [name for name in self._children if name not in order]
        for name in order:
            child = self._children[name]
            left = max(0.0, deadline - time.monotonic())
            if child.state in (READY, STARTING) and self._tell(name, Shutdown(drain=child.state == READY, timeout=left)):
                child.state = STOPPING
                self._router.flush()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.running.wait(), left + STOP_SECONDS)
            child.running.kill()

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.running.kill()

    async def _end(self, status: int) -> None:
        """Kill what is left, release everything, tell `wait`. Idempotent."""
        self._state = STOPPING
        self._kill_all()
        async with self._closing:
            if self._ended.is_set():
                return
            await asyncio.gather(*(child.running.wait() for child in self._children.values()))
            current = asyncio.current_task()
            for task in self._tasks - {current}:
                task.cancel()
            self._router.abort()
            if self._placement is not None:
                self._placement.close()
            if self._own_context:
                self._context.destroy(linger=0)
            if self._folder is not None:
                self._folder.remove()
            self._status = status
            self._ended.set()
            self._signal_change()

    # ------------------------------------------------------------------ messages

    def _on_message(self, message: Any, peer: str, buffers: list[bytes]) -> None:
        child = self._children.get(peer)
        if child is None:
            return
        if isinstance(message, Heartbeat):
            child.beat(message)
        elif isinstance(message, Failed):
            child.failure = message.message
        elif isinstance(message, Ready) and child.state == STARTING:
            child.state = READY
            child.info = message.info
            child.heard_at = child.progress_at = time.monotonic()
            self._tell_all()

    def _on_up(self, peer: str) -> None:
        self._tell(peer, self._node_state())

    def _node_state(self) -> NodeState:
        return NodeState(state=self.state, actors=list(self.actors().values()))

    def _tell(self, name: str, message: NodeState | Shutdown) -> bool:
        peer = self._router.get(name)
        return peer is not None and peer.send(message)

    def _tell_all(self) -> None:
        """Something changed: everybody hears, and whoever waits for a change wakes."""
        state = self._node_state()
        for name in self._children:
            self._tell(name, state)
        self._signal_change()

    def _signal_change(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
            self._give_up(f"the supervisor failed: {error}")
