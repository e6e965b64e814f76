"""`radixcast serve`: from checked arguments to an exit status.

Binds the listening socket first (a taken port costs no model load), resolves the model, starts the node, tells where it is,
and turns signals into its end. Imports neither torch nor an HTTP library: those live in the actors.

Exit status: 0 ended as asked, 1 could not start or gave up, 2 wrong usage, 128 + signal ended at once by a second signal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable

from msgspec.structs import replace

import radixcast
from radixcast.actors.host import configure_logging
from radixcast.actors.supervisor import Supervisor
from radixcast.models import resolve_model
from radixcast.node import assemble, is_loopback, listen, process_age, url_of
from radixcast.protocols.errors import StartupError
from radixcast.protocols.server_args import ServerArgs

log = logging.getLogger("serve")


def serve(args: ServerArgs) -> int:
    """Run a server until a signal ends it; returns the exit status. Raises StartupError when it can't start."""
    configure_logging("supervisor", args.log_level)
    listener = listen(args.host, args.port)
    with listener:
        args = replace(args, port=listener.getsockname()[1])
        if args.api_key is None and not is_loopback(args.host):
            print(_open_door(listener), file=sys.stderr, flush=True)
        model = resolve_model(args)
        supervisor = assemble(args, model, listener)
        return asyncio.run(_run(supervisor, listener))


async def _run(supervisor: Supervisor, listener: socket.socket) -> int:
    signals = _Signals(supervisor)
    signals.install()
    try:
        await supervisor.start()
    except StartupError:
        if signals.first is None:
            raise
        return signals.status(0)
    print(_banner(supervisor, url_of(listener)), flush=True)
    status = await supervisor.wait()
    if supervisor.cause:
        raise StartupError(supervisor.cause)
    return signals.status(status)


class _Signals:
    """SIGTERM and SIGINT: the first drains, a second one ends at once."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._tasks: list[asyncio.Task[None]] = []
        self.first: signal.Signals | None = None
        self._second: signal.Signals | None = None

    def install(self) -> None:
        """Take the signals over (main thread)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handler(number))

    def status(self, status: int) -> int:
        """The exit status of a node that ended with `status`."""
        return status if self._second is None else 128 + self._second

    def _handler(self, number: signal.Signals) -> Callable[[], None]:
        return lambda: self._on_signal(number)

    def _on_signal(self, number: signal.Signals) -> None:
        ready = self._supervisor.state == "ready"
        if self.first is None:
            self.first = number
            seconds = self._supervisor.setup.args.shutdown_timeout
            log.info("%s: %s", number.name, f"running requests get {seconds:g} s" if ready else "stopping")
            work = self._supervisor.shutdown(drain=ready)
        else:
            self._second = number
            log.warning("%s again: ending at once", number.name)
            work = self._supervisor.shutdown(drain=False)
        self._tasks.append(asyncio.get_running_loop().create_task(work))


def _banner(supervisor: Supervisor, url: str) -> str:
    setup = supervisor.setup
    key = f"\n              server key {setup.curve_server_public}" if setup.curve_server_public else ""
    return (
        f"\n  Radixcast {radixcast.__version__} serves {setup.model.name} (context {setup.model.context_length} tokens)\n"
        f"    HTTP      {url}  (OpenAI API: {url}/v1)\n"
        f"    ZMQ       {setup.endpoints.public_in}{key}\n"
        f"    start-up  {process_age():.2f} s\n"
        "  The server is up and ready to roll.\n"
    )


def _open_door(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    line = "!" * 100
    return (
        f"{line}\n!! WARNING: listening on {host}, port {port}, WITHOUT A KEY: whoever reaches it can use the model.\n"
        f"!! Set --api-key (or RADIXCAST_API_KEY), or listen on 127.0.0.1.\n{line}"
    )
