"""A process of its own for one actor: what `python -P -m radixcast.actors.<name>` runs.

Its `__main__.py` is two lines::

    from radixcast.actors.host import main
    main(Scheduler)

The process never outlives the supervisor: the kernel kills it when its parent dies (PR_SET_PDEATHSIG), and it ends itself when
the supervisor's pipe closes. SIGINT is ignored (the supervisor decides), SIGTERM stops, SIGUSR1 prints every thread's stack.

Exit status: 0 stopped as asked, 1 crashed, 3 could not start (the operator has something to change).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from typing import NoReturn

import msgspec
import zmq

from radixcast.actors.actor import Actor
from radixcast.actors.setup import NodeSetup
from radixcast.protocols.errors import StartupError

STOPPED, CRASHED, NOT_STARTED = 0, 1, 3
"""Exit statuses."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(actor_class: type[Actor]) -> NoReturn:
    """Run one actor of this class to its end, as the command line says, and exit with its status."""
    arguments = _parse(actor_class.name)
    die_with_parent(arguments.parent_fd)
    set_process_name(f"rc:{actor_class.name}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        setup = NodeSetup.read(arguments.run_dir)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"{actor_class.name}: no usable setup in {arguments.run_dir}: {error}", file=sys.stderr)
        sys.exit(NOT_STARTED)
    configure_logging(actor_class.name, setup.args.log_level)
    actor = actor_class(setup, arguments.epoch)
    actor.listen_fd = arguments.listen_fd
    gc.freeze()  # what is imported stays: collections need not look at it again
    try:
        asyncio.run(_run(actor))
    except StartupError:
        sys.exit(NOT_STARTED)
    except Exception:  # logged by the actor, and told to the supervisor
        sys.exit(CRASHED)
    sys.exit(STOPPED)


async def _run(actor: Actor) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, actor.request_stop)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        await actor.run(context)
    finally:
        context.destroy(linger=100)


def _parse(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(f"radixcast.actors.{name}", description=f"The {name} actor; started by the supervisor.")
    parser.add_argument("--run-dir", required=True, help="folder with the node's setup")
    parser.add_argument("--epoch", type=int, required=True, help="this incarnation; greater than any earlier one")
    parser.add_argument("--listen-fd", type=int, help="listening socket to serve")
    parser.add_argument("--parent-fd", type=int, help="pipe whose end of file means that the supervisor is gone")
    return parser.parse_args()


def configure_logging(name: str, level: str) -> None:
    """Log lines to stderr: time, actor, level, message."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d {name:<12} %(levelname)-7s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def set_process_name(name: str) -> None:
    """Name shown by ps and top (15 characters; Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def die_with_parent(parent_fd: int | None = None) -> None:
    """Never outlive the parent: killed by the kernel (Linux), and by end of file on `parent_fd`, a pipe that it holds open."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_fd is not None:
        # A thread, so that it also works while the loop is busy. It sees a parent that died before prctl, too.
        threading.Thread(target=_exit_at_end_of_file, args=(parent_fd,), name="parent-watch", daemon=True).start()


def _exit_at_end_of_file(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
