"""The folder of one running node: 0700, short enough for ipc paths, gone when the node is.

It is locked (flock) while its node lives, so a folder that a killed node left behind is known as such and removed by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

import zmq

from radixcast.actors.setup import Endpoints, NodeSetup
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs

_PREFIX = "radixcast-"
_LONGEST = 80  # an ipc path may have 107 bytes; the longest name inside takes 20


class RunFolder:
    """Creates the folder (and removes what dead nodes left); `remove` ends it. Raises StartupError when none can be made."""

    def __init__(self, parent: str | Path | None = None) -> None:
        base = Path(parent) if parent is not None else _base()
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            raise StartupError(f"no run folder can be made in {base}: {error}") from error
        if len(os.fsencode(self.path)) > _LONGEST:
            self.path.rmdir()
            raise StartupError(f"{base} is too long a path for sockets; set TMPDIR to a shorter one")
        # Locked under another name first: whoever sees `lock` unlocked may take the folder for dead.
        self._lock = os.open(self.path / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "lock.new").rename(self.path / "lock")
        _remove_dead(base)

    def remove(self) -> None:
        """Delete the folder with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def process_setup(args: ServerArgs, model: ModelSpec, folder: RunFolder) -> NodeSetup:
    """The setup of a node whose actors are processes: ipc sockets in the folder, public ones where --zmq-endpoint says.

    With tcp:// the output endpoint takes the next port (port 0: two free ones), and a CURVE key pair is made for this run.
    Raises StartupError for an endpoint that can't be used.
    """

    def local(name: str) -> str:
        return f"ipc://{folder.path}/{name}"

    public_in, public_out = local("public_in"), local("public_out")
    secret = public = ""
    given = args.zmq_endpoint
    if given is not None and given.startswith("ipc://"):
        if len(os.fsencode(given)) > 100:
            raise StartupError(f"--zmq-endpoint {given} is too long for a socket path (at most 100 bytes)")
        public_in, public_out = given, f"{given}.out"
    elif given is not None:
        public_in, public_out = _tcp_pair(given)
        secret, public = (key.decode() for key in reversed(zmq.curve_keypair()))
    return NodeSetup(
        args=args,
        model=model,
        endpoints=Endpoints(public_in, public_out, local("scheduler"), local("supervisor")),
        run_dir=str(folder.path),
        curve_server_secret=secret,
        curve_server_public=public,
    )


def _tcp_pair(endpoint: str) -> tuple[str, str]:
    host, _, port_text = endpoint.removeprefix("tcp://").rpartition(":")
    if not host or not port_text.isdecimal() or int(port_text) > 65534:
        raise StartupError(f"--zmq-endpoint must be tcp://HOST:PORT, got {endpoint}")
    port = int(port_text)
    ports = (port, port + 1) if port else _free_ports()
    return f"tcp://{host}:{ports[0]}", f"tcp://{host}:{ports[1]}"


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def _base() -> Path:
    """$XDG_RUNTIME_DIR when it can be written, else the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) < _LONGEST // 2 and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime)
    temporary = tempfile.gettempdir()
    return Path(temporary) if len(os.fsencode(temporary)) < _LONGEST - 24 else Path("/tmp")


def _remove_dead(base: Path) -> None:
    """Remove the folders of nodes that were killed: ours, with a lock that nobody holds."""
    for lock in base.glob(f"{_PREFIX}*/lock"):
        with contextlib.suppress(OSError):
            if lock.stat().st_uid != os.getuid():
                continue
            fd = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)
