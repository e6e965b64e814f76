"""SideThread: one daemon thread for work beside the steps, in order. It neither ends the process nor holds up its end."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

V = TypeVar("V")


class SideThread:
    """Starts with its first job. `nice`: how far this thread alone stands back for others (0 … 19; Linux)."""

    def __init__(self, name: str, *, nice: int = 0) -> None:
        self._name = name
        self._nice = nice
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
        if self._nice and sys.platform == "linux":
            # There the id of a thread is taken in the place of a process's: the other threads keep their priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:  # a panic of a native library is no Exception, and must not end this thread
                future.set_exception(error)
            del future, job
