"""Compiled grammars kept by content: LRU by bytes, one compilation a key at a time, short memory of what can't work.

Time-outs and overload are never remembered: the next try may be luckier. Thread-safe; `clock` is monotonic seconds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from radixcast.actors.grammar.interface import GrammarError
from radixcast.protocols.errors import ErrorInfo

MAX_BYTES = 256 << 20
"""Bytes of compiled grammars kept."""
MAX_ERRORS = 1024
"""Grammars known to be unusable."""
ERROR_TTL = 60.0
"""Seconds for which one is known as such."""
_NEVER_KEPT = frozenset({"grammar_timeout", "overloaded"})

V = TypeVar("V")


class ErrorMemory:
    """The last errors that will come again: deterministic ones, at most `limit`, for `ttl` seconds each. Not thread-safe."""

    def __init__(self, limit: int = MAX_ERRORS, ttl: float = ERROR_TTL, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._ttl = ttl
        self._clock = clock
        self._errors: OrderedDict[str, tuple[float, ErrorInfo]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._errors)

    def get(self, key: str) -> ErrorInfo | None:
        """The error of `key` if it is known and young enough."""
        known = self._errors.get(key)
        if known is None:
            return None
        if known[0] <= self._clock():
            del self._errors[key]
            return None
        return known[1]

    def put(self, key: str, info: ErrorInfo) -> None:
        """Remember an error, unless trying again may help."""
        if info.code in _NEVER_KEPT or info.status >= 500:
            return
        self._errors[key] = (self._clock() + self._ttl, info)
        self._errors.move_to_end(key)
        while len(self._errors) > self._limit:
            self._errors.popitem(last=False)


class GrammarCache(Generic[V]):
    """`get` returns what is kept, waits for whoever is making it, or makes it.

    `size` tells the bytes of a value. A value larger than the whole cache is returned and not kept.
    """

    def __init__(
        self,
        size: Callable[[V], int],
        max_bytes: int = MAX_BYTES,
        errors: ErrorMemory | None = None,
    ) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._errors = errors if errors is not None else ErrorMemory()
        self._values: OrderedDict[str, tuple[int, V]] = OrderedDict()
        self._making: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes of all values kept."""

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, key: str) -> V | None:
        """What is kept for `key`, now the youngest; never waits."""
        with self._lock:
            return self._peek(key)

    def get(self, key: str, make: Callable[[], V]) -> V:
        """The value of `key`. Raises GrammarError, also one of an earlier try that is still remembered."""
        while True:
            with self._lock:
                kept = self._peek(key)
                if kept is not None:
                    return kept
                info = self._errors.get(key)
                if info is not None:
                    raise GrammarError(info.message, info=info)
                busy = self._making.get(key)
                if busy is None:
                    done = self._making[key] = threading.Event()
                    break
            busy.wait()
        try:
            value = make()
            with self._lock:
                self._keep(key, value)
            return value
        except GrammarError as error:
            with self._lock:
                self._errors.put(key, error.info)
            raise
        finally:
            with self._lock:
                del self._making[key]
            done.set()

    def _peek(self, key: str) -> V | None:
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[1]

    def _keep(self, key: str, value: V) -> None:
        size = self._size(value)
        if size > self._max_bytes:
            return
        self._values[key] = (size, value)
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            _, (freed, _) = self._values.popitem(last=False)
            self.nbytes -= freed
