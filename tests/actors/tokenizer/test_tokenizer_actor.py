"""The tokenizer actor without sockets: every message in, the right message out, and no waiting for a long prompt."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.byte_tokenizer import CHATML, EOS_ID, IM_END_ID, IM_START_ID, VOCAB_SIZE, ids_of, write_byte_tokenizer
from fakes.recorded_actor import Recorded, model_spec, node_setup
from radixcast.actors.setup import SCHEDULER, SUPERVISOR
from radixcast.actors.tokenizer import actor as module
from radixcast.actors.tokenizer.actor import TokenizerActor
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import Overloaded
from radixcast.protocols.internal import AbortOf, Capacity, ControlDone, ControlOf, NodeState, Submit, SubmitRefused
from radixcast.protocols.public import (
    Abort,
    Chat,
    Control,
    ControlReply,
    Detokenize,
    DetokenizeReply,
    Generate,
    Refused,
    SchedulerStats,
    Tokenize,
    TokenizeReply,
    Welcome,
)
from radixcast.protocols.sampling import SamplingParams

CLIENT = "client:a"
LONG = "word " * 1500


class Quiet(Recorded, TokenizerActor):
    """The actor under test."""

    async def settle(self) -> None:
        """Wait for everything in threads."""
        await asyncio.gather(*self.work)


@pytest.fixture
async def actor(tmp_path: Path) -> Any:
    model = model_spec(
        write_byte_tokenizer(tmp_path),
        vocab_size=VOCAB_SIZE,
        context_length=10_000,
        chat_template=CHATML,
        eos_token_ids=(EOS_ID,),
    )
    quiet = Quiet(node_setup(model, tmp_path, random_seed=5), 1)
    quiet.record()
    await quiet.start()
    yield quiet
    await quiet.settle()
    await quiet.stop()


async def test_welcome_on_link_up_and_again_with_the_capacity(actor: Quiet) -> None:
    actor.on_link_up(CLIENT)
    (welcome,) = actor.take(Welcome)
    assert (welcome.output_endpoint, welcome.model, welcome.context_length) == ("inproc://out", "fake", 10_000)
    assert (welcome.vocab_size, welcome.max_total_tokens, welcome.has_chat_template) == (VOCAB_SIZE, 0, True)
    assert welcome.random_seed == 5
    await actor.say(Capacity(total_tokens=777, max_running=4, context_length=9000), SCHEDULER)
    (welcome,) = actor.take(Welcome)
    assert (welcome.max_total_tokens, welcome.context_length) == (777, 9000)
    actor.on_link_down(CLIENT, "gone")
    await actor.say(Capacity(total_tokens=778, max_running=4, context_length=9000), SCHEDULER)
    assert actor.take() == []


async def test_short_text_is_submitted_at_once(actor: Quiet) -> None:
    await actor.say(Generate(rid="r", text="hi"), CLIENT)
    ((peer, submit),) = actor.sent
    assert peer == SCHEDULER
    assert isinstance(submit, Submit)
    assert (submit.client, unpack_ids(submit.prompt_ids).tolist()) == (CLIENT, ids_of("hi"))


async def test_ids_are_submitted_as_they_are(actor: Quiet) -> None:
    await actor.say(Generate(rid="r", input_ids=pack_ids([3, 1, 2])), CLIENT)
    assert actor.take(Submit)[0].prompt_ids == pack_ids([3, 1, 2])


async def test_chat_is_rendered_without_further_special_tokens(actor: Quiet) -> None:
    await actor.say(Generate(rid="r", chat=Chat(messages=[{"role": "user", "content": "Hé<|eos|>"}])), CLIENT)
    await actor.settle()
    (submit,) = actor.take(Submit)
    expected = [IM_START_ID, *ids_of("user\nHé"), EOS_ID, IM_END_ID, *ids_of("\n"), IM_START_ID, *ids_of("assistant\n")]
    assert unpack_ids(submit.prompt_ids).tolist() == expected


@pytest.mark.parametrize(
    ("generate", "param"),
    [
        (Generate(rid="r", text=""), "text"),
        (Generate(rid="r"), "text"),
        (Generate(rid="r", chat=Chat(messages=[{"role": "user"}])), "messages[0].content"),
        (Generate(rid="r", text="x", sampling=SamplingParams(top_p=0.0)), "sampling_params.top_p"),
        (Generate(rid="r", text="x" * 9999), "sampling_params.max_new_tokens"),
        (Generate(rid="r", text="x" * 10_001), "text"),
        (Generate(rid="r", text="q" * 700_000), "text"),
    ],
)
async def test_bad_requests_are_refused_by_name(actor: Quiet, generate: Generate, param: str) -> None:
    await actor.say(generate, CLIENT)
    await actor.settle()
    ((peer, refused),) = actor.sent
    assert isinstance(refused, Refused)
    assert (peer, refused.rid, refused.error.status, refused.error.param) == (CLIENT, "r", 400, param)
    assert not actor.busy


class Gate:
    """Holds the tokenising thread until the test opens it."""

    def __init__(self, actor: Quiet) -> None:
        self.open = threading.Event()
        encoder = actor._encoder
        encode = encoder.encode

        def slow(text: str, *, add_special_tokens: bool) -> Any:
            if len(text) > module.SHORT_CHARS:
                self.open.wait(20)
            return encode(text, add_special_tokens=add_special_tokens)

        encoder.encode = slow  # type: ignore[method-assign]


async def test_a_long_prompt_never_stalls_short_ones(actor: Quiet) -> None:
    gate = Gate(actor)
    for number in range(4):
        await actor.say(Generate(rid=f"long{number}", text=LONG), CLIENT)
    await actor.say(Generate(rid="short", text="hi"), CLIENT)
    assert [m.rid for m in actor.take(Submit)] == ["short"]
    assert actor.busy
    gate.open.set()
    await actor.settle()
    assert sorted(m.rid for m in actor.take(Submit)) == [f"long{n}" for n in range(4)]
    assert not actor.busy


@pytest.mark.parametrize(
    ("abort", "hit"),
    [
        (Abort(rid="job"), True),
        (Abort(rid="g"), True),
        (Abort(rid="g", exact=True), False),
        (Abort(rid="other"), False),
        (Abort(all=True), True),
        (Abort(), False),
    ],
)
async def test_abort_of_a_prompt_in_a_thread(actor: Quiet, abort: Abort, hit: bool) -> None:
    gate = Gate(actor)
    await actor.say(Generate(rid="job", group="g", text=LONG), CLIENT)
    await actor.say(abort, "client:b")
    passed_on = AbortOf(rid=abort.rid, all=abort.all, exact=abort.exact, client="client:b")
    assert actor.take() == [passed_on]  # somebody else's request
    await actor.say(abort, CLIENT)
    sent = actor.take()
    assert [m.error.status for m in sent if isinstance(m, Refused)] == [499] * hit
    assert sent[-1] == msgspec.structs.replace(passed_on, client=CLIENT)
    await actor.say(Generate(rid="job", group="g", text="again"), CLIENT)  # at once
    assert len(actor.take(Submit)) == 1
    gate.open.set()
    await actor.settle()
    assert len(actor.take(Submit)) == (not hit)


async def test_a_higher_attempt_replaces_one_in_a_thread(actor: Quiet) -> None:
    gate = Gate(actor)
    for attempt in (0, 1):
        await actor.say(Generate(rid="job", attempt=attempt, text=LONG), CLIENT)
    await actor.say(Generate(rid="job", text=LONG), "client:b")
    gate.open.set()
    await actor.settle()
    assert sorted((m.client, m.attempt) for m in actor.take()) == [(CLIENT, 1), ("client:b", 0)]


async def test_what_a_busy_scheduler_can_not_take_waits_in_order(actor: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    actor.deaf.add(SCHEDULER)
    await actor.say(Generate(rid="r", text="hi"), CLIENT)
    await actor.say(Abort(rid="r"), CLIENT)
    await actor.say(Generate(rid="r", text="hi"), CLIENT)
    await actor.say(Control(id="1", what="stats"), CLIENT)
    monkeypatch.setattr(module, "MAX_WAITING", 4)
    await actor.say(Generate(rid="full", text="hi"), CLIENT)
    assert [(m.rid, m.error.status) for m in actor.take()] == [("full", 503)]
    actor.deaf.clear()
    actor.on_writable(SCHEDULER)
    assert [type(m) for m in actor.take()] == [Submit, AbortOf, Submit, ControlOf]
    actor.on_writable(SCHEDULER)
    assert actor.take() == []


async def test_what_a_slow_client_can_not_take_waits_until_it_leaves(actor: Quiet) -> None:
    actor.on_link_up(CLIENT)
    actor.take()
    actor.deaf.add(CLIENT)
    for rid in ("a", "b"):
        await actor.say(Generate(rid=rid, text=""), CLIENT)
    actor.deaf.clear()
    actor.on_writable(CLIENT)
    assert [m.rid for m in actor.take(Refused)] == ["a", "b"]
    actor.deaf.add(CLIENT)
    await actor.say(Generate(rid="c", text=""), CLIENT)
    actor.on_link_down(CLIENT, "gone")
    await actor.say(Generate(rid="d", text=""), CLIENT)
    actor.deaf.clear()
    actor.on_writable(CLIENT)
    assert actor.take() == []


async def test_abort_of_a_group_reaches_threads_and_scheduler(actor: Quiet) -> None:
    gate = Gate(actor)
    for choice in range(2):
        await actor.say(Generate(rid=f"g_{choice}", group="g", choice=choice, text=LONG), CLIENT)
    await actor.say(Abort(rid="g", reason="tired"), CLIENT)
    sent = actor.take()
    assert [m.error.message for m in sent if isinstance(m, Refused)] == ["tired"] * 2
    assert [m.rid for m in sent if isinstance(m, AbortOf)] == ["g"]
    gate.open.set()
    await actor.settle()
    assert actor.take() == []


async def test_a_lost_client_is_not_submitted(actor: Quiet) -> None:
    gate = Gate(actor)
    await actor.say(Generate(rid="job", text=LONG), CLIENT)
    actor.on_link_down(CLIENT, "gone")
    gate.open.set()
    await actor.settle()
    assert actor.take() == []


async def test_overload_is_refused_at_the_door(actor: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    actor.on_link_down(SCHEDULER, "killed")
    await actor.say(Generate(rid="r", text="hi"), CLIENT)
    error = actor.take(Refused)[0].error
    assert (error.status, error.retry_after) == (503, 1.0)
    await actor.say(Abort(rid="r"), CLIENT)
    assert actor.take() == []
    actor.on_link_up(SCHEDULER)
    monkeypatch.setattr(module, "MAX_JOB_CHARS", len(LONG))
    gate = Gate(actor)
    for rid in ("first", "second"):
        await actor.say(Generate(rid=rid, text=LONG), CLIENT)
    assert [(m.rid, m.error.status) for m in actor.take(Refused)] == [("second", 503)]
    gate.open.set()
    await actor.settle()
    assert actor._job_chars == 0


async def test_draining_node_takes_nothing_new(actor: Quiet) -> None:
    await actor.say(NodeState(state="draining", actors=[]), SUPERVISOR)
    await actor.say(Generate(rid="r", text="hi"), CLIENT)
    assert actor.take(Refused)[0].error.status == 503
    await actor.drain(1)


async def test_tokenize_and_back(actor: Quiet) -> None:
    texts = ["hi", "", "你"]
    await actor.say(Tokenize(id="1", texts=texts), CLIENT)
    (reply,) = actor.take(TokenizeReply)
    assert [unpack_ids(ids).tolist() for ids in reply.ids] == [ids_of(t) for t in texts]
    await actor.say(Detokenize(id="2", ids=[*reply.ids, pack_ids([EOS_ID])]), CLIENT)
    assert actor.take() == [DetokenizeReply(id="2", texts=[*texts, ""])]
    await actor.say(Detokenize(id="2", ids=[pack_ids([EOS_ID])], skip_special_tokens=False), CLIENT)
    assert actor.take()[0].texts == ["<|eos|>"]
    await actor.say(Tokenize(id="3", texts=[LONG]), CLIENT)
    await actor.say(
        Tokenize(id="4", chat=Chat(messages=[{"role": "user", "content": "x"}], add_generation_prompt=False)), CLIENT
    )
    await actor.settle()
    replies = {m.id: m for m in actor.take(TokenizeReply)}
    assert len(replies["3"].ids[0]) == 4 * len(LONG)
    assert unpack_ids(replies["4"].ids[0]).tolist() == [IM_START_ID, *ids_of("user\nx"), IM_END_ID, *ids_of("\n")]


@pytest.mark.parametrize(
    "message",
    [
        Detokenize(id="x", ids=[pack_ids([VOCAB_SIZE])]),
        Detokenize(id="x", ids=[b"abc"]),
        Detokenize(id="x", ids=[b""] * 3000),
        Tokenize(id="x", texts=["a"] * 3000),
        Tokenize(id="x", texts=["a" * 700_000]),
        Tokenize(id="x", texts=["a"], chat=Chat(messages=[])),
        Tokenize(id="x", chat=Chat(messages=[])),
    ],
)
async def test_bad_tokenize_and_detokenize(actor: Quiet, message: msgspec.Struct) -> None:
    await actor.say(message, CLIENT)
    await actor.settle()
    (reply,) = actor.take()
    assert (reply.id, reply.error.status) == ("x", 400)


async def test_control_goes_to_the_scheduler_and_back(actor: Quiet) -> None:
    await actor.say(Control(id="1", what="stats"), CLIENT)
    assert actor.take() == [ControlOf(client=CLIENT, id="1", what="stats")]
    stats = SchedulerStats(running=3)
    await actor.say(ControlDone(client=CLIENT, id="1", stats=stats), SCHEDULER)
    assert actor.sent == [(CLIENT, ControlReply(id="1", stats=stats))]
    actor.take()
    actor.on_link_down(SCHEDULER, "killed")
    await actor.say(Control(id="2", what="flush_cache"), CLIENT)
    assert [(m.id, m.ok) for m in actor.take(ControlReply)] == [("2", False)]


async def test_scheduler_refusals_are_passed_on(actor: Quiet) -> None:
    error = Overloaded("full", retry_after=2.0).info
    await actor.say(SubmitRefused(client=CLIENT, rid="r", attempt=1, error=error), SCHEDULER)
    assert actor.sent == [(CLIENT, Refused(rid="r", attempt=1, error=error))]


async def test_a_fault_of_ours_is_a_500_for_one_request(actor: Quiet) -> None:
    def broken(text: str, *, add_special_tokens: bool) -> Any:
        raise ZeroDivisionError(text)

    actor._encoder.encode = broken  # type: ignore[method-assign]
    await actor.say(Generate(rid="short", text="secret"), CLIENT)
    await actor.say(Generate(rid="long", text=LONG), CLIENT)
    await actor.settle()
    refused = actor.take(Refused)
    assert [(m.rid, m.error.status) for m in refused] == [("short", 500), ("long", 500)]
    assert "secret" not in refused[0].error.message


async def test_model_without_tokenizer_takes_ids(tmp_path: Path) -> None:
    quiet = Quiet(node_setup(model_spec(None, vocab_size=50), tmp_path), 1)
    quiet.record()
    await quiet.start()
    await quiet.say(Generate(rid="a", input_ids=pack_ids([1, 2])), CLIENT)
    await quiet.say(Generate(rid="b", text="x"), CLIENT)
    submit, refused = quiet.take()
    assert (submit.rid, refused.rid, refused.error.param) == ("a", "b", "text")
    await quiet.stop()


@pytest.mark.parametrize("name", ["tokenizer", "detokenizer"])
def test_imports_stay_light(name: str) -> None:
    code = (
        f"import sys, radixcast.actors.{name}.actor\n"
        "print([m for m in ('torch', 'transformers', 'numba', 'aiohttp') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
