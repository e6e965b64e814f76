#!/usr/bin/env python
"""A whole ZMQ client that uses nothing of Radixcast: the shape of one in another language (protocols/README.md).

    python scripts/zmq_client_example.py ENDPOINT "Once upon a time" [max_new_tokens]

ENDPOINT is what the server prints (--zmq-endpoint). It speaks the link rules in their simplest form: on a local socket nothing
is lost while both sides live, so a gap or a reset ends it, and nothing is ever sent twice.
"""

from __future__ import annotations

import secrets
import sys
import time
from typing import Any

import msgspec
import zmq

VERSION = 1
HELLO, DATA, ACK, RESEND, RESET = range(5)


class Link:
    """One DEALER: numbered messages out, messages in order back, acknowledgements by themselves."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, client_id: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, client_id.encode())
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.connect(endpoint)
        self.epoch = time.time_ns() // 1000
        self.peer_epoch = self.sent = self.received = 0
        self.send_frame(HELLO)
        while not self.peer_epoch:
            self.receive(timeout=10.0)

    def send_frame(self, kind: int, payload: bytes = b"") -> None:
        header = [VERSION, kind, self.epoch, self.peer_epoch, self.sent, self.received]
        self.socket.send_multipart([msgspec.msgpack.encode(header), payload])

    def send(self, message: dict[str, Any]) -> None:
        self.sent += 1
        self.send_frame(DATA, msgspec.msgpack.encode(message))

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None when something else came."""
        if not self.socket.poll(int(timeout * 1000)):
            raise SystemExit("no answer")
        header, *payload = self.socket.recv_multipart()
        _, kind, epoch, peer_epoch, seq, _ = msgspec.msgpack.decode(header)
        if kind == RESET or (self.peer_epoch and epoch != self.peer_epoch):
            raise SystemExit("the peer started anew; a complete client would submit again")
        if peer_epoch != self.epoch:
            return None
        self.peer_epoch = epoch
        if kind == HELLO:
            self.send_frame(ACK)
        if kind != DATA or seq <= self.received:
            return None
        if seq != self.received + 1:
            raise SystemExit("a message is missing; a complete client would say RESEND")
        self.received = seq
        self.send_frame(ACK)
        message: dict[str, Any] = msgspec.msgpack.decode(payload[0])
        return message


def wait_for(link: Link, kind: str) -> dict[str, Any]:
    """The next message of this type; a Refused ends the program."""
    while True:
        message = link.receive(timeout=60.0)
        if message is not None and message["type"] == kind:
            return message
        if message is not None and message["type"] == "Refused":
            raise SystemExit(f"refused: {message['error']['message']}")


def main() -> None:
    """Send one prompt and print its text as it comes."""
    endpoint, prompt = sys.argv[1:3]
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    context: zmq.Context[Any] = zmq.Context()
    client_id = f"client:example-{secrets.token_hex(6)}"
    requests = Link(context, endpoint, client_id)
    welcome = wait_for(requests, "Welcome")
    output = Link(context, welcome["output_endpoint"], client_id)

    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "seed": secrets.randbits(63)}
    requests.send({"type": "Generate", "rid": "r1", "text": prompt, "sampling": sampling})
    poller = zmq.Poller()
    for link in (requests, output):
        poller.register(link.socket, zmq.POLLIN)
    finish = None
    while finish is None:
        ready = dict(poller.poll(60_000))
        if requests.socket in ready and (message := requests.receive(1.0)) and message["type"] == "Refused":
            raise SystemExit(f"refused: {message['error']['message']}")
        if output.socket in ready and (delta := output.receive(1.0)) and delta["type"] == "TextDelta":
            print(delta.get("text", ""), end="", flush=True)
            finish = delta.get("finish")
        if not ready:
            raise SystemExit("no answer")
    output.send({"type": "EndAck", "rid": "r1"})
    print(f"\n[{finish['reason']}, {delta['usage']['completion_tokens']} tokens]")
    context.destroy(linger=200)


if __name__ == "__main__":
    main()
