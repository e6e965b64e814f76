"""The detokenizer actor without sockets: who is told what, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fakes.byte_tokenizer import EOS_ID, VOCAB_SIZE, ids_of, write_byte_tokenizer
from fakes.recorded_actor import Recorded, model_spec, node_setup
from radixcast.actors.detokenizer.actor import GONE_SECONDS, DetokenizerActor
from radixcast.actors.setup import SCHEDULER
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import InternalError, StartupError
from radixcast.protocols.internal import END_EOS, END_ERROR, END_GRAMMAR, END_LENGTH, DeltaEnd, Finished, Open, TokenDeltas
from radixcast.protocols.public import EndAck, Finish, TextDelta
from radixcast.protocols.sampling import SamplingParams


class Quiet(Recorded, DetokenizerActor):
    """The actor under test."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def actor(tmp_path: Path) -> Any:
    model = model_spec(write_byte_tokenizer(tmp_path), vocab_size=VOCAB_SIZE)
    quiet = Quiet(node_setup(model, tmp_path), 1, Clock())
    quiet.record()
    await quiet.start()
    quiet.on_link_up("client:a")
    yield quiet
    for task in quiet.work:
        task.cancel()


def open_of(handle: int, client: str = "client:a", **changes: Any) -> Open:
    values: dict[str, Any] = {
        "handle": handle,
        "client": client,
        "rid": f"r{handle}",
        "attempt": 0,
        "choice": 0,
        "prompt_tail": b"",
        "output_ids": b"",
        "sampling": SamplingParams(),
        "prompt_tokens": 5,
    }
    return Open(**(values | changes))


def deltas(rows: dict[int, str | list[int]], ends: dict[int, int] | None = None, **changes: Any) -> TokenDeltas:
    ids = [ids_of(row) if isinstance(row, str) else row for row in rows.values()]
    return TokenDeltas(
        handles=pack_ids(rows),
        counts=pack_ids(map(len, ids)),
        tokens=pack_ids([i for row in ids for i in row]),
        ends=[DeltaEnd(handle=h, reason=r, token=EOS_ID if r == END_EOS else -1) for h, r in (ends or {}).items()],
        **changes,
    )


def finished(messages: list[Any]) -> dict[int, int]:
    told: dict[int, int] = {}
    for message in messages:
        if isinstance(message, Finished):
            told |= dict(zip(unpack_ids(message.handles).tolist(), unpack_ids(message.positions).tolist(), strict=True))
    return told


def finish_of(messages: list[Any]) -> Finish:
    """The finish of the one last delta among `messages`."""
    (finish,) = [m.finish for m in messages if isinstance(m, TextDelta) and m.finish]
    return finish


async def test_one_step_one_delta_for_each_output(actor: Quiet) -> None:
    for handle in (1, 2):
        await actor.say(open_of(handle), SCHEDULER)
    await actor.say(deltas({1: "ab", 2: "c"}, cached=pack_ids([4, 0]), retractions=pack_ids([0, 1])), SCHEDULER)
    first, second = actor.take(TextDelta)
    assert (first.rid, first.text, first.usage.cached_tokens, first.usage.retractions) == ("r1", "ab", 4, 0)
    assert (second.rid, second.text, second.usage.cached_tokens, second.usage.retractions) == ("r2", "c", 0, 1)
    await actor.say(deltas({2: [*ids_of("d"), EOS_ID], 1: "e"}, {2: END_EOS}), SCHEDULER)
    last = next(m for _, m in actor.sent if isinstance(m, TextDelta) and m.finish)
    assert last.usage is not None
    assert (last.rid, last.text, last.usage.completion_tokens) == ("r2", "d", 3)
    assert last.usage.cached_tokens == 0, "an empty `cached` leaves it unchanged"
    assert finished(actor.take()) == {2: 3}
    await actor.say(EndAck(rid="r2"), "client:a")
    assert actor.stats()["outputs"] == 1


async def test_forced_tokens_are_counted_as_far_as_the_text_counts(actor: Quiet) -> None:
    await actor.say(open_of(1), SCHEDULER)
    await actor.say(open_of(2, sampling=SamplingParams(stop=("c",))), SCHEDULER)
    await actor.say(deltas({1: "abc", 2: "abcde"}, forced=pack_ids([2, 4])), SCHEDULER)
    assert [(m.rid, m.usage.forced_tokens) for m in actor.take(TextDelta)] == [("r1", 2), ("r2", 3)]
    await actor.say(deltas({1: "d"}, {1: END_GRAMMAR}), SCHEDULER)
    (last,) = actor.take(TextDelta)
    assert (last.text, last.usage.completion_tokens, last.usage.forced_tokens) == ("d", 4, 2)
    assert last.finish == Finish(reason="stop", matched=None)


async def test_text_end_is_told_once_and_later_tokens_are_ignored(actor: Quiet) -> None:
    await actor.say(open_of(1, sampling=SamplingParams(stop=("b",))), SCHEDULER)
    await actor.say(deltas({1: "abc"}), SCHEDULER)
    assert finished(actor.take()) == {1: 2}
    await actor.say(deltas({1: "def"}, {1: END_LENGTH}), SCHEDULER)
    assert actor.take() == []


async def test_plain_answer_is_one_delta(actor: Quiet) -> None:
    await actor.say(open_of(1, stream=False), SCHEDULER)
    for char in "hello":
        await actor.say(deltas({1: char}), SCHEDULER)
    assert actor.take() == []
    await actor.say(deltas({1: "!"}, {1: END_LENGTH}), SCHEDULER)
    (delta,) = actor.take(TextDelta)
    assert (delta.text, delta.token_offset, delta.finish.reason) == ("hello!", 0, "length")


async def test_end_without_tokens(actor: Quiet) -> None:
    await actor.say(open_of(1), SCHEDULER)
    await actor.say(deltas({}, {1: 0}), SCHEDULER)
    assert actor.take(TextDelta)[0].finish.reason == "abort"
    await actor.say(open_of(2), SCHEDULER)
    error = InternalError("boom").info
    await actor.say(
        TokenDeltas(handles=b"", counts=b"", tokens=b"", ends=[DeltaEnd(handle=2, reason=END_ERROR, error=error)]), SCHEDULER
    )
    finish = actor.take(TextDelta)[0].finish
    assert (finish.reason, finish.error) == ("error", error)


async def test_slow_reader_costs_one_merged_delta(actor: Quiet) -> None:
    await actor.say(open_of(1), SCHEDULER)
    await actor.say(open_of(2, "client:b"), SCHEDULER)
    actor.on_link_up("client:b")
    actor.deaf.add("client:a")
    for char in "merged":
        await actor.say(deltas({1: char, 2: char}), SCHEDULER)
    assert [m.rid for m in actor.take(TextDelta)] == ["r2"] * 6, "others are not held up"
    actor.deaf.clear()
    actor.on_writable("client:a")
    (delta,) = actor.take(TextDelta)
    assert delta.text == "merged"


async def test_output_waits_for_a_client_that_is_not_there_yet(actor: Quiet) -> None:
    actor.deaf.add("client:late")
    await actor.say(open_of(1, "client:late"), SCHEDULER)
    await actor.say(deltas({1: "early"}, {1: END_LENGTH}), SCHEDULER)
    assert finished(actor.take()) == {1: 5}
    actor.deaf.clear()
    actor.on_link_up("client:late")
    (delta,) = actor.take(TextDelta)
    assert (delta.text, delta.finish.reason) == ("early", "length")
    assert actor.stats()["outputs"] == 0


async def test_outputs_of_a_client_that_is_gone_are_ended(actor: Quiet) -> None:
    await actor.say(open_of(1), SCHEDULER)
    await actor.say(deltas({1: "abc"}), SCHEDULER)
    actor.deaf.add("client:a")
    actor.on_link_down("client:a", "died")
    actor.take()
    clock = actor._clock
    assert isinstance(clock, Clock)
    clock.now += GONE_SECONDS - 1
    actor.sweep()
    assert actor.take() == []
    await actor.say(deltas({1: "d"}), SCHEDULER)
    clock.now += 1
    actor.sweep()
    assert finished(actor.take()) == {1: 4}
    assert actor.stats()["outputs"] == actor.stats()["waiting_deltas"] == 0
    await actor.say(open_of(2), SCHEDULER)
    await actor.say(deltas({2: "x"}), SCHEDULER)
    clock.now += GONE_SECONDS
    actor.sweep()
    assert finished(actor.take()) == {2: 1}, "and so are those that it left in the queue"


async def test_finished_waits_for_a_full_scheduler(actor: Quiet) -> None:
    await actor.say(open_of(1), SCHEDULER)
    actor.deaf.add(SCHEDULER)
    await actor.say(deltas({1: "a"}, {1: END_LENGTH}), SCHEDULER)
    assert actor.take(Finished) == []
    actor.deaf.clear()
    actor.on_writable(SCHEDULER)
    assert finished(actor.take()) == {1: 1}


async def test_without_the_scheduler_every_client_hears_it(actor: Quiet) -> None:
    await actor.say(open_of(1, sampling=SamplingParams(stop=("bc",))), SCHEDULER)
    await actor.say(deltas({1: "ab"}), SCHEDULER)
    actor.take()
    actor.on_link_down(SCHEDULER, "died")
    (delta,) = actor.take(TextDelta)
    assert (delta.text, delta.finish.reason, delta.finish.error.code) == ("", "error", "scheduler_lost")


async def test_earlier_life_that_had_ended_is_finished_at_once(actor: Quiet) -> None:
    await actor.say(open_of(1, sampling=SamplingParams(stop=("b",)), output_ids=pack_ids(ids_of("ab"))), SCHEDULER)
    sent = actor.take()
    assert finished(sent) == {1: 2}
    assert finish_of(sent).matched == "b"


async def test_bad_open_is_refused_and_harms_nobody(actor: Quiet) -> None:
    await actor.say(open_of(1), SCHEDULER)
    await actor.say(open_of(2, sampling=SamplingParams(stop_regex=("a*",))), SCHEDULER)
    sent = actor.take()
    assert finished(sent) == {2: 0}
    error = finish_of(sent).error
    assert error is not None
    assert error.param == "sampling_params.stop_regex"
    await actor.say(deltas({1: "on", 2: "x"}), SCHEDULER)
    assert [m.text for m in actor.take(TextDelta)] == ["on"]


async def test_a_fault_in_one_row_ends_that_output_only(actor: Quiet) -> None:
    for handle in (1, 2):
        await actor.say(open_of(handle), SCHEDULER)
    await actor.say(deltas({1: [VOCAB_SIZE + 1000], 2: "ok"}), SCHEDULER)
    first, second = actor.take(TextDelta)
    assert (first.finish.reason, first.finish.error.status) == ("error", 500)
    assert (second.text, second.finish) == ("ok", None)


async def test_malformed_step_ends_what_it_names(actor: Quiet) -> None:
    await actor.say(open_of(1), SCHEDULER)
    await actor.say(TokenDeltas(handles=pack_ids([1]), counts=b"", tokens=b""), SCHEDULER)
    assert actor.take(TextDelta)[0].finish.reason == "error"


async def test_drain_waits_for_running_outputs(actor: Quiet) -> None:
    await actor.say(open_of(1), SCHEDULER)
    drained = asyncio.ensure_future(actor.drain(5))
    await asyncio.sleep(0.03)
    assert not drained.done()
    await actor.say(deltas({1: "a"}, {1: END_LENGTH}), SCHEDULER)
    await asyncio.wait_for(drained, 5)


async def test_unreadable_tokenizer_is_a_startup_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    quiet = Quiet(node_setup(model_spec(tmp_path / "tokenizer.json", vocab_size=8), tmp_path), 1)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        await quiet.start()
