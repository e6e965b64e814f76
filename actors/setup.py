"""What every actor is started with, and where the node's sockets are.

The supervisor writes one `NodeSetup` into the run folder (0700); an actor reads it and knows its whole world.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs

SETUP_FILE = "setup.json"

TOKENIZER, SCHEDULER, MODEL_RUNNER, DETOKENIZER, GATEWAY, SUPERVISOR = (
    "tokenizer",
    "scheduler",
    "model_runner",
    "detokenizer",
    "gateway",
    "supervisor",
)
CLIENT_PREFIX = "client:"
"""Link names of clients start so; no actor's name does."""


class Endpoints(msgspec.Struct, frozen=True):
    """ZMQ addresses. ROUTERs bind them, everybody else dials with a DEALER."""

    public_in: str
    """Tokenizer; clients dial it (--zmq-endpoint)."""
    public_out: str
    """Detokenizer; clients dial it too, told by Welcome."""
    scheduler: str
    """The hub inside: tokenizer, detokenizer and runner dial it."""
    supervisor: str
    """Every actor dials it."""


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is the same for all actors of a node."""

    args: ServerArgs
    model: ModelSpec
    endpoints: Endpoints
    run_dir: str
    curve_server_secret: str = ""
    curve_server_public: str = ""
    """Z85 keys when public endpoints are tcp://; empty: ipc or inproc."""

    def write(self) -> Path:
        """Write into the run folder, readable by its owner only."""
        path = Path(self.run_dir) / SETUP_FILE
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self))
        return path

    @classmethod
    def read(cls, run_dir: str | Path) -> NodeSetup:
        """Read what `write` wrote."""
        return msgspec.json.decode((Path(run_dir) / SETUP_FILE).read_bytes(), type=cls)
