"""The base of every actor: a typed mailbox, links to peers, and one task group that owns all its work.

A subclass declares what it hears and where it dials, and shows only its behaviour::

    class Scheduler(Actor):
        name = SCHEDULER
        binds = (Bind("scheduler", inboxes={TOKENIZER: TokenizerToScheduler, ...}),)
        dials = ()                      # the supervisor is always dialled

        async def on_Submit(self, message: Submit, peer: str) -> None: ...

INTERFACE STUB: replaced by the implementation.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from radixcast.actors.setup import NodeSetup


@dataclass(frozen=True)
class Bind:
    """A ROUTER of this actor: `endpoint` is a field of Endpoints; `inboxes` maps a peer's name, or 'client:', to the
    union of messages that it may send."""

    endpoint: str
    inboxes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dial:
    """A DEALER of this actor to `peer`, at `endpoint` (a field of Endpoints); `inbox` is what the peer may send."""

    peer: str
    endpoint: str
    inbox: Any


class Actor:
    """Sockets, decoding, dispatch, timing and errors; a subclass adds `on_<Message>(self, message, peer)` methods.

    Handlers may be plain or async functions; they run one after another in order of arrival. An exception in a handler
    goes to `on_error`, which fails the request that the message belongs to, not the actor.
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

    # -- to be overridden

    async def start(self) -> None:
        """Load what is needed; links are up already. Raise StartupError for what the operator must change."""

    async def stop(self) -> None:
        """Release what `start` took."""

    async def after_batch(self) -> None:
        """Called when all messages that had arrived are handled: the place to schedule."""

    def on_link_up(self, peer: str) -> None:
        """`peer` said hello (first time, or again with a new epoch)."""

    def on_link_down(self, peer: str, reason: str) -> None:
        """The link was reset or `peer` died: nothing sent and unacknowledged may be taken to have arrived."""

    def on_writable(self, peer: str) -> None:
        """A full window to `peer` has room again."""

    async def on_error(self, error: Exception, message: msgspec.Struct, peer: str) -> None:
        """A handler raised while handling `message`."""

    @property
    def busy(self) -> bool:
        """Whether work is waiting or running (for the hang detector)."""
        return False

    def stats(self) -> dict[str, float]:
        """Numbers for heartbeats and metrics."""
        return {}

    # -- to be used

    def send(self, peer: str, message: msgspec.Struct) -> bool:
        """Queue `message` for `peer`; never blocks. False (and nothing queued) when the link is down or its window full."""
        raise NotImplementedError

    def writable(self, peer: str) -> bool:
        """Whether `send` to `peer` would be taken."""
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` in the actor's task group; an exception in it ends the actor."""
        raise NotImplementedError

    def call_soon_threadsafe(self, function: Any, *args: Any) -> None:
        """From another thread: run `function(*args)` on the actor's loop, followed by `after_batch`."""
        raise NotImplementedError
