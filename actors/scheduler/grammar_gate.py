"""GrammarGate: requests that wait, without row or KV, until the runner has their grammar.

::

    hold(request) ─► asked: few at a time, once a key ─► ready ─► the waiting queue
                                                     └─► an error: the request ends with it

The runner may drop a grammar that no row uses, so a request asks each time it comes to the queue (new, retracted, or after
the runner was lost); a grammar that is still there is answered at once. Grammars that were being built when the runner was
lost are suspects: from then on they are asked for alone, and one that is alone when the runner is lost again is refused.
"""

from __future__ import annotations

from radixcast.actors.scheduler.request import Request
from radixcast.protocols.errors import ErrorInfo, InternalError, InvalidRequest
from radixcast.protocols.internal import GrammarPrepare, GrammarReady

ASKS = 4
"""Grammars being asked for at a time; so the patience below counts building, not queueing."""


class GrammarGate:
    """See the module. `patience`: seconds that the runner may take for one answer."""

    def __init__(self, patience: float = 60.0) -> None:
        self.patience = patience
        self.asked_total = 0
        self.hits_total = 0
        """Asks whose grammar the runner had."""
        self._held: dict[str, dict[int, tuple[Request, bool]]] = {}
        """Key -> handle -> (request, whether it was retracted); keys in order of arrival."""
        self._asked: dict[str, float] = {}
        """Keys in flight, and since when."""
        self._suspects: set[str] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, request: Request) -> bool:
        return request.handle in self._held.get(request.grammar_key, ())

    def hold(self, request: Request, *, retracted: bool) -> None:
        """A request comes to the queue and has a grammar."""
        self._held.setdefault(request.grammar_key, {})[request.handle] = (request, retracted)
        self._count += 1

    def remove(self, request: Request) -> None:
        """The request waits no longer (aborted); no harm if it never did."""
        held = self._held.get(request.grammar_key)
        if held and held.pop(request.handle, None):
            self._count -= 1
            if not held:
                del self._held[request.grammar_key]

    def asks(self, now: float) -> list[GrammarPrepare]:
        """What to send to the runner now."""
        sent = []
        for key, held in self._held.items():
            if len(self._asked) >= ASKS or (self._asked and not self._suspects.isdisjoint(self._asked)):
                break
            if key in self._asked:
                continue
            if self._asked and key in self._suspects:
                break
            request, _ = next(iter(held.values()))
            assert request.submit.grammar is not None
            self._asked[key] = now
            self.asked_total += 1
            sent.append(GrammarPrepare(spec=request.submit.grammar))
        return sent

    def answer(self, message: GrammarReady) -> list[tuple[Request, bool]]:
        """The requests that waited for it, to be queued (with whether they were retracted), or ended with its error."""
        if self._asked.pop(message.key, None) is None:
            return []  # of a runner that is gone, or given up
        self._suspects.discard(message.key)
        if message.error is None and not message.seconds:
            self.hits_total += 1
        return self._take(message.key)

    def overdue(self, now: float) -> tuple[list[Request], ErrorInfo]:
        """Requests whose grammar the runner does not answer for, and what to tell them."""
        late = [key for key, since in self._asked.items() if now - since > self.patience]
        for key in late:
            del self._asked[key]
        error = InvalidRequest(f"the grammar was not ready within {self.patience:g} s", code="grammar_timeout").info
        return [request for key in late for request, _ in self._take(key)], error

    def runner_lost(self) -> tuple[list[Request], ErrorInfo]:
        """Everything is asked again. Returns the requests whose grammar has taken down two runners, and their error."""
        asked, self._asked = list(self._asked), {}
        error = InternalError("the model runner died while it built this grammar", code="grammar_crash").info
        if len(asked) == 1 and asked[0] in self._suspects:
            self._suspects.discard(asked[0])
            return [request for request, _ in self._take(asked[0])], error
        self._suspects.update(key for key in asked if key in self._held)
        return [], error

    def _take(self, key: str) -> list[tuple[Request, bool]]:
        held = self._held.pop(key, {})
        self._count -= len(held)
        return list(held.values())
