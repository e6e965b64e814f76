"""The base of every actor: a typed mailbox, links to peers, and one task group that owns all its work.

A subclass declares what it hears and where it dials, and shows only its behaviour::

    class Scheduler(Actor):
        name = SCHEDULER
        binds = (Bind("scheduler", inboxes={TOKENIZER: TokenizerToScheduler, ...}),)
        dials = ()                      # the supervisor is always dialled

        async def on_Submit(self, message: Submit, peer: str) -> None: ...

Life: sockets open → dialled links up → `start` → Ready → messages are handled → Shutdown → `drain` → `stop` → sockets close.
Whoever runs it (a process of its own, `host.main`, or a task, `placement.Tasks`) awaits `run`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import typing
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import msgspec
import zmq

from radixcast.actors.link import Buffers
from radixcast.actors.port import Callbacks, Port
from radixcast.actors.setup import SUPERVISOR, NodeSetup
from radixcast.actors.sockets import Bind, Dial, Sockets
from radixcast.protocols.errors import StartupError
from radixcast.protocols.internal import Failed, Heartbeat, NodeState, Ready, Shutdown, SupervisorToActor

HEARTBEAT_SECONDS = 1.0
"""How often the supervisor hears of us."""
LINK_SECONDS = 60.0
"""How long a dialled peer may take to answer at start-up."""
LAST_WORDS_SECONDS = 2.0
"""How long an actor that fails tries to tell the supervisor why."""
MAILBOX_LIMIT = 4096
"""Messages read and not yet handled; beyond, sockets are left alone and the senders' windows fill."""

__all__ = ["Actor", "Bind", "Dial"]


class Mail:
    """One kind of work in the mailbox: its handler and its counters (seconds)."""

    __slots__ = ("count", "handle_seconds", "handler", "name", "wait_seconds")

    def __init__(self, name: str, handler: Callable[..., Any]) -> None:
        self.name = name
        self.handler = handler
        self.count = 0
        self.wait_seconds = 0.0
        self.handle_seconds = 0.0


class Actor:
    """Sockets, decoding, dispatch, timing and errors; a subclass adds `on_<Message>(self, message, peer)` methods.

    Handlers may be plain or async functions; they run one after another in order of arrival. An exception in a handler
    goes to `on_error`, which fails the request that the message belongs to, not the actor. An exception anywhere else (links,
    `after_batch`, spawned work, `on_error` itself) ends the actor: `run` raises it and the supervisor is told.
    """

    name: ClassVar[str]
    binds: ClassVar[tuple[Bind, ...]] = ()
    dials: ClassVar[tuple[Dial, ...]] = ()

    def __init__(self, setup: NodeSetup, epoch: int) -> None:
        self.setup = setup
        self.args = setup.args
        self.model = setup.model
        self.epoch = epoch
        self.progress = 0
        """Grows with every unit of work; told in heartbeats."""
        self.listen_fd: int | None = None
        """Descriptor of a listening socket handed down by the supervisor (the gateway's)."""
        self.buffers: Buffers = ()
        """Buffer frames of the message that is being handled."""
        self.log = logging.getLogger(self.name)
        self._sockets = Sockets(setup, self.name, epoch)
        self._mailbox: deque[tuple[Mail, tuple[Any, ...], Buffers, float]] = deque()
        self._wake = asyncio.Event()
        self._readable: set[Port] = set()
        self._arrived = 0.0
        self._started = False
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop
        self._ready = Ready()
        self._mails = self._dispatch_table()
        self._events = {n: Mail(n, getattr(self, n)) for n in ("on_link_up", "on_link_down", "on_writable")}
        self._calls = Mail("call", lambda function, *args: function(*args))

    # -- to be overridden

    async def start(self) -> None:
        """Load what is needed; links are up already. Raise StartupError for what the operator must change."""

    async def stop(self) -> None:
        """Release what `start` took."""

    async def drain(self, seconds: float) -> None:
        """Finish what runs, for at most so many seconds: the supervisor asked for an orderly end. Messages go on coming."""

    async def after_batch(self) -> None:
        """Called when all messages that had arrived are handled: the place to schedule."""

    def on_link_up(self, peer: str) -> None:
        """`peer` (not the supervisor) said hello, the first time or again with a new epoch. Told after `start`, like mail."""

    def on_link_down(self, peer: str, reason: str) -> None:
        """The link was reset or `peer` died: nothing sent and unacknowledged may be taken to have arrived."""

    def on_writable(self, peer: str) -> None:
        """A full window to `peer` has room again."""

    async def on_error(self, error: Exception, message: msgspec.Struct, peer: str) -> None:
        """A handler raised while handling `message`. Raising here ends the actor."""
        self.log.error("%s of %s failed", type(message).__name__, peer, exc_info=error)

    async def on_NodeState(self, message: NodeState, peer: str) -> None:
        """The supervisor tells what it sees."""

    def ready_info(self) -> dict[str, Any]:
        """Plain data that Ready carries to the supervisor (asked once, after `start`)."""
        return {}

    @property
    def busy(self) -> bool:
        """Whether work is waiting or running (for the hang detector)."""
        return False

    def stats(self) -> dict[str, float]:
        """Numbers for heartbeats and metrics; `message_stats` is added to them."""
        return {}

    # -- to be used

    def send(self, peer: str, message: msgspec.Struct, buffers: Buffers = ()) -> bool:
        """Queue `message` for `peer`; never blocks. False (and nothing queued) when the link is down or its window full.

        It leaves when the batch in hand is done, or when a handler awaits.
        """
        target = self._sockets.get(peer)
        return target is not None and target.send(message, buffers)

    def writable(self, peer: str) -> bool:
        """Whether `send` to `peer` would be taken. When its window is full, `on_writable` will tell that there is room."""
        target = self._sockets.get(peer)
        if target is None:
            return False
        return target.link.writable or target.link.send(b"")  # which takes nothing, and notes that room is wanted

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` in the actor's task group; an exception in it ends the actor. Ended (cancelled) with the actor."""
        if self._group is None:
            work.close()
            raise RuntimeError(f"{self.name} is not running: {name} can't be spawned")
        self._group.create_task(work, name=f"{self.name}:{name}")

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        """From another thread: run `function(*args)` on the actor's loop, followed by `after_batch`."""
        self._loop.call_soon_threadsafe(self._post, self._calls, (function, *args))

    def request_stop(self) -> None:
        """Stop without draining. From the actor's own loop."""
        self._stopping.set()

    def message_stats(self) -> dict[str, float]:
        """For each kind of message handled: how many, how long they waited and how long handling took (seconds, sums)."""
        stats: dict[str, float] = {}
        for mail in (*self._mails.values(), *self._events.values(), self._calls):
            if mail.count:
                stats[f"messages.{mail.name}.count"] = mail.count
                stats[f"messages.{mail.name}.wait_seconds"] = round(mail.wait_seconds, 6)
                stats[f"messages.{mail.name}.handle_seconds"] = round(mail.handle_seconds, 6)
        return stats

    # -- life

    async def run(self, context: zmq.Context[Any]) -> None:
        """Live from opening the sockets to closing them. Raises what ended the actor, after telling the supervisor.

        Raises StartupError when `start` did, or when a peer that it dials does not answer.
        """
        self._loop = asyncio.get_running_loop()
        try:
            error = await self._work(context)
        except asyncio.CancelledError:  # killed: no last words
            self._sockets.abort()
            raise
        if error is not None:
            self.log.error("%s", error, exc_info=None if isinstance(error, StartupError) else error)
            await self._sockets.reach(SUPERVISOR, LAST_WORDS_SECONDS)
            self.send(SUPERVISOR, Failed(message=f"{self.name}: {_text(error)}", startup=not self._started))
        await self._sockets.close()
        if error is not None:
            raise error

    async def _work(self, context: zmq.Context[Any]) -> Exception | None:
        """Everything between opening and closing the sockets. Returns what ended it, None for an orderly end."""
        try:
            self._open(context)
            async with asyncio.TaskGroup() as self._group:
                self.spawn(self._handle_mail(), "mailbox")
                self.spawn(self._beat(), "heartbeat")
                await self._live()
                raise _Ended
        except BaseExceptionGroup as errors:
            _, rest = errors.split(_Ended)
            return None if rest is None else _first(rest)
        except Exception as error:
            return error
        finally:
            self._group = None

    async def _live(self) -> None:
        stopping = asyncio.ensure_future(self._stopping.wait())
        starting = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await stopping
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.wait({starting, stopping})
            await self.stop()

    async def _start(self) -> None:
        deadline = self._loop.time() + LINK_SECONDS
        while waiting := self._sockets.missing():
            if self._loop.time() > deadline:
                raise StartupError(f"{self.name} got no answer from {' and '.join(waiting)} in {LINK_SECONDS:g} s")
            await asyncio.sleep(0.005)
        await self.start()
        self._started = True
        self._wake.set()
        self._ready = Ready(info=self.ready_info())
        self.send(SUPERVISOR, self._ready)
        self.log.debug("ready")

    async def on_Shutdown(self, message: Shutdown, peer: str) -> None:
        """The supervisor wants us to end."""
        if message.drain and self._started:
            self.spawn(self._drain_and_stop(message.timeout), "drain")
        else:
            self._stopping.set()

    async def _drain_and_stop(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.drain(seconds)
        except TimeoutError:
            self.log.warning("not drained after %g s", seconds)
        self._stopping.set()

    async def _beat(self) -> None:
        while True:
            beat = Heartbeat(progress=self.progress, busy=self.busy, stats=self.stats() | self.message_stats())
            self.send(SUPERVISOR, beat)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _open(self, context: zmq.Context[Any]) -> None:
        callbacks: Callbacks = {
            "on_message": self._on_message,
            "on_up": self._on_up,
            "on_down": self._on_down,
            "on_writable": self._on_writable,
            "on_readable": self._on_readable,
        }
        self._sockets.dial(context, Dial(SUPERVISOR, "supervisor", SupervisorToActor), **callbacks)
        for bind in self.binds:
            self._sockets.bind(context, bind, **callbacks)
        for dial in self.dials:
            self._sockets.dial(context, dial, **callbacks)

    # -- mailbox

    def _dispatch_table(self) -> dict[type, Mail]:
        """Message type -> handler, for everything that a peer may send. Raises TypeError when a handler is missing."""
        inboxes = [inbox for bind in self.binds for inbox in bind.inboxes.values()]
        inboxes += [dial.inbox for dial in self.dials]
        table: dict[type, Mail] = {}
        for inbox in (SupervisorToActor, *inboxes):
            for kind in typing.get_args(inbox) or (inbox,):
                handler = getattr(self, f"on_{kind.__name__}", None)
                if handler is None:
                    raise TypeError(f"{type(self).__name__} has no on_{kind.__name__}, but peers may send {kind.__name__}")
                table[kind] = Mail(kind.__name__, handler)
        return table

    def _post(self, mail: Mail, args: tuple[Any, ...], buffers: Buffers = (), arrived: float | None = None) -> None:
        self._mailbox.append((mail, args, buffers, time.perf_counter() if arrived is None else arrived))
        self._wake.set()

    def _on_message(self, message: Any, peer: str, buffers: list[bytes]) -> None:
        item = (self._mails[type(message)], (message, peer), buffers, self._arrived or time.perf_counter())
        if not self._started and peer == SUPERVISOR:
            self._mailbox.appendleft(item)
        else:
            self._mailbox.append(item)
        self._wake.set()

    def _on_up(self, peer: str) -> None:
        if peer != SUPERVISOR:
            self._post(self._events["on_link_up"], (peer,))
        elif self._started:
            self.send(SUPERVISOR, self._ready)

    def _on_down(self, peer: str, reason: str) -> None:
        if peer != SUPERVISOR:
            self._post(self._events["on_link_down"], (peer, reason))

    def _on_writable(self, peer: str) -> None:
        self._post(self._events["on_writable"], (peer,))

    def _on_readable(self, port: Port) -> None:
        self._readable.add(port)
        self._wake.set()

    async def _handle_mail(self) -> None:
        more = False
        while True:
            if more:
                await asyncio.sleep(0)  # heartbeats and other tasks get their turn under load
            else:
                await self._wake.wait()
            self._wake.clear()
            more = await self._handle_batch()

    async def _handle_batch(self) -> bool:
        """Read what has arrived, handle it, flush. True when there is more."""
        if len(self._mailbox) < MAILBOX_LIMIT:
            self._arrived = time.perf_counter()
            readable, self._readable = self._readable, set()
            self._readable.update(port for port in readable if port.drain())
            self._arrived = 0.0
        handled = 0
        last = time.perf_counter()
        while self._mailbox and (self._started or self._is_urgent()):
            mail, args, self.buffers, arrived = self._mailbox.popleft()
            mail.wait_seconds += last - arrived
            await self._handle(mail, args)
            now = time.perf_counter()
            mail.handle_seconds += now - last
            mail.count += 1
            last = now
            handled += 1
        if handled and self._started:
            await self.after_batch()
        self._sockets.flush()
        return bool(self._readable) and len(self._mailbox) < MAILBOX_LIMIT

    async def _handle(self, mail: Mail, args: tuple[Any, ...]) -> None:
        try:
            result = mail.handler(*args)
            if result is not None and asyncio.iscoroutine(result):
                await result
        except Exception as error:
            if type(args[0]) not in self._mails:
                raise
            await self.on_error(error, args[0], args[1])

    def _is_urgent(self) -> bool:
        """Before `start` is done only the supervisor is heard (it may want us to stop)."""
        _, args, _, _ = self._mailbox[0]
        return len(args) == 2 and args[1] == SUPERVISOR and isinstance(args[0], Shutdown | NodeState)


class _Ended(Exception):
    """Ends the task group of an actor that was asked to stop."""


def _first(error: BaseException) -> Exception:
    """The first exception inside groups of them. One that is no Exception (KeyboardInterrupt) is raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, Exception):
        raise error
    return error


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StartupError) else f"{type(error).__name__}: {error}"
