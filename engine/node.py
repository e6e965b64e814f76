"""Assembles one node: run folder, setup, supervisor; and the socket that its gateway listens on."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time

from radixcast.actors.placement import node_specs
from radixcast.actors.run_folder import RunFolder, process_setup
from radixcast.actors.supervisor import Supervisor
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs

BACKLOG = 2048
"""Connections that wait to be accepted, also while a gateway is replaced."""


def assemble(args: ServerArgs, model: ModelSpec, listener: socket.socket | None = None) -> Supervisor:
    """The supervisor of a node with child processes, not started yet; without a listener the node has no gateway.

    Its run folder is removed when the node has ended. Raises StartupError.
    """
    folder = RunFolder()
    try:
        setup = process_setup(args, model, folder)
        return Supervisor(setup, node_specs(gateway=listener is not None), folder=folder, listener=listener)
    except BaseException:
        folder.remove()
        raise


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on (host, port); port 0 takes a free one. Raises StartupError with what the operator can change."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror}") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use; choose another one with --port (0: any)") from None
        if error.errno == errno.EACCES:
            raise StartupError(f"port {port} needs more rights; choose one above 1023 with --port") from None
        raise StartupError(f"can't listen on {host}, port {port}: {error.strerror}") from None


def url_of(listener: socket.socket) -> str:
    """http://… where the socket can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def process_age() -> float:
    """Seconds since this process was started, interpreter start included."""
    try:
        with open("/proc/self/stat", "rb") as file:
            started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, AttributeError):
        return time.monotonic() - _imported


_imported = time.monotonic()
