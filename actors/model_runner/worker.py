"""StepThread: the one thread that owns the executor, so that a forward pass never holds up the actor's sockets.

Plans go in, results come out, both in order. Callbacks are called on this thread; the actor hands them to its loop.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from radixcast.actors.model_runner.executor import Executor
from radixcast.protocols.internal import Capacity, StepPlan, StepResult


class Listener(Protocol):
    """What becomes of the thread's work. Called on the thread."""

    def ready(self, capacity: Capacity) -> None:
        """The executor is built."""

    def done(self, life: int, result: StepResult) -> None:
        """A plan submitted in this life was executed."""

    def failed(self, error: Exception) -> None:
        """The thread has ended: the executor can't be built, or nothing can be computed any more."""


class StepThread:
    """Builds the executor and executes plans until `stop`. Submit, reset and stop are called from one other thread."""

    def __init__(self, build: Callable[[], Executor], listener: Listener) -> None:
        self._build = build
        self._listener = listener
        self._life = 0
        self._jobs: queue.SimpleQueue[tuple[int, StepPlan | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model_runner.compute", daemon=True)

    def start(self) -> None:
        """Start; `ready` or `failed` follows."""
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        """Execute a plan after all that came before."""
        self._jobs.put((self._life, plan))

    def reset(self) -> int:
        """Begin a new life: plans not yet executed are dropped, all rows forgotten. Returns its number."""
        self._life += 1
        self._jobs.put((self._life, None))
        return self._life

    def stop(self, timeout: float = 10.0) -> None:
        """Let the step in progress end, then end the thread; wait for that at most `timeout` seconds."""
        self._life += 1
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            executor = self._build()
            self._listener.ready(executor.capacity())
            while (job := self._jobs.get()) is not None:
                life, plan = job
                if plan is None:
                    executor.reset()
                elif life == self._life:
                    self._listener.done(life, executor.execute(plan))
        except Exception as error:
            # The thread's boundary: the actor raises it again on its own loop.
            self._listener.failed(error)
