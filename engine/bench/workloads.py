"""The four workloads: what is asked, how long it is, and how much of it at once.

========== ======== =========================== ============ =====================================
name       requests prompt tokens               output       at once
========== ======== =========================== ============ =====================================
single     4        128                         128          1: latency of a lone stream
batch16    64       128                         64           16: throughput, nothing shared
shared     64       512 shared by 8 + 32 own    32           8: prefix cache under load
multiturn  8 x 6    about 48 new a turn         48           8 conversations: growing prefixes
========== ======== =========================== ============ =====================================
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from radixcast.bench.client import BenchClient, Sample
from radixcast.bench.prompts import Prompts

Job = Callable[[], Awaitable[list[Sample]]]
"""A request, or a conversation of several."""
Tick = Callable[[int], None]
"""Told the number of requests that just ended."""


@dataclass(frozen=True)
class Workload:
    """Numbers of the table above; `requests` can be scaled."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    groups: int = 0
    """Different shared prefixes."""
    turns: int = 1
    """Requests of one conversation, one after another."""

    def scaled(self, requests: int | None) -> Workload:
        """The same with about `requests` requests: whole conversations, groups of the same size; at least one of each."""
        if requests is None:
            return self
        conversations = max(1, requests // self.turns)
        groups = max(1, self.groups * requests // self.requests) if self.groups else 0
        return replace(self, requests=conversations * self.turns, groups=groups)


WORKLOADS = {
    "single": Workload(requests=4, concurrency=1, prompt_tokens=128, output_tokens=128),
    "batch16": Workload(requests=64, concurrency=16, prompt_tokens=128, output_tokens=64),
    "shared": Workload(requests=64, concurrency=8, prompt_tokens=32, output_tokens=32, shared_tokens=512, groups=8),
    "multiturn": Workload(requests=48, concurrency=8, prompt_tokens=40, output_tokens=48, turns=6),
}


async def run_workload(
    workload: Workload, client: BenchClient, prompts: Prompts, rng: random.Random, tick: Tick
) -> list[Sample]:
    """Run all requests, `concurrency` at a time, and return their samples."""
    if workload.turns > 1:
        jobs = [_conversation(workload, client, prompts, rng, tick) for _ in range(workload.requests // workload.turns)]
    else:
        jobs = [_single(workload, client, text, tick) for text in _texts(workload, prompts, rng)]
    return await run_at_once(workload.concurrency, jobs)


async def warm_up(client: BenchClient, prompts: Prompts, rng: random.Random, requests: int) -> None:
    """Requests that are not measured, so that compilation and first allocations aren't either. Raises OSError if all fail."""
    workload = Workload(requests=requests, concurrency=8, prompt_tokens=64, output_tokens=16)
    samples = await run_workload(workload, client, prompts, rng, lambda n: None)
    if samples and all(sample.error for sample in samples):
        raise OSError(f"the server answers no request: {samples[0].error}")


def _texts(workload: Workload, prompts: Prompts, rng: random.Random) -> list[str]:
    own = [prompts.text(rng, workload.prompt_tokens) for _ in range(workload.requests)]
    if not workload.groups:
        return own
    prefixes = [prompts.text(rng, workload.shared_tokens) for _ in range(workload.groups)]
    texts = [f"{prefixes[i % workload.groups]} {text}" for i, text in enumerate(own)]
    rng.shuffle(texts)
    return texts


def _single(workload: Workload, client: BenchClient, text: str, tick: Tick) -> Job:
    async def job() -> list[Sample]:
        sample = await client.completion(text, workload.output_tokens)
        tick(1)
        return [sample]

    return job


def _conversation(workload: Workload, client: BenchClient, prompts: Prompts, rng: random.Random, tick: Tick) -> Job:
    # drawn now, so that the texts don't depend on which conversation is faster
    questions = [f"What do you think of {prompts.text(rng, workload.prompt_tokens)}?" for _ in range(workload.turns)]

    async def job() -> list[Sample]:
        messages: list[dict[str, str]] = []
        samples = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            sample = await client.chat(list(messages), workload.output_tokens)
            samples.append(sample)
            messages.append({"role": "assistant", "content": sample.text})
            tick(1)
        return samples

    return job


async def run_at_once(limit: int, jobs: Iterable[Job]) -> list[Sample]:
    """Run jobs in order, `limit` at a time: the next starts when one ends. Samples in order of the jobs."""
    waiting = iter(enumerate(jobs))
    done: dict[int, list[Sample]] = {}

    async def worker() -> None:
        for number, job in waiting:
            done[number] = await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(limit):
            group.create_task(worker())
    return [sample for number in sorted(done) for sample in done[number]]
