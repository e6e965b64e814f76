"""SideThread: one daemon thread for work beside the steps, in order. It neither ends the process nor holds up its end.

Its priority is that of all threads: one that stood back (nice 19) and was descheduled with the GIL in its hands would hold up
the steps, and the heartbeats, for as long as other processes keep the cores busy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

V = TypeVar("V")


class SideThread:
    """Starts with its first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def submit(self, job: Callable[[], V]) -> Future[V]:
        """Run a job behind those before it. Whatever it raises is in the future."""
        future: Future[V] = Future()
        with self._lock:
            if not self._started:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._started = True
        self._jobs.put((future, job))
        return future

    def _run(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:  # a panic of a native library is no Exception, and must not end this thread
                future.set_exception(error)
            del future, job
