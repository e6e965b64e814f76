"""Planner: what the next step computes. Decodes first, then prompt chunks of running and newly admitted requests.

    1. every running request that waits for its next token is in the plan (streams never stall); when the KV pool can't
       hold their next tokens, ended requests are reclaimed, then running ones retracted, least output first
    2. what is left of the chunk budget goes to prompts: those that run and those that the queue offers, as long as rows
       and reserved memory allow (`split_chunk`); only who gets a chunk is admitted
    3. a request whose prefix another one is computing right now waits for it instead of computing it again

Knows nothing about results, clients or the detokenizer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from radixcast.actors.scheduler.batch import Draft, RunningBatch
from radixcast.actors.scheduler.budget import Claim, NewTokenRatio, reserve, split_chunk
from radixcast.actors.scheduler.config import SchedulerConfig
from radixcast.actors.scheduler.memory import KvMemory
from radixcast.actors.scheduler.policy import WaitingQueue
from radixcast.actors.scheduler.request import Request, State

logger = logging.getLogger("radixcast.scheduler")

SCAN = 64
"""Most waiting requests looked at for one plan."""

SHARE_LEAST = 8
"""A request waits for another one's prefill when that saves it so many tokens, or half of what it would compute."""

NO_LIMIT = 1 << 30


class Planner:
    """Builds drafts; moves requests between queue and batch.

    `suspects` are requests whose `suspect_at` is set (by handle); `reclaim` releases what ended requests still hold.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KvMemory,
        batch: RunningBatch,
        waiting: WaitingQueue,
        suspects: dict[int, Request],
        reclaim: Callable[[], bool],
    ) -> None:
        self._config = config
        self._memory = memory
        self._batch = batch
        self._waiting = waiting
        self._suspects = suspects
        self._reclaim = reclaim
        self.ratio = NewTokenRatio(config.conservativeness)
        self.retractions = 0
        self.admitted: list[Request] = []
        """Requests that got their first row since the owner last emptied this list."""
        self._solo_last = False
        self._forced_at = -1

    def build(self, number: int, *, in_flight: bool) -> Draft | None:
        """The rows of plan `number`, or None when nothing can run. `in_flight`: results are still to come."""
        self._force_retraction(number)
        while True:
            for suspects in self._turns():
                draft = Draft(number)
                self._fill(draft, suspects)
                if draft.requests:
                    self._solo_last = bool(suspects)
                    self.ratio.step()
                    return draft
            if in_flight or not self._retract_least(list(self._batch)):
                break
        if not self._batch:
            self.ratio.idle()
        return None

    def retract(self, request: Request) -> None:
        """Take row and KV from a running request; it re-enters the queue when the plans that it is in have come back."""
        flights = request.flights
        self._memory.release(request, request.known)
        self._batch.close(request)
        request.retractions += 1
        self.retractions += 1
        request.flights = flights
        request.state = State.DRAINING
        if not flights:
            self.requeue(request)

    def requeue(self, request: Request) -> None:
        """A request that has lost its row waits again; results of plans in flight no longer count."""
        request.life += 1
        request.flights = []
        request.state = State.WAITING
        self._waiting.push(request, retracted=True)

    # ---------------------------------------------------------------- turns

    def _turns(self) -> list[list[Request]]:
        """Whose turn it is: all who are above suspicion ([]), or one suspect alone; alternating."""
        for request in [r for r in self._suspects.values() if r.suspect_at < 0 or r.state in (State.ENDED, State.GONE)]:
            del self._suspects[request.handle]
        suspects = [r for r in self._suspects.values() if r.state in (State.RUNNING, State.WAITING)]
        if not suspects:
            return [[]]
        solo = [min(suspects, key=lambda r: (r.state is State.WAITING, r.last_plan, r.handle))]
        return [[], solo] if self._solo_last else [solo, []]

    def _fill(self, draft: Draft, suspects: list[Request]) -> None:
        decodes: list[Request] = []
        prompts: list[Request] = []
        gate = draft.number - self._config.row_gap
        for request in suspects or list(self._batch):
            if request.state is not State.RUNNING or (request.suspect_at >= 0 and not suspects):
                continue
            if request.flights and request.flights[-1] >= gate:
                continue
            remaining = request.known - request.computed - request.planned
            if remaining > 1 and (remaining > request.draft or request.known == request.life_start):
                prompts.append(request)
            elif remaining >= 1 or request.known + request.sampling_flights < request.max_position:
                decodes.append(request)
        tokens = self._add_decodes(draft, decodes)
        self._add_prompts(draft, prompts, self._chunk_budget(tokens, len(draft.requests)), suspects)

    # ---------------------------------------------------------------- decodes

    def _add_decodes(self, draft: Draft, decodes: list[Request]) -> int:
        """Returns the most tokens that they may compute."""
        most = self._config.max_step_tokens
        if most and sum(self._decode_count(r) for r in decodes) > most:
            decodes = self._first_that_fit(decodes, most)
        wanted = self._decode_pages(decodes)
        need = sum(wanted)
        while need * self._memory.page_size > self._memory.available:
            if not self._reclaim() and not self._retract_least(decodes):
                break
            decodes = [r for r in decodes if r.state is State.RUNNING]
            wanted = self._decode_pages(decodes)
            need = sum(wanted)
        if need * self._memory.page_size > self._memory.available:
            return 0
        block = self._memory.take(need)
        at = 0
        tokens = 0
        page = self._memory.page_size
        for request, pages in zip(decodes, wanted, strict=True):
            if pages:
                self._memory.give(request, block[at : at + pages * page])
                at += pages * page
            count = self._decode_count(request)
            if draft.add(request, count) and request.known == request.life_start:
                self._publish(request, draft.number)
            tokens += count
        return tokens

    def _first_that_fit(self, decodes: list[Request], most: int) -> list[Request]:
        """Those who have waited longest, `most` tokens of them; one at least."""
        ordered = sorted(decodes, key=lambda r: r.last_plan)
        totals = itertools.accumulate(self._decode_count(r) for r in ordered)
        return ordered[: max(1, sum(total <= most for total in totals))]

    @staticmethod
    def _decode_count(request: Request) -> int:
        """Tokens that the row may compute and append: no more than can still come, no less than wait to be computed."""
        if request.draft == 1:
            return 1
        room = request.max_position - request.known - request.sampling_flights
        return max(1, min(request.draft, max(room, request.remaining)))

    def _decode_pages(self, decodes: list[Request]) -> list[int]:
        pages = []
        for r in decodes:
            upto = min(r.computed + r.planned + self._decode_count(r), r.kv_cap)
            pages.append(0 if upto <= r.nslots else self._memory.pages_missing(r, upto))
        return pages

    # ---------------------------------------------------------------- prompts

    def _chunk_budget(self, decode_tokens: int, decodes: int) -> int:
        """Prompt tokens of this step: the chunk size less the decodes, but a quarter of it at least.

        A row that may append forced text mostly computes one token all the same, so it is counted as one.
        """
        chunk = self._config.chunked_prefill_size
        budget = NO_LIMIT if chunk < 0 else max(chunk - decodes * self._config.draft, chunk // 4, 1)
        if self._config.max_step_tokens:
            budget = min(budget, self._config.max_step_tokens - decode_tokens)
        return max(0, budget)

    def _add_prompts(self, draft: Draft, running: list[Request], budget: int, suspects: list[Request]) -> None:
        if budget <= 0:
            return
        chosen = [(r, r.remaining) for r in running if r.state is State.RUNNING]  # the decodes may have cost others their row
        chosen += self._admissible(draft.number, budget, chosen, suspects)
        claims = [Claim(-r.submit.priority if self._config.priority_scheduling else 0, n, r.handle) for r, n in chosen]
        granted = [(r, g) for (r, _), g in zip(chosen, split_chunk(claims, budget), strict=True) if g > 0]
        for request, _ in granted:
            if request.state is State.WAITING:
                self._admit(request, draft)
        for request, grant in granted:
            start = request.computed + request.planned
            count = min(grant, request.known - start, request.nslots - start + self._memory.available)
            if count <= 0:
                continue
            self._memory.grow(request, start + count)
            draft.add(request, count)
            draft.new_tokens += count
            self._publish(request, draft.number)

    def _admissible(
        self, number: int, budget: int, running: list[tuple[Request, int]], suspects: list[Request]
    ) -> list[tuple[Request, int]]:
        """Waiting requests that may get a chunk of plan `number`, with what they must compute; none is touched yet."""
        rows = self._batch.free_rows
        if not rows or not len(self._waiting):
            return []
        config, ratio = self._config, self.ratio.value
        room = self._memory.available - sum(reserve(r, ratio) for r in self._batch)
        computing = [r for r in self._batch if r.remaining > 1]
        chosen: list[tuple[Request, int]] = []
        short, admitted = 0, 0
        for request in suspects or self._waiting.candidates(self._memory, number, SCAN):
            if request.state is not State.WAITING or (request.suspect_at >= 0 and not suspects):
                continue
            hit, unlocked = self._memory.peek(request, number)
            if any(self._better_to_wait(request, hit, other) for other in computing):
                continue
            remaining = request.known - hit
            if not self._fits(request, remaining, unlocked, room, first=not (chosen or len(self._batch))):
                self._reclaim()
                break
            if admitted and admitted + min(remaining, budget) > config.max_prefill_tokens:
                break
            room -= reserve(request, ratio) - hit + unlocked
            admitted += min(remaining, budget)
            chosen.append((request, remaining))
            computing.append(request)
            short += remaining if remaining <= budget // 2 else 0
            if len(chosen) >= rows or short >= budget:
                break
        return chosen

    def _fits(self, request: Request, remaining: int, unlocked: int, room: int, *, first: bool) -> bool:
        """Whether there is room for what a waiting request must compute and for its share of new tokens."""
        if first:
            return self._memory.available - unlocked >= self._memory.page_size or self._reclaim()
        future = reserve(request, self.ratio.value) - request.known
        return remaining + future + unlocked <= room

    def _better_to_wait(self, request: Request, hit: int, other: Request) -> bool:
        """Whether `other` is about to compute much of what `request` lacks."""
        reach = hit + max(min(SHARE_LEAST, (request.known - hit) // 2), self._memory.page_size)
        if not self._memory.sharing or other.private or reach > min(request.match_limit, other.known):
            return False
        if request.submit.namespace != other.submit.namespace or request is other:
            return False
        mine, others = request.tokens, other.tokens
        return mine[hit] == others[hit] and mine[:reach].tobytes() == others[:reach].tobytes()

    def _admit(self, request: Request, draft: Draft) -> None:
        self._waiting.admitted(request)
        self._batch.open(request)
        self._memory.attach(request, draft.number)
        if request.cached < 0:
            request.cached = min(request.computed, request.prompt_len)
            draft.cached_tokens += request.cached
            self.admitted.append(request)

    def _publish(self, request: Request, plan: int) -> None:
        upto = min(request.known, request.computed + request.planned)
        self._memory.publish(request, upto, plan, tuple(request.flights[:-1]))

    # ---------------------------------------------------------------- retraction

    def _retract_least(self, wanting: list[Request]) -> bool:
        """Retract the running request that has the least to lose; never the last one. `wanting` need the room."""
        if len(self._batch) < 2:
            return False
        priorities = self._config.priority_scheduling
        victim = min(
            self._batch,
            key=lambda r: (r.submit.priority if priorities else 0, r.outputs, -r.prompt_len, -r.handle),
        )
        before = self.ratio.value
        self.retract(victim)
        self.ratio.retracted(list(self._batch))
        logger.info(
            "KV cache pool is full. Retract requests. #retracted_reqs: 1, #wanting: %d, #new_token_ratio: %.4f -> %.4f",
            len(wanting),
            before,
            self.ratio.value,
        )
        return True

    def _force_retraction(self, number: int) -> None:
        """--force-retract-interval: retract somebody who has come forward since the last time."""
        every = self._config.force_retract_interval
        if every <= 0 or number % every or number == self._forced_at:
            return
        self._forced_at = number
        able = [r for r in self._batch if r.known > r.life_start]
        if able:
            self.retract(able[(number // every) % len(able)])
