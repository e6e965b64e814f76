"""The prover's worker: `python -P -m radixcast.actors.grammar.worker`, frames of `jobs` on stdin and stdout.

It loads the vocabulary once and forks for each job. The child has a limit on its memory and is killed when its time is up; a
panic, an exhausted stack or an abort ends it and nothing else, and what it allocated goes with it: so thousands of grammars
leave no trace, and none costs another load of the vocabulary. The parent has one thread and never compiles.

A child first shows that the constraint compiles, and says so. Then, where an automaton is wanted, it goes on to make that; if
its time for this ends first, the proof stands.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from radixcast.actors.grammar.compile import compile_grammar, wants_outlines, what
from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.jobs import Done, Frames, FromWorker, Job, Start, Started, ToWorker, frame
from radixcast.actors.grammar.outlines_index import UnusableIndex, build, index_file, outlines_vocabulary, trim
from radixcast.actors.grammar.regex import normalize
from radixcast.actors.grammar.unwritable import unwritable
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.actors.host import die_with_parent, set_process_name
from radixcast.protocols.errors import ErrorInfo, RadixcastError, RequestError

NICE_LOADING, NICE = 10, 19
"""How far it stands back for others, while it loads and from then on."""
STACK_BYTES = 4 << 20
"""Stack of the thread that compiles: half of what the runner's side thread has, so what passes here passes there."""
AUTOMATA_BYTES = 256 << 20
"""Automata that a run folder keeps."""
_READ = 1 << 16


def main() -> NoReturn:
    """Serve until stdin ends."""
    die_with_parent()
    set_process_name("rc:grammar")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _be_nice(NICE_LOADING)
    # What libraries print must not get into the frames.
    out = os.dup(1)
    os.dup2(2, 1)
    frames = Frames()
    payloads: list[bytes] = []
    while not payloads:
        data = os.read(0, _READ)
        if not data:
            sys.exit(0)
        payloads = frames.feed(data)
    start = msgspec.msgpack.decode(payloads[0], type=Start)
    try:
        vocabulary = Vocabulary.load(start.model)
        automata = outlines_vocabulary(vocabulary) if start.run_dir else None
    except RadixcastError as error:
        info = error.info if isinstance(error, RequestError) else ErrorInfo(str(error), code="invalid_grammar")
        _write(out, frame(Started(error=info)))
        sys.exit(0)
    _be_nice(NICE - NICE_LOADING)
    gc.collect()
    gc.freeze()  # children share all this
    _write(out, frame(Started()))
    _Worker(out, frames, vocabulary, automata, start.run_dir).serve(payloads[1:])
    sys.exit(0)


def _be_nice(more: int) -> None:
    with contextlib.suppress(OSError):
        os.nice(more)


# ------------------------------------------------------------------ the parent


@dataclass(eq=False)
class _Child:
    job: Job
    pid: int
    fd: int
    """Its reports."""
    deadline: float
    frames: Frames = field(default_factory=Frames)
    proof: Done | None = None
    """What it has said so far."""


class _Worker:
    def __init__(self, out: int, frames: Frames, vocabulary: Vocabulary, automata: Any, run_dir: str) -> None:
        self._out = out
        self._frames = frames
        self._vocabulary = vocabulary
        self._automata = automata
        self._run_dir = run_dir
        self._children: dict[int, _Child] = {}

    def serve(self, payloads: list[bytes]) -> None:
        """Until stdin ends; children are killed then."""
        self._take(payloads)
        try:
            while True:
                ready, _, _ = select.select([0, *self._children], [], [], self._wait_seconds())
                for fd in ready:
                    if fd in self._children:
                        self._hear(self._children[fd])
                if 0 in ready:
                    data = os.read(0, _READ)
                    if not data:
                        return
                    self._take(self._frames.feed(data))
                self._kill_late()
        finally:
            for child in list(self._children.values()):
                self._end(child)

    def _wait_seconds(self) -> float | None:
        if not self._children:
            return None
        return max(0.0, min(child.deadline for child in self._children.values()) - time.monotonic())

    def _take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            message = msgspec.msgpack.decode(payload, type=ToWorker)
            if isinstance(message, Job):
                self._start(message)

    def _start(self, job: Job) -> None:
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            info = ErrorInfo(f"the {what(job.spec)} can't be compiled now: {error}", status=503, code="overloaded")
            self._tell(Done(id=job.id, error=info, lasting=False))
            return
        if not pid:
            _run_child(job, writing, self._vocabulary, self._automata, self._run_dir)
        os.close(writing)
        self._children[reading] = _Child(job, pid, reading, time.monotonic() + job.seconds)

    def _hear(self, child: _Child) -> None:
        """Read what a child reports; its end of file is its end."""
        data = os.read(child.fd, _READ)
        for payload in child.frames.feed(data):
            child.proof = msgspec.msgpack.decode(payload, type=Done)
            child.deadline = time.monotonic() + child.job.outlines_seconds
        if not data:
            self._end(child)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.deadline <= now:
                if child.proof is None:
                    child.proof = Done(id=child.job.id, error=_timeout(child.job), lasting=False)
                self._end(child)

    def _end(self, child: _Child) -> None:
        """Kill a child, and tell what came of its job."""
        del self._children[child.fd]
        os.close(child.fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        done = child.proof or Done(id=child.job.id, error=_death(child.job, status), lasting=False)
        self._tell(done)
        if done.automaton:
            trim(Path(self._run_dir), AUTOMATA_BYTES)

    def _tell(self, message: FromWorker) -> None:
        with contextlib.suppress(BrokenPipeError):  # then stdin ends, too
            _write(self._out, frame(message))


def _timeout(job: Job) -> ErrorInfo:
    message = f"compiling the {what(job.spec)} took longer than {job.seconds:.3g} seconds (--grammar-timeout): make it simpler"
    return GrammarError(message, code="grammar_timeout").info


def _death(job: Job, status: int) -> ErrorInfo:
    """A child that left without a word."""
    code = os.waitstatus_to_exitcode(status)
    how = signal.Signals(-code).name if code < 0 else f"status {code}"
    message = (
        f"the {what(job.spec)} takes more memory than a grammar may have, or is nested too deep (its compiler ended: {how})"
    )
    return GrammarError(message, code="grammar_too_large").info


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# ------------------------------------------------------------------ the child


def _run_child(job: Job, fd: int, vocabulary: Vocabulary, automata: Any, run_dir: str) -> NoReturn:
    """Everything that a child does. Never returns into the parent's loop, whatever happens."""
    status = 1
    try:
        die_with_parent()
        _limit(job.memory)
        _in_small_stack(lambda: _prove(job, fd, vocabulary, automata, run_dir))
        status = 0
    finally:
        os._exit(status)


def _limit(memory: int) -> None:
    """At most `memory` bytes more than now, no core file; and silence: what a native library prints in its last moments
    would be in nobody's log format."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # no /proc: no limit
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))


def _in_small_stack(function: Callable[[], None]) -> None:
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _prove(job: Job, fd: int, vocabulary: Vocabulary, automata: Any, run_dir: str) -> None:
    """Report whether it compiles; then make the automaton, and report that."""
    error: ErrorInfo | None = None
    try:
        compile_grammar(job.spec, vocabulary)
    except RequestError as refused:
        error = refused.info
    done = Done(id=job.id, error=error)
    wanted = wants_outlines(job.spec) and job.outlines_seconds > 0 and automata is not None
    # An expression that is too much for llguidance may still have an automaton; a wrong one has none.
    if not wanted or (error is not None and error.code != "grammar_too_large"):
        _write(fd, frame(done))
        return
    _write(fd, frame(done))
    with contextlib.suppress(UnusableIndex, MemoryError, OSError, RequestError):
        automaton = build(normalize(job.spec.text, job.spec.max_tokens, unwritable(vocabulary)), automata, vocabulary.rows)
        automaton.save(index_file(run_dir, job.spec.key))
        _write(fd, frame(Done(id=job.id, automaton=True)))


if __name__ == "__main__":
    main()
