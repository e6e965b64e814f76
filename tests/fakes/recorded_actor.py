"""Actors without sockets: what they send is recorded, peers are writable or not as the test says, spawned work is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from radixcast.actors.actor import Actor
from radixcast.actors.setup import Endpoints, NodeSetup
from radixcast.protocols.model import ModelConfig, ModelSpec
from radixcast.protocols.server_args import ServerArgs


class Recorded(Actor):
    """Put in front of an actor class: `class Quiet(Recorded, TokenizerActor)`."""

    def record(self) -> None:
        """Call once, before anything is sent."""
        self.sent: list[tuple[str, msgspec.Struct]] = []
        self.deaf: set[str] = set()
        """Peers to which nothing can be sent now."""
        self.work: set[asyncio.Task[None]] = set()

    def send(self, peer: str, message: msgspec.Struct, buffers: Any = ()) -> bool:
        if peer in self.deaf:
            return False
        self.sent.append((peer, message))
        return True

    def writable(self, peer: str) -> bool:
        return peer not in self.deaf

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.work.add(asyncio.get_running_loop().create_task(work, name=name))

    def take(self, kind: type | None = None) -> list[Any]:
        """Messages sent since the last call, of one kind if asked."""
        messages = [m for _, m in self.sent if kind is None or isinstance(m, kind)]
        self.sent.clear()
        return messages

    async def say(self, message: msgspec.Struct, peer: str) -> None:
        """Deliver one message as the base class does, `after_batch` included."""
        try:
            result = getattr(self, f"on_{type(message).__name__}")(message, peer)
            if asyncio.iscoroutine(result):
                await result
        except Exception as error:
            await self.on_error(error, message, peer)
        await self.after_batch()


def model_spec(tokenizer_file: Path | None, *, vocab_size: int, **changes: Any) -> ModelSpec:
    """A model with no weights."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=changes.get("context_length", 128),
    )
    values: dict[str, Any] = {
        "name": "fake",
        "path": "fake",
        "config": config,
        "weight_files": (),
        "weight_format": "random",
        "tokenizer_file": str(tokenizer_file) if tokenizer_file else None,
        "context_length": 128,
    }
    return ModelSpec(**(values | changes))


def node_setup(model: ModelSpec, folder: Path, **args: Any) -> NodeSetup:
    """A node around `model`; nothing is ever bound at its endpoints."""
    return NodeSetup(
        args=ServerArgs(**args),
        model=model,
        endpoints=Endpoints(
            public_in="inproc://in", public_out="inproc://out", scheduler="inproc://scheduler", supervisor="inproc://supervisor"
        ),
        run_dir=str(folder),
    )
