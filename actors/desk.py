"""Desk: what one client has asked of a node and not yet got, and what to say again when an actor of the node was replaced.

Sans-IO core of the client class. Two links lead to a node: `inward` to its tokenizer (requests, aborts, questions) and
`outward` from its detokenizer (pieces of output). The owner tells when a link goes up or down and hands in what arrives; the
desk hands out what to send. The rules::

    tokenizer lost     what has not started yet is submitted again; what streams already is not touched
    detokenizer lost   everything is submitted again, with the output tokens held (Generate.output_ids) and a higher attempt
    scheduler lost     what streams ends with the code `scheduler_lost`, what does not is known lost when Welcome comes once
                       more: both are submitted again
    a piece missing    that request is submitted again
    cancelled          an Abort is said (again); nothing is resubmitted

Nothing is sent before both links are up: an output must have a way to come back. An id that was in use lately is used again
with a higher attempt: pieces of its former life may still come, and the node may not have let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from radixcast.actors.collect import DeltaGap
from radixcast.actors.stream import Stream
from radixcast.protocols.errors import DuplicateRequest, InternalError, Overloaded, RequestAborted, RequestError
from radixcast.protocols.public import (
    Abort,
    Control,
    ControlReply,
    Detokenize,
    DetokenizeReply,
    EndAck,
    Generate,
    Refused,
    TextDelta,
    Tokenize,
    TokenizeReply,
)

log = logging.getLogger(__name__)

MAX_FRUITLESS = 8
"""Resubmissions of one request without progress before it fails."""
MAX_REFUSALS = 120
"""Times that a resubmitted request is refused by a busy node (about once a second while it loads) before it fails."""

CANCEL_SECONDS = 10.0
"""A cancelled request whose end the node has not told by then is forgotten here."""

REMEMBERED_IDS = 8192
"""Ids of ended requests whose last attempt is remembered."""

SCHEDULER_LOST = "scheduler_lost"
"""Error code of an output that ended because the scheduler died."""

Question = Tokenize | Detokenize | Control
Reply = TokenizeReply | DetokenizeReply | ControlReply


class Way(Protocol):
    """A link as the desk needs it: takes a message, or not now (down, or its window is full)."""

    def send(self, message: msgspec.Struct) -> bool: ...


class Desk:
    """Open requests and questions of one client."""

    def __init__(self, later: Callable[[float, Callable[[], None]], object]) -> None:
        """`later(seconds, function)` runs the function after that time (loop.call_later)."""
        self._later = later
        self._inward: Way | None = None
        self._outward: Way | None = None
        self._streams: dict[str, Stream] = {}
        self._successors: dict[str, Stream] = {}
        self._last_attempts: OrderedDict[str, int] = OrderedDict()
        self._questions: dict[str, tuple[Question, asyncio.Future[Any]]] = {}
        self._queue: deque[msgspec.Struct | Stream] = deque()
        self._acks: deque[EndAck] = deque()

    @property
    def open_requests(self) -> int:
        """Requests whose end has not come."""
        return len(self._streams) + len(self._successors)

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent."""
        return not self._queue and not self._acks

    # ------------------------------------------------------------------ the user's side

    def submit(self, requests: list[Generate]) -> list[Stream]:
        """Open a stream for each request. Raises DuplicateRequest, and opens none, when one of the ids is in use.

        The id of a cancelled request may be used at once: its successor is sent when the node has told the end.
        """
        rids = [request.rid for request in requests]
        for i, rid in enumerate(rids):
            holder = self._streams.get(rid)
            if rid in rids[:i] or rid in self._successors or (holder is not None and not holder.cancelled):
                raise DuplicateRequest(f"request id {rid!r} is in use", param="rid")
        streams = [Stream(request, self._cancel) for request in requests]
        for stream in streams:
            if stream.rid in self._streams:
                self._successors[stream.rid] = stream
            else:
                self._open(stream)
        self.pump()
        return streams

    def ask(self, question: Question, answer: asyncio.Future[Any]) -> None:
        """Send a question; its Reply is `answer`'s result. Forgotten when `answer` is cancelled."""
        key = question.id
        self._questions[key] = (question, answer)
        answer.add_done_callback(lambda _: self._questions.pop(key, None))
        self._queue.append(question)
        self.pump()

    def abort(self, abort: Abort) -> None:
        """Say `abort` to the node; what it means here is cancelled, so that it is not submitted again whatever happens."""
        self._queue.append(abort)
        for stream in [*self._successors.values(), *self._streams.values()]:
            if not stream.cancelled and abort.names(stream.rid, stream.request.group):
                stream.cancelled = True
                self._await_end(stream, abort.reason)
        self.pump()

    def _cancel(self, stream: Stream, reason: str) -> None:
        if stream.known_to_node:
            self._queue.appendleft(Abort(rid=stream.rid, reason=reason, exact=True))
        self._await_end(stream, reason)
        self.pump()

    def _await_end(self, stream: Stream, reason: str) -> None:
        """The node tells the end of what it has got; not for ever, and not of what was not sent."""
        error = RequestAborted(reason or "cancelled")
        if stream.sent:
            self._later(CANCEL_SECONDS, lambda: self._end(stream, error))
        else:
            self._end(stream, error)

    # ------------------------------------------------------------------ the links' side

    def inward_up(self, way: Way) -> None:
        """The tokenizer is there (again)."""
        self._inward = way
        self.pump()

    def outward_up(self, way: Way) -> None:
        """The detokenizer is there (again)."""
        self._outward = way
        self.pump()

    def inward_down(self) -> None:
        """The tokenizer is gone, and with it what it had not passed on."""
        self._inward = None
        queue = [m for m in self._queue if isinstance(m, Abort) and m.rid not in self._streams]
        self._queue = deque(queue)
        self._queue.extend(stream for stream in self._streams.values() if not stream.sent)
        self._say_again()

    def scheduler_replaced(self) -> None:
        """The node has a new scheduler: what the old one had not begun is lost."""
        for stream in list(self._streams.values()):
            if stream.cancelled:
                self._let_go(stream)
        self._queue = deque(m for m in self._queue if not isinstance(m, Question))
        self._say_again()
        self.pump()

    def outward_down(self) -> None:
        """The detokenizer is gone, and with it what it had not sent."""
        self._outward = None
        self._acks.clear()
        for stream in list(self._streams.values()):
            if stream.cancelled:
                self._let_go(stream)
            elif stream.sent:
                self._resubmit(stream)

    def on_delta(self, delta: TextDelta) -> None:
        """A piece of output arrived."""
        stream = self._streams.get(delta.rid)
        if stream is None or stream.request.attempt != delta.attempt:
            if delta.finish is not None:
                self._acknowledge(delta)
            return
        if _is_lost(delta):
            self._acknowledge(delta)
            if stream.cancelled:
                self._end(stream, RequestAborted("cancelled"))
                return
            delta = msgspec.structs.replace(delta, finish=None, usage=None)
            self._resubmit(stream, delta)
            self.pump()
            return
        try:
            stream.feed(delta)
        except DeltaGap as gap:
            log.warning("%s; asking again", gap)
            if stream.cancelled:
                self._let_go(stream)
            else:
                self._resubmit(stream)
            self.pump()
            return
        if stream.closed:
            self._acknowledge(delta)
            self._remove(stream)

    def on_refused(self, refused: Refused) -> None:
        """A request was not admitted. One that had been running before waits and tries again when the node is only busy."""
        stream = self._streams.get(refused.rid)
        if stream is None or stream.request.attempt != refused.attempt:
            return
        busy = refused.error.status == Overloaded.status and stream.refusals < MAX_REFUSALS
        if busy and refused.attempt > stream.first_attempt and not stream.cancelled:
            stream.refusals += 1
            stream.sent = False  # and not in the queue either, for a while
            self._later(refused.error.retry_after or 1.0, lambda: self._again(stream, refused.attempt))
            return
        self._end(stream, refused.error.to_exception())

    def on_reply(self, reply: Reply) -> None:
        """A question was answered."""
        _, answer = self._questions.get(reply.id, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def pump(self) -> None:
        """Send what can be sent."""
        if self._outward is not None:
            while self._acks and self._outward.send(self._acks[0]):
                self._acks.popleft()
        while self._queue and self._inward is not None and self._outward is not None:
            item = self._queue[0]
            if isinstance(item, Stream):
                if item.closed or item.sent:
                    self._queue.popleft()
                    continue
                if not self._inward.send(item.request):
                    return
                item.sent = True
            elif isinstance(item, Question) and item.id not in self._questions:
                pass  # who asked does not wait any more
            elif not self._inward.send(item):
                return
            self._queue.popleft()

    def fail_all(self, error: RequestError) -> None:
        """Give up everything that is open: the node is gone, or the client closes."""
        for stream in [*self._successors.values(), *self._streams.values()]:
            self._end(stream, error)
        for _, answer in list(self._questions.values()):
            if not answer.done():
                answer.set_exception(error)
        self._queue.clear()
        self._acks.clear()

    def cancel_all(self, reason: str) -> None:
        """Abort every open request."""
        for stream in [*self._successors.values(), *self._streams.values()]:
            stream.cancel(reason)

    # ------------------------------------------------------------------ inside

    def _again(self, stream: Stream, attempt: int) -> None:
        if not (stream.closed or stream.cancelled or stream.sent) and stream.request.attempt == attempt:
            stream.fruitless -= 1  # a refusal is no loss
            self._resubmit(stream)
            self.pump()

    def _say_again(self) -> None:
        """Repeat towards the tokenizer what nothing has come of."""
        for stream in list(self._streams.values()):
            if stream.cancelled:
                self._queue.append(Abort(rid=stream.rid, exact=True))
            elif stream.sent and not stream.started:
                self._resubmit(stream)
        self._queue.extend(question for question, _ in self._questions.values())

    def _resubmit(self, stream: Stream, last_words: TextDelta | None = None) -> None:
        if last_words is not None:
            with contextlib.suppress(DeltaGap):
                stream.feed(last_words)
        if stream.fruitless >= MAX_FRUITLESS:
            error = InternalError(f"the engine lost request {stream.rid} {stream.fruitless} times in a row")
            self._queue.append(Abort(rid=stream.rid, reason="given up", exact=True))
            self._end(stream, error)
            return
        stream.resubmit()
        stream.sent = False
        self._queue.append(stream)

    def _open(self, stream: Stream) -> None:
        stream.follow(self._last_attempts.get(stream.rid, -1))
        self._streams[stream.rid] = stream
        self._queue.append(stream)

    def _let_go(self, stream: Stream) -> None:
        """End a cancelled stream whose end may never be told. The node may still work for it: say Abort (again)."""
        self._queue.append(Abort(rid=stream.rid, exact=True))
        self._end(stream, RequestAborted("cancelled"))

    def _end(self, stream: Stream, error: RequestError) -> None:
        stream.fail(error)
        self._remove(stream)

    def _remove(self, stream: Stream) -> None:
        """The id is free; who waits for it is next."""
        if self._successors.get(stream.rid) is stream:
            del self._successors[stream.rid]
        elif self._streams.get(stream.rid) is stream:
            del self._streams[stream.rid]
            if stream.known_to_node:
                self._remember(stream)
            successor = self._successors.pop(stream.rid, None)
            if successor is not None:
                self._open(successor)
                self.pump()

    def _remember(self, stream: Stream) -> None:
        self._last_attempts[stream.rid] = stream.request.attempt
        self._last_attempts.move_to_end(stream.rid)
        if len(self._last_attempts) > REMEMBERED_IDS:
            self._last_attempts.popitem(last=False)

    def _acknowledge(self, delta: TextDelta) -> None:
        self._acks.append(EndAck(rid=delta.rid, attempt=delta.attempt))
        self.pump()


def _is_lost(delta: TextDelta) -> bool:
    """An end that is none: the scheduler died under this output."""
    error = delta.finish.error if delta.finish is not None else None
    return error is not None and error.code == SCHEDULER_LOST
