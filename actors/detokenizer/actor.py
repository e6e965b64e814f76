"""The detokenizer: tokens from the scheduler in, text to clients out.

::

    scheduler ──► Open, TokenDeltas (one message a step)        TextDelta ──► clients
              ◄── Finished (handle, position that counts)       EndAck    ◄── clients

It owns the text of every running output and where it ends. A client that reads slowly gets one merged delta when it reads
again; one that is gone for GONE_SECONDS has its outputs ended. Knows nothing of prompts, KV or HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from radixcast.actors.actor import Actor, Bind, Dial
from radixcast.actors.detokenizer.output import Output
from radixcast.actors.detokenizer.token_table import TokenTable
from radixcast.actors.setup import CLIENT_PREFIX, DETOKENIZER, SCHEDULER, NodeSetup
from radixcast.actors.tokenizer.loading import load_tokenizer
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo, InternalError, Overloaded, RequestAborted, RequestError
from radixcast.protocols.internal import DeltaEnd, DeltaLogprobs, Finished, NodeState, Open, SchedulerToDetokenizer, TokenDeltas
from radixcast.protocols.public import ClientToDetokenizer, EndAck, Finish, TextDelta, Usage

GONE_SECONDS = 10.0
"""How long a client may be away (not attached yet, or its link down) before its outputs are ended."""


class DetokenizerActor(Actor):
    """See the module."""

    name = DETOKENIZER
    binds = (Bind("public_out", inboxes={CLIENT_PREFIX: ClientToDetokenizer}),)
    dials = (Dial(SCHEDULER, "scheduler", SchedulerToDetokenizer),)

    def __init__(self, setup: NodeSetup, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(setup, epoch)
        self._clock = clock
        self._table = TokenTable(None)
        self._outputs: dict[int, Output] = {}
        """By handle, until their last delta is sent."""
        self._dirty: dict[int, Output] = {}
        """Outputs with a delta to send; those of clients that can't be written to stay here."""
        self._finished: list[tuple[int, int]] = []
        """(handle, position) to tell the scheduler."""
        self._away: dict[str, float] = {}
        """Clients that could not be reached, and since when."""
        self._attached: set[str] = set()
        self._blocked: set[str] = set()
        """Clients whose last send was refused; the link tells when they can take more."""
        self._tokens = 0

    async def start(self) -> None:
        """Load the tokenizer."""
        self._table = TokenTable(load_tokenizer(self.model), self.model.config.vocab_size)
        self.spawn(self._sweep_forever(), "sweep")

    async def drain(self, seconds: float) -> None:
        """Let running outputs end."""
        while self._outputs:  # noqa: ASYNC110 - once, at the end
            await asyncio.sleep(0.01)

    # -- from the scheduler

    def on_Open(self, message: Open, peer: str) -> None:
        """An output begins, or goes on after an earlier life."""
        try:
            output = Output(message, self._table)
        except RequestError as error:
            self._refuse(message, error.info)
            return
        self._outputs[message.handle] = output
        if output.finish:
            self._end(output)

    def on_TokenDeltas(self, message: TokenDeltas, peer: str) -> None:
        """All tokens of one step. Rows of outputs that have ended are ignored: their Finished is on its way."""
        handles = unpack_ids(message.handles).tolist()
        counts = unpack_ids(message.counts).tolist()
        tokens = unpack_ids(message.tokens).tolist()
        ends = {end.handle: end for end in message.ends}
        logprobs = {part.handle: part for part in message.logprobs}
        self._take_counts(message, handles)
        start = 0
        for handle, count in zip(handles, counts, strict=True):
            stop = start + count
            output = self._outputs.get(handle)
            if output is not None and not output.finish:
                self._take(output, tokens[start:stop], logprobs.get(handle), ends.pop(handle, None))
            start = stop
        for handle, end in ends.items():
            if (output := self._outputs.get(handle)) and not output.finish:
                self._take(output, [], logprobs.get(handle), end)
        self._tokens += len(tokens)
        self.progress += len(tokens)

    def _take_counts(self, message: TokenDeltas, handles: list[int]) -> None:
        told = (("cached", message.cached), ("retractions", message.retractions), ("forced", message.forced))
        for field, data in told:
            for handle, value in zip(handles, unpack_ids(data).tolist(), strict=False):
                if output := self._outputs.get(handle):
                    setattr(output, field, value)

    def _take(self, output: Output, ids: list[int], logprobs: DeltaLogprobs | None, end: DeltaEnd | None) -> None:
        """One row. A fault of ours in it ends this output and no other."""
        try:
            output.take(ids, logprobs, end)
        except Exception as error:
            self.log.error("output %d failed", output.handle, exc_info=error)
            output.fail(_fault(error))
        if output.finish:
            self._end(output)
        elif output.waiting:
            self._dirty[output.handle] = output

    def _end(self, output: Output) -> None:
        self._finished.append((output.handle, output.position))
        self._dirty[output.handle] = output

    def _refuse(self, message: Open, error: ErrorInfo) -> None:
        """An output that can't even begin: its client hears why, the scheduler lets it go."""
        usage = Usage(prompt_tokens=message.prompt_tokens, completion_tokens=0)
        finish = Finish(reason="error", error=error)
        self.send(
            message.client,
            TextDelta(rid=message.rid, attempt=message.attempt, choice=message.choice, usage=usage, finish=finish),
        )
        self._finished.append((message.handle, 0))

    async def on_error(self, error: Exception, message: msgspec.Struct, peer: str) -> None:
        """A fault of ours while handling `message`: the outputs in it end, the others go on."""
        self.log.error("failed at %s from %s", type(message).__name__, peer, exc_info=error)
        if isinstance(message, Open):
            self._refuse(message, _fault(error))
        elif isinstance(message, TokenDeltas):
            for handle in unpack_ids(message.handles).tolist():
                if (output := self._outputs.get(handle)) and not output.finish:
                    output.fail(_fault(error))
                    self._end(output)

    # -- to clients and back to the scheduler

    async def after_batch(self) -> None:
        """Send what came up: one delta an output, one Finished for all."""
        self._flush()
        self._tell_finished()

    def _flush(self) -> None:
        for output in list(self._dirty.values()):
            self._send_delta(output)

    def _send_delta(self, output: Output) -> None:
        client = output.client
        if client in self._blocked:
            return
        delta = output.delta()
        if not self.send(client, delta):
            self._blocked.add(client)
            if client not in self._attached:
                self._away.setdefault(client, self._clock())
            return
        output.sent(delta)
        del self._dirty[output.handle]
        if output.finish:
            del self._outputs[output.handle]

    def _tell_finished(self) -> None:
        if self._finished:
            handles, positions = zip(*self._finished, strict=True)
            if self.send(SCHEDULER, Finished(handles=pack_ids(handles), positions=pack_ids(positions))):
                self._finished.clear()

    def on_EndAck(self, message: EndAck, peer: str) -> None:
        """The client holds the end; nothing is kept beyond sending it."""

    async def on_NodeState(self, message: NodeState, peer: str) -> None:
        """Nothing here depends on it."""

    # -- links

    def on_link_up(self, peer: str) -> None:
        """A client came (back), or the scheduler."""
        if peer.startswith(CLIENT_PREFIX):
            self._attached.add(peer)
            self._away.pop(peer, None)
            self._flush_client(peer)
        elif peer == SCHEDULER:
            self._tell_finished()

    def on_writable(self, peer: str) -> None:
        """A slow reader reads again."""
        if peer == SCHEDULER:
            self._tell_finished()
        else:
            self._flush_client(peer)

    def on_link_down(self, peer: str, reason: str) -> None:
        """A lost client may come back within GONE_SECONDS; without the scheduler no output can go on."""
        if peer.startswith(CLIENT_PREFIX):
            self._attached.discard(peer)
            self._away[peer] = self._clock()
        elif peer == SCHEDULER:
            error = Overloaded("the scheduler was lost while this output was running", code="scheduler_lost", retry_after=1.0)
            for output in self._outputs.values():
                if not output.finish:  # no held-back text: a client may submit again with the tokens that it holds
                    output.fail(error.info)
                self._dirty[output.handle] = output
            self._finished.clear()
            self._flush()

    def _flush_client(self, peer: str) -> None:
        self._blocked.discard(peer)
        for output in [o for o in self._dirty.values() if o.client == peer]:
            self._send_delta(output)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.sweep()

    def sweep(self) -> None:
        """End the outputs of clients that have been away too long."""
        now = self._clock()
        gone = {client for client, since in self._away.items() if now - since >= GONE_SECONDS}
        for client in gone:
            del self._away[client]
        self._blocked -= gone
        for output in [o for o in self._outputs.values() if o.client in gone]:
            if not output.finish:
                output.cut_off(Finish(reason="abort", error=RequestAborted("its client is gone").info))
                self._finished.append((output.handle, output.position))
            self._dirty.pop(output.handle, None)
            del self._outputs[output.handle]
        self._tell_finished()

    @property
    def busy(self) -> bool:
        """Never: this actor does all its work while it handles a message."""
        return False

    def stats(self) -> dict[str, float]:
        """Outputs in hand, deltas that wait for slow readers, tokens since start."""
        return {"outputs": len(self._outputs), "waiting_deltas": len(self._dirty), "tokens_total": self._tokens}


def _fault(error: Exception) -> ErrorInfo:
    return InternalError(f"the detokenizer failed: {type(error).__name__}").info
