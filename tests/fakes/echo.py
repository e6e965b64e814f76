"""A node of two tiny actors: a door that clients dial and a hub behind it that answers. What is said can also do harm."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

import msgspec

from radixcast.actors.actor import Actor, Bind, Dial
from radixcast.actors.setup import CLIENT_PREFIX, SCHEDULER, TOKENIZER
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig, ModelSpec


class Say(msgspec.Struct, frozen=True, tag=True):
    """Asked of the door by a client, and of the hub by the door."""

    text: str
    client: str = ""


class Echo(msgspec.Struct, frozen=True, tag=True):
    """The answer, the same way back."""

    text: str
    epoch: int
    client: str = ""


class Hub(Actor):
    """Answers what the door passes on."""

    name = SCHEDULER
    binds = (Bind("scheduler", inboxes={TOKENIZER: Say}),)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[str] = []
        self.hanging = False

    async def start(self) -> None:
        if self.args.chat_template == "refuse":
            raise StartupError("the hub does not want to start")
        if self.args.chat_template == "break":
            raise ZeroDivisionError("the hub breaks at start")
        if self.args.chat_template == "exit":
            os._exit(7)
        if self.listen_fd is not None:
            self._server = await asyncio.start_server(self._greet, sock=socket.socket(fileno=self.listen_fd))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d" % os.getpid())
        writer.close()

    @property
    def busy(self) -> bool:
        return self.hanging

    def on_Say(self, message: Say, peer: str) -> None:
        self.seen.append(message.text)
        if message.text in ("raise", "crash"):
            raise ValueError(message.text)
        if message.text == "die":
            os._exit(7)
        if message.text == "hang":
            self.hanging = True
            return
        if message.text == "freeze":
            time.sleep(3600)
        self.send(peer, Echo(message.text, self.epoch, message.client))

    async def on_error(self, error: Exception, message: msgspec.Struct, peer: str) -> None:
        if isinstance(message, Say) and message.text == "crash":
            raise error
        self.send(peer, Echo(f"error: {error}", self.epoch, message.client if isinstance(message, Say) else ""))

    async def drain(self, seconds: float) -> None:
        self.seen.append("drained")


class Door(Actor):
    """Passes what clients say on to the hub."""

    name = TOKENIZER
    binds = (Bind("public_in", inboxes={CLIENT_PREFIX: Say}),)
    dials = (Dial(SCHEDULER, "scheduler", Echo),)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.links: list[str] = []

    def on_link_up(self, peer: str) -> None:
        self.links.append(f"+{peer}")

    def on_link_down(self, peer: str, reason: str) -> None:
        self.links.append(f"-{peer}")

    async def on_Say(self, message: Say, peer: str) -> None:
        if message.text == "door?" or not self.send(SCHEDULER, Say(message.text, peer)):
            self.send(peer, Echo("door", self.epoch))

    async def on_Echo(self, message: Echo, peer: str) -> None:
        self.send(message.client, message)


def tiny_model() -> ModelSpec:
    """A model that nobody loads."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    return ModelSpec(name="tiny", path="tiny", config=config, weight_files=(), weight_format="random", tokenizer_file=None)
