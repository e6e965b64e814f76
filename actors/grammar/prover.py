"""Prover: shows that constraints compile before anyone depends on it, outside of the process that asks.

::

    prove(spec) ── known? ──► in flight? ──► queue ──► worker ──► a forked child, killed at the deadline
                                                            └──► run_dir/grammar/<key>.npz (regular expressions)

What compiled is remembered by its key, and so is for a while what never will; a time-out is not. A worker that dies costs the
constraints that were in it, and the next one starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path

import msgspec

from radixcast.actors.grammar.cache import ErrorMemory
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.jobs import HEADER, Done, FromWorker, Job, Start, Started, frame
from radixcast.protocols.errors import ErrorInfo, Overloaded
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs

WORKERS = 2
"""Constraints that compile at a time."""
MAX_WAITING = 256
"""Constraints that wait for that; more get 503."""
MAX_PROVEN = 16384
"""Constraints known to compile."""
OUTLINES_SECONDS = {"auto": 0.3, "outlines": 3.0}
"""Seconds that the automaton of a regular expression may take, by backend; past that llguidance enforces it."""
START_SECONDS = 60.0
"""A worker that takes longer to load the vocabulary is given up."""
GRACE_SECONDS = 3.0
"""How long after a job's deadline the worker may be silent before it counts as hung."""

log = logging.getLogger(__name__)


class Prover:
    """Use from one event loop. The worker starts with the first constraint, or with `warm`."""

    def __init__(self, model: ModelSpec, args: ServerArgs, run_dir: str | Path) -> None:
        self._start_frame = frame(Start(model=model, run_dir=str(run_dir)))
        self._seconds = args.grammar_timeout
        self._proven: OrderedDict[str, None] = OrderedDict()
        self._errors = ErrorMemory()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(WORKERS)
        self._waiting = 0
        self._worker: _Worker | None = None
        self._unusable: ErrorInfo | None = None
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    async def prove(self, spec: GrammarSpec) -> None:
        """Return once `spec` is known to compile. Raises GrammarError, Overloaded."""
        key = spec.key
        if key in self._proven:
            self._proven.move_to_end(key)
            return
        known = self._errors.get(key)
        if known is not None:
            raise GrammarError(known.message, info=known)
        task = self._running.get(key)
        if task is None:
            if self._closed or len(self._running) >= WORKERS + MAX_WAITING:
                raise Overloaded("too many grammars are being compiled", retry_after=1.0)
            task = self._running[key] = self._own(asyncio.create_task(self._prove(spec, key), name="prove"))
        await asyncio.shield(task)  # others may wait for it, too

    def warm(self) -> None:
        """Start the worker in the background: it takes about a second to load the vocabulary."""
        self._own(asyncio.create_task(self._warm(), name="warm"))

    async def close(self) -> None:
        """End the worker; what it was proving fails with Overloaded."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._worker is not None:
            await self._worker.close()
            self._worker = None

    def stats(self) -> dict[str, float]:
        """Grammars that compile, wait, and are known."""
        return {"grammars_proving": len(self._running), "grammars_waiting": self._waiting, "grammars_proven": len(self._proven)}

    # -- one constraint

    async def _prove(self, spec: GrammarSpec, key: str) -> None:
        try:
            done = await self._compile(spec)
            if done.error is None:
                self._proven[key] = None
                while len(self._proven) > MAX_PROVEN:
                    self._proven.popitem(last=False)
                return
            if done.lasting:
                self._errors.put(key, done.error)
            raise done.error.to_exception() if done.error.status >= 500 else GrammarError(done.error.message, info=done.error)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise Overloaded("the server is shutting down", retry_after=1.0) from None
        finally:
            del self._running[key]

    async def _compile(self, spec: GrammarSpec) -> Done:
        began = time.monotonic()
        self._waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded("too many grammars are being compiled", retry_after=1.0) from None
        finally:
            self._waiting -= 1
        try:
            worker = await self._ready_worker()
            left = max(self._seconds - (time.monotonic() - began), self._seconds / 2)
            # Nobody waits for the sake of a faster mask.
            automaton = OUTLINES_SECONDS.get(spec.backend, 0.0) if not self._waiting or spec.backend == "outlines" else 0.0
            return await worker.run(spec, left, min(automaton, left))
        finally:
            self._slots.release()

    # -- the worker

    async def _warm(self) -> None:
        try:
            await self._ready_worker()
        except (GrammarError, Overloaded) as error:
            log.warning("the worker that checks grammars can't be used: %s", error)

    async def _ready_worker(self) -> _Worker:
        """A worker that has its vocabulary. Raises GrammarError when the model has none, Overloaded when it can't start."""
        async with self._starting:
            if self._worker is not None and self._worker.alive:
                return self._worker
            if self._worker is not None:
                await self._worker.close()
            self._worker = None
            if self._unusable is not None:
                raise GrammarError(self._unusable.message, info=self._unusable)
            try:
                self._worker = await _Worker.start(self._start_frame)
            except GrammarError as error:
                self._unusable = error.info
                raise
            return self._worker

    def _own(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody may be left who does


class _Worker:
    """One worker process, and the jobs that are in it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._in = process.stdin
        self._out = process.stdout
        self._jobs: dict[int, asyncio.Future[Done]] = {}
        self._ids = itertools.count(1)
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, start_frame: bytes) -> _Worker:
        """Start one and wait for its vocabulary. Raises GrammarError, Overloaded."""
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "radixcast.actors.grammar.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **one_thread},  # it forks, so it must have one thread
            )
        except OSError as error:
            raise Overloaded(f"no process for grammars can be started: {error}", retry_after=1.0) from None
        worker = cls(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                worker._in.write(start_frame)
                started = await worker._read()
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            await worker.close()
            raise Overloaded(f"the process for grammars did not start: {error!r}", retry_after=1.0) from None
        except BaseException:
            await worker.close()
            raise
        if isinstance(started, Started) and started.error is not None:
            await worker.close()
            raise GrammarError(started.error.message, info=started.error)
        worker._reader = asyncio.create_task(worker._hear(), name="grammar-worker")
        return worker

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self._reader is not None and not self._reader.done() and self._process.returncode is None

    async def run(self, spec: GrammarSpec, seconds: float, outlines_seconds: float) -> Done:
        """One job. A worker that hangs is killed."""
        number = next(self._ids)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._jobs[number] = future
        try:
            self._in.write(frame(Job(id=number, spec=spec, seconds=seconds, outlines_seconds=outlines_seconds)))
            async with asyncio.timeout(seconds + outlines_seconds + GRACE_SECONDS):
                return await future
        except TimeoutError:
            log.warning("the process for grammars hangs, and is replaced")
            self._kill()
            return Done(id=number, error=_no_answer(seconds), lasting=False)
        finally:
            self._jobs.pop(number, None)

    async def close(self) -> None:
        """End it, and wait until it is gone."""
        self._in.close()
        self._kill()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _hear(self) -> None:
        """Answers, until it is gone; then jobs that are left have failed."""
        try:
            while True:
                message = await self._read()
                if isinstance(message, Done):
                    future = self._jobs.get(message.id)
                    if future is not None and not future.done():
                        future.set_result(message)
        except (EOFError, OSError, ValueError):
            pass
        finally:
            self._kill()
            for number, future in self._jobs.items():
                if not future.done():
                    future.set_result(Done(id=number, error=_died(), lasting=False))

    async def _read(self) -> FromWorker:
        (length,) = HEADER.unpack(await self._out.readexactly(HEADER.size))
        return msgspec.msgpack.decode(await self._out.readexactly(length), type=FromWorker)


def _no_answer(seconds: float) -> ErrorInfo:
    message = f"compiling the grammar took longer than {seconds:.3g} seconds (--grammar-timeout): make it simpler"
    return GrammarError(message, code="grammar_timeout").info


def _died() -> ErrorInfo:
    return GrammarError("the process that compiles grammars ended while it had this one", code="grammar_too_large").info
