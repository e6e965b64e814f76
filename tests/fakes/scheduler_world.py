"""World: scheduler, plan executor, and a detokenizer that ends texts where it likes; one thread, one clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fakes.plan_executor import EOS, PlanExecutor, expected_output
from radixcast.actors.scheduler.config import SchedulerConfig
from radixcast.actors.scheduler.scheduler import Scheduler
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.internal import DeltaEnd, GrammarReady, Open, RowOpen, Submit, TokenDeltas
from radixcast.protocols.sampling import SamplingParams


def config(**changes: Any) -> SchedulerConfig:
    """A small strict configuration."""
    base: dict[str, Any] = {
        "total_tokens": 256,
        "max_running": 8,
        "context_length": 4096,
        "chunked_prefill_size": 16,
        "strict": True,
    }
    return SchedulerConfig(**{**base, **changes})


def submit(rid: str, prompt: list[int], max_new: int = 8, **fields: Any) -> Submit:
    """A request; its namespace is told to the executor as `choice`."""
    namespace = fields.pop("ns", 0)
    grammar = fields.pop("grammar", "")
    sampling = SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=fields.pop("min_new", 0),
        seed=fields.pop("seed", 1),
        temperature=fields.pop("temperature", 1.0),
        jump_forward=fields.pop("jump_forward", True),
    )
    base: dict[str, Any] = {
        "client": "client:a",
        "rid": rid,
        "attempt": 0,
        "group": "",
        "choice": namespace,
        "namespace": f"ns{namespace}",
        "prompt_ids": pack_ids(prompt),
        "output_ids": b"",
        "sampling": sampling,
        "grammar": GrammarSpec(kind="regex", text=grammar) if grammar else None,
        "eos_ids": (EOS,),
        "stop_ids": (),
    }
    return Submit(**{**base, **fields})


@dataclass
class Output:
    """What the detokenizer has of one request."""

    opened: Open
    tokens: list[int]
    end: DeltaEnd | None = None
    text_end: int = 1 << 30
    """Output position at which the text ends by itself."""
    cached: int = 0
    forced: int = 0
    finished: bool = False

    @property
    def position(self) -> int:
        """Output tokens that count."""
        return min(self.text_end, len(self.tokens))


@dataclass
class World:
    """See the module. `run` until nothing moves; `outputs` are what clients got, by rid."""

    scheduler: Scheduler
    executor: PlanExecutor
    text_end: Callable[[str], int] = lambda rid: 1 << 30
    outputs: dict[str, Output] = field(default_factory=dict)
    by_handle: dict[int, Output] = field(default_factory=dict)
    now: float = 0.0
    plans: int = 0
    plan_rows: list[int] = field(default_factory=list)
    """Rows in each plan."""
    asked: list[GrammarSpec] = field(default_factory=list)
    """Grammars that the executor is still to answer for."""

    @classmethod
    def make(cls, cfg: SchedulerConfig, **kwargs: Any) -> World:
        """A world around a configuration."""
        executor = PlanExecutor(cfg.total_tokens, page_size=cfg.page_size)
        return cls(Scheduler(cfg), executor, **kwargs)

    def submit(self, request: Submit) -> ErrorInfo | None:
        """A Submit arrives."""
        refusal = self.scheduler.submit(request, self.now)
        self.hear(self.scheduler.drain())
        return refusal

    def ask(self) -> None:
        """The scheduler asks for grammars."""
        self.asked += [prepare.spec for prepare in self.scheduler.asks(self.now)]
        self.hear(self.scheduler.drain())

    def answer(self, error: ErrorInfo | None = None, seconds: float = 0.0) -> str:
        """The executor has the grammar asked for first, or not; returns its key."""
        spec = self.asked.pop(0)
        if error is None:
            self.executor.prepared.add(spec.key)
        self.scheduler.grammar_ready(GrammarReady(key=spec.key, error=error, seconds=seconds))
        self.hear(self.scheduler.drain())
        return spec.key

    def plan(self) -> bool:
        """Let the scheduler send one plan; False when it has none."""
        made = self.scheduler.schedule(self.now)
        self.hear(self.scheduler.drain())
        if made is None:
            return False
        self.plans += 1
        self.plan_rows.append(len(made.rows) // 4)
        self.executor.send(made)
        return True

    def result(self, *, fail: bool = False, poisoned: Callable[[RowOpen], bool] | None = None) -> None:
        """The executor finishes its oldest plan."""
        self.now += 0.01
        self.hear(self.scheduler.apply(self.executor.step(fail=fail, poisoned=poisoned), self.now))

    def step(self, **kwargs: Any) -> bool:
        """Plans as many as may be in flight, one result. False when nothing is in flight."""
        self.ask()
        while self.asked:
            self.answer()
            self.ask()
        while self.plan():
            pass
        if not self.executor.queue:
            return False
        self.result(**kwargs)
        self.finish()
        return True

    def run(self, most: int = 100_000, **kwargs: Any) -> None:
        """Until nothing moves."""
        for _ in range(most):
            if not self.step(**kwargs):
                self.finish()
                if not self.step(**kwargs):
                    return
        raise AssertionError("the world does not come to rest")

    def hear(self, events: list[Any]) -> None:
        """The detokenizer's side."""
        for event in events:
            if isinstance(event, Open):
                output = Output(event, unpack_ids(event.output_ids).tolist(), text_end=self.text_end(event.rid))
                self.outputs[event.rid] = self.by_handle[event.handle] = output
            else:
                self._deltas(event)

    def _deltas(self, event: TokenDeltas) -> None:
        tokens = unpack_ids(event.tokens).tolist()
        at = 0
        columns = zip(unpack_ids(event.handles), unpack_ids(event.counts), unpack_ids(event.cached), strict=True)
        for handle, count, cached in columns if event.cached else ():
            output = self.by_handle[int(handle)]
            output.tokens += tokens[at : at + count]
            output.cached = int(cached)
            at += int(count)
        for handle, forced in zip(unpack_ids(event.handles), unpack_ids(event.forced), strict=False):
            self.by_handle[int(handle)].forced = int(forced)
        assert at == len(tokens)
        for end in event.ends:
            assert self.by_handle[end.handle].end is None, "ended twice"
            self.by_handle[end.handle].end = end

    def finish(self, chance: Callable[[], bool] = lambda: True) -> None:
        """Send Finished for texts that have ended (each with a chance, to come late)."""
        for handle, output in list(self.by_handle.items()):
            if (output.end is not None or len(output.tokens) >= output.text_end) and chance():
                output.finished = True
                self.scheduler.finish(handle, output.position, self.now)
                del self.by_handle[handle]

    def audit(self) -> None:
        """Every page has exactly one owner, or none and is free; counters agree."""
        memory, live = self.scheduler.memory, self.scheduler.live()
        assert memory.check(live)
        owners = memory.owners(live)
        assert (owners <= 1).all(), "a page is owned twice"
        assert ((owners == 0) == memory.pool.free_mask()).all(), "a page is lost, or free and owned"
        nodes = list(memory.tree.nodes())
        assert memory.tree.evictable == sum(len(n.key) for n in nodes if not n.refs)
        assert memory.tree.locked == sum(len(n.key) for n in nodes if n.refs)
        users: Counter[int] = Counter()
        for request in live:
            node = request.node
            while node is not None:
                users[id(node)] += 1
                node = node.parent
        assert all(n.refs == users[id(n)] for n in nodes), "a lock is lost or left behind"

    def at_rest(self) -> None:
        """Nothing is left behind."""
        assert not self.scheduler.live()
        assert not self.scheduler.busy
        self.audit()
        assert self.scheduler.memory.tree.locked == 0
        ok, message = self.scheduler.flush_cache(self.now)
        assert ok, message
        assert self.scheduler.memory.pool.free_pages == self.scheduler.memory.pool.total_pages

    def check_output(self, request: Submit) -> None:
        """The tokens are those of an undisturbed run (or a prefix of them, when aborted)."""
        output = self.outputs[request.rid]
        want = expected_output(
            unpack_ids(request.prompt_ids).tolist(),
            request.choice,
            request.sampling.seed or 0,
            request.sampling.max_new_tokens or 0,
            request.sampling.min_new_tokens,
        )
        got = output.tokens[: output.position]
        if output.end is not None and output.end.reason in (0, 5):
            assert got == want[: len(got)]
        else:
            assert got == want[: output.text_end], (request.rid, got, want)


def big(**changes: Any) -> World:
    """A world with room for everything."""
    return World.make(config(**{"total_tokens": 20_000, "max_running": 64, "chunked_prefill_size": 512, **changes}))


def random_prompt(rng: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    """A prompt that may share a stem, or a part of one, with others."""
    stem = rng.choice(stems)
    shared = stem[: rng.randint(0, len(stem))]
    return (shared + [rng.randint(1, 49) for _ in range(rng.randint(1, 12))])[:longest]


def int32(values: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A token array."""
    return np.array(values, dtype=np.int32)
