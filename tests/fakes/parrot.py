"""A scheduler that answers every request with its own prompt, one token a step: text in and text out without a model."""

from __future__ import annotations

import asyncio
from collections import deque

from radixcast.actors.actor import Actor, Bind
from radixcast.actors.setup import DETOKENIZER, SCHEDULER, TOKENIZER
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.internal import (
    END_EOS,
    END_LENGTH,
    AbortOf,
    Capacity,
    ControlDone,
    ControlOf,
    DeltaEnd,
    Finished,
    Open,
    Submit,
    TokenDeltas,
    TokenizerToScheduler,
)
from radixcast.protocols.public import SchedulerStats


class Parrot(Actor):
    """Output token p of a request is token p of its prompt, then EOS."""

    name = SCHEDULER
    binds = (Bind("scheduler", inboxes={TOKENIZER: TokenizerToScheduler, DETOKENIZER: Finished}),)

    async def start(self) -> None:
        self.rows: dict[int, tuple[Submit, deque[int], int]] = {}
        self.finished: dict[int, int] = {}
        self._last = 0
        self.spawn(self._step_forever(), "steps")

    def on_link_up(self, peer: str) -> None:
        if peer == TOKENIZER:
            self.send(peer, Capacity(total_tokens=100_000, max_running=8, context_length=self.model.context_length))

    def on_Submit(self, message: Submit, peer: str) -> None:
        self._last += 1
        prompt, earlier = unpack_ids(message.prompt_ids).tolist(), len(message.output_ids) // 4
        self.rows[self._last] = (message, deque([*prompt, *message.eos_ids][earlier:]), earlier)
        opened = Open(
            handle=self._last,
            client=message.client,
            rid=message.rid,
            attempt=message.attempt,
            choice=message.choice,
            prompt_tail=b"",
            output_ids=message.output_ids,
            sampling=message.sampling,
            prompt_tokens=len(prompt),
            stream=message.stream,
        )
        self.send(DETOKENIZER, opened)

    def on_AbortOf(self, message: AbortOf, peer: str) -> None:
        hit = [h for h, (s, _, _) in self.rows.items() if message.all or message.rid in (s.rid, s.group)]
        ends = [DeltaEnd(handle=h, reason=0) for h in hit]
        for handle in hit:
            del self.rows[handle]
        self.send(DETOKENIZER, TokenDeltas(handles=b"", counts=b"", tokens=b"", ends=ends))

    def on_ControlOf(self, message: ControlOf, peer: str) -> None:
        self.send(TOKENIZER, ControlDone(client=message.client, id=message.id, stats=SchedulerStats(running=len(self.rows))))

    def on_Finished(self, message: Finished, peer: str) -> None:
        ended = dict(zip(unpack_ids(message.handles).tolist(), unpack_ids(message.positions).tolist(), strict=True))
        self.finished |= ended
        for handle in ended:
            self.rows.pop(handle, None)

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            if self.rows:
                self._step()

    def _step(self) -> None:
        handles, tokens, ends = list(self.rows), [], []
        for handle in handles:
            submit, rest, count = self.rows[handle]
            tokens.append(rest.popleft())
            self.rows[handle] = (submit, rest, count + 1)
            if tokens[-1] in submit.eos_ids:
                ends.append(DeltaEnd(handle=handle, reason=END_EOS, token=tokens[-1]))
            elif not rest or count + 1 == submit.sampling.max_new_tokens:
                ends.append(DeltaEnd(handle=handle, reason=END_LENGTH))
        for end in ends:
            del self.rows[end.handle]
        counts = pack_ids([1] * len(handles))
        self.send(DETOKENIZER, TokenDeltas(handles=pack_ids(handles), counts=counts, tokens=pack_ids(tokens), ends=ends))
