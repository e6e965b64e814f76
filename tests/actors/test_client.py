"""EngineClient against a node with real sockets whose actors die: every text must come out whole, whatever happens."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from fakes.fake_node import FakeNode, expected_text
from radixcast.actors.client import EngineClient, reachable
from radixcast.actors.collect import Collector
from radixcast.protocols.buffers import unpack_floats, unpack_ids
from radixcast.protocols.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    LinkClosed,
    Overloaded,
    PayloadTooLarge,
    RequestAborted,
)
from radixcast.protocols.public import Abort, Control, Generate, Tokenize
from radixcast.protocols.sampling import SamplingParams


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rc-") as name:
        yield name


@pytest_asyncio.fixture
async def node(folder: str) -> AsyncIterator[FakeNode]:
    async with FakeNode(folder) as running:
        yield running


@pytest_asyncio.fixture
async def client(node: FakeNode) -> AsyncIterator[EngineClient]:
    async with EngineClient(node.endpoint, name="test") as connected:
        yield connected


def ask(rid: str = "", tokens: int = 20, text: str = "hello", **fields: Any) -> Generate:
    """A request for `tokens` tokens with seed 7."""
    return Generate(rid=rid, text=text, sampling=SamplingParams(max_new_tokens=tokens, seed=7), **fields)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition()` holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition is another side's state
            await asyncio.sleep(0.002)


async def within(work: Awaitable[Any]) -> Any:
    """The result of `work`, which must come."""
    return await asyncio.wait_for(work, 20)


async def test_generate(node: FakeNode, client: EngineClient) -> None:
    output = await within(client.generate("abc", {"max_tokens": 9, "seed": 3}, rid="r"))
    request = node.requests("r")[0]
    assert (output.rid, output.text) == ("r", expected_text(request, 9))
    assert output.token_ids == [ord(c) for c in output.text]
    assert output.finish is not None
    assert output.finish.reason == "length"
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (3, 9)
    await until(lambda: [(a.rid, a.attempt) for a in node.end_acks] == [("r", 0)])
    assert (await within(client.generate([1, 2, 3], {"max_new_tokens": 4}))).usage.prompt_tokens == 12


async def test_welcome_and_questions(node: FakeNode, client: EngineClient) -> None:
    assert client.connected
    assert client.welcome is not None
    assert (client.welcome.model, client.welcome.vocab_size) == ("fake", 256)
    assert [ids.tolist() for ids in await client.tokenize(["ab", "é"])] == [[97, 98], [0xC3, 0xA9]]
    assert await client.detokenize([[104, 105], [33]]) == ["hi", "!"]
    assert (await client.flush_cache()).ok
    assert (await client.stats()).running == 0


async def test_stream_is_contiguous_and_joins_to_the_whole(node: FakeNode, client: EngineClient) -> None:
    collector, pieces = Collector(), 0
    node.step_seconds = 0.002
    async with client.submit(ask("s", 50)) as stream:
        async for delta in stream:
            assert delta.token_offset == collector.journal.token_count
            assert delta.text_offset == collector.journal.text_length
            collector.feed(delta)
            pieces += 1
    assert pieces > 1
    assert collector.ended
    assert collector.output().text == expected_text(ask(), 50)


async def test_slow_reader_gets_one_merged_piece(node: FakeNode, client: EngineClient) -> None:
    stream = client.submit(ask("slow", 200, logprobs=True))
    await until(lambda: node.end_acks)
    deltas = [delta async for delta in stream]
    assert len(deltas) == 1
    assert deltas[0].text == expected_text(ask(), 200)
    assert deltas[0].logprobs is not None
    assert len(deltas[0].logprobs.ids) == 800


async def test_seed_is_drawn_by_the_client(node: FakeNode, client: EngineClient) -> None:
    for rid in ("a", "b"):
        await within(client.submit(Generate(rid=rid, text="x")).result())
    seeds = {node.requests(rid)[0].sampling.seed for rid in ("a", "b")}
    assert len(seeds) == 2
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


async def test_random_seed_of_the_node(folder: str) -> None:
    async with FakeNode(folder) as node:
        node.random_seed = 5
        async with EngineClient(node.endpoint) as client:
            await within(client.submit(Generate(rid="a", text="x")).result())
        assert node.requests("a")[0].sampling.seed == 5


async def test_choices_share_group_and_seed(node: FakeNode, client: EngineClient) -> None:
    streams = client.submit_choices(Generate(rid="c", text="x", sampling=SamplingParams(n=3)), 3)
    outputs = await within(asyncio.gather(*(s.result() for s in streams)))
    assert [o.rid for o in outputs] == ["c", "c_1", "c_2"]
    assert [o.choice for o in outputs] == [0, 1, 2]
    sent = [node.requests(o.rid)[0] for o in outputs]
    assert len({r.sampling.seed for r in sent}) == 1
    assert {r.group for r in sent} == {"c"}
    assert {r.sampling.n for r in sent} == {1}
    assert len({o.text for o in outputs}) == 3


async def test_duplicate_rid(node: FakeNode, client: EngineClient) -> None:
    node.go.clear()
    first = client.submit(ask("c_1"))
    with pytest.raises(DuplicateRequest):
        client.submit(ask("c_1"))
    with pytest.raises(DuplicateRequest):
        client.submit_choices(ask("c"), 3)
    node.go.set()
    assert (await within(first.result())).text
    again = client.submit_choices(ask("c"), 3)
    assert len(await within(asyncio.gather(*(s.result() for s in again)))) == 3


async def test_refusal(node: FakeNode, client: EngineClient) -> None:
    node.refuse.add("no")
    with pytest.raises(ContextLengthExceeded) as refused:
        await within(client.submit(ask("no")).result())
    assert refused.value.info.param == "text"
    assert refused.value.info.status == 400
    assert (await within(client.submit(ask("yes")).result())).text


async def test_what_can_not_be_sent_is_refused_at_once(client: EngineClient) -> None:
    with pytest.raises(InvalidRequest):
        client.submit(Generate(rid="", text="\ud800"))
    with pytest.raises(InvalidRequest):
        client.submit_choices(ask(), 0)
    with pytest.raises(PayloadTooLarge):
        client.submit(Generate(rid="", text="x" * (33 << 20)))
    with pytest.raises(InvalidRequest):
        await client.generate("x", {"temperature": -1})


async def test_cancel_and_leaving_the_block_abort(node: FakeNode, client: EngineClient) -> None:
    node.step_seconds = 0.005
    stream = client.submit(ask("one", 10_000))
    await within(anext(stream))
    stream.cancel("enough")
    stream.cancel("twice")
    with pytest.raises(RequestAborted):
        await within(drain(stream))
    async with client.submit(ask("two", 10_000)) as left:
        await within(anext(left))
    await until(lambda: not node._tasks)
    assert [(m.rid, m.reason) for m in node.received if isinstance(m, Abort)] == [
        ("one", "enough"),
        ("two", "the reader left"),
    ]
    await until(lambda: len(node.end_acks) == 2)
    node.step_seconds = 0
    assert (await within(client.submit(ask("one")).result())).text == expected_text(ask(), 20)


async def test_id_of_a_cancelled_request_may_be_used_at_once(node: FakeNode, client: EngineClient) -> None:
    node.step_seconds = 0.005
    old = client.submit(ask("r", 10_000))
    await within(anext(old))
    old.cancel()
    node.step_seconds = 0
    new = client.submit(ask("r", 10))
    with pytest.raises(DuplicateRequest):
        client.submit(ask("r"))
    given_up = client.submit(ask("q", 10_000))
    given_up.cancel()
    assert (await within(new.result())).text == expected_text(ask(), 10)
    with pytest.raises(RequestAborted):
        await within(drain(old))
    with pytest.raises(RequestAborted):
        await within(drain(given_up))
    kinds = [type(m).__name__ for m in node.received if getattr(m, "rid", "") == "r"]
    assert kinds == ["Generate", "Abort", "Generate"]
    node.step_seconds = 0.005
    waiting = client.submit(ask("w", 10_000))
    await within(anext(waiting))
    waiting.cancel()
    never = client.submit(ask("w"))
    never.cancel()
    with pytest.raises(RequestAborted):
        await within(drain(never))


async def drain(stream: Any) -> None:
    """Read to the end."""
    async for _ in stream:
        pass


async def test_cancelling_choice_0_leaves_the_others(node: FakeNode, client: EngineClient) -> None:
    node.step_seconds = 0.005
    first, *others = client.submit_choices(ask("c", 30), 3)
    await within(anext(first))
    first.cancel()
    with pytest.raises(RequestAborted):
        await within(drain(first))
    outputs = await within(asyncio.gather(*(s.result() for s in others)))
    assert [o.usage.completion_tokens for o in outputs] == [30, 30]
    assert [(m.rid, m.exact) for m in node.received if isinstance(m, Abort)] == [("c", True)]


async def test_abort_by_name(node: FakeNode, client: EngineClient) -> None:
    node.step_seconds = 0.005
    streams = [*client.submit_choices(ask("g", 10_000), 2), client.submit(ask("other", 20))]
    await within(asyncio.gather(*(anext(s) for s in streams)))
    async with EngineClient(node.endpoint) as somebody:
        await somebody.abort("g")
        await somebody.tokenize(["x"])
    assert len(node._tasks) == 3
    await client.abort("g", reason="tired")
    for stream in streams[:2]:
        with pytest.raises(RequestAborted):
            await within(drain(stream))
    await within(drain(streams[2]))


async def test_what_was_aborted_by_name_is_not_submitted_again(node: FakeNode, client: EngineClient) -> None:
    node.busy_attempts.add(("busy", 1))
    node.step_seconds = 0.005
    busy, lost = client.submit(ask("busy", 10_000)), client.submit(ask("lost", 10_000))
    await within(asyncio.gather(anext(busy), anext(lost)))
    node.kill_detokenizer()
    node.start_detokenizer()
    await until(lambda: node.requests("busy")[-1].attempt == 1 and not busy.sent)
    await client.abort("busy")
    with pytest.raises(RequestAborted):
        await within(drain(busy))
    await until(lambda: lost.started)
    node.kill_tokenizer()
    await until(lambda: not client.connected)
    await client.abort("lost")
    node.start_tokenizer()
    with pytest.raises(RequestAborted):
        await within(drain(lost))
    assert [r.attempt for r in node.requests("busy")] == [0, 1]
    assert [r.attempt for r in node.requests("lost")] == [0, 1]


async def test_an_id_is_used_again_with_a_higher_attempt(node: FakeNode, client: EngineClient) -> None:
    for attempt in range(3):
        assert (await within(client.submit(ask("r")).result())).text == expected_text(ask(), 20)
        assert node.requests("r")[-1].attempt == attempt
    node.step_seconds = 0.005
    left = client.submit(ask("r", 10_000))
    await within(anext(left))
    left.cancel()
    node.step_seconds = 0
    assert (await within(client.submit(ask("r")).result())).text == expected_text(ask(), 20)
    node.busy_attempts.add(("r", 5))
    with pytest.raises(Overloaded):  # it was not running before
        await within(client.submit(ask("r")).result())


async def test_questions_have_a_deadline(node: FakeNode, client: EngineClient) -> None:
    node.deaf = True
    for question in (client.stats, client.flush_cache):
        with pytest.raises(Overloaded, match=r"not answered '(stats|flush_cache)' within 0.05 s"):
            await question(timeout=0.05)
    with pytest.raises(Overloaded, match="not answered 'tokenize'"):
        await client.tokenize(["x"], timeout=0.05)
    asked = asyncio.create_task(client.stats())
    await until(lambda: sum(isinstance(m, Control) and m.what == "stats" for m in node.received) == 2)
    node.deaf = False
    node.replace_scheduler()  # a further Welcome: asked again
    assert (await within(asked)).running == 0
    node.kill_tokenizer()
    await until(lambda: not client.connected)
    with pytest.raises(Overloaded, match="is away"):
        await client.detokenize([[1]], timeout=0.05)
    heard = len(node.received)
    node.start_tokenizer()
    await client.connect()
    await client.tokenize(["x"])
    assert [type(m) for m in node.received[heard:]] == [Tokenize]  # who asked before does not wait any more


async def test_length_is_a_default_unless_given(node: FakeNode, client: EngineClient) -> None:
    await within(client.generate("x", {"temperature": 0}, rid="default"))
    await within(client.generate("x", {"max_tokens": 5}, rid="given"))
    await within(client.generate("x", SamplingParams(max_new_tokens=5), rid="object"))
    assert [node.requests(rid)[0].clip for rid in ("default", "given", "object")] == [True, False, False]


@pytest.mark.parametrize("actor", ["tokenizer", "detokenizer", "both"])
async def test_stream_goes_on_when_an_actor_is_replaced(node: FakeNode, client: EngineClient, actor: str) -> None:
    node.step_seconds = 0.002
    request = ask("s", 120, logprobs=True, logprob_start=0, return_prompt_ids=True)
    others = [client.submit(msgspec.structs.replace(ask(f"o{i}", 60, text=f"p{i}"))) for i in range(5)]
    collector = Collector()
    async with client.submit(request) as stream:
        async for delta in stream:
            collector.feed(delta)
            count = collector.journal.token_count
            if count in (31, 32) and len(node.requests("s")) == 1 and client.connected:
                if actor != "detokenizer":
                    node.kill_tokenizer()
                if actor != "tokenizer":
                    node.kill_detokenizer()
                await asyncio.sleep(0.05)
                if actor != "detokenizer":
                    node.start_tokenizer()
                if actor != "tokenizer":
                    node.start_detokenizer()
                await client.connect()
    output = collector.output()
    assert output.text == expected_text(request, 120)
    assert output.token_ids == [ord(c) for c in output.text]
    assert output.logprobs is not None
    assert unpack_ids(output.logprobs.ids).tolist() == output.token_ids
    assert output.prompt_ids == list(b"hello")
    assert output.prompt_logprobs is not None
    assert math.isnan(unpack_floats(output.prompt_logprobs.values)[0])
    for i, other in enumerate(others):
        assert (await within(other.result())).text == expected_text(ask(text=f"p{i}"), 60)
    sent = node.requests("s")
    assert [r.attempt for r in sent] == list(range(len(sent)))
    if actor == "tokenizer":
        assert len(sent) == 1
    else:
        assert len(sent) == 2
        assert sent[1].output_ids
        assert sent[1].logprob_start == -1


async def test_streams_go_on_when_the_scheduler_is_replaced(node: FakeNode, client: EngineClient) -> None:
    node.step_seconds = 0.002
    streaming = client.submit(ask("streaming", 60))
    first = await within(anext(streaming))
    node.go.clear()
    waiting = client.submit(ask("waiting", 30))
    await until(lambda: node.requests("waiting"))
    node.replace_scheduler()
    node.go.set()
    rest = [delta async for delta in streaming]
    assert first.text + "".join(d.text for d in rest) == expected_text(ask(), 60)
    assert (await within(waiting.result())).text == expected_text(ask(), 30)
    assert [r.attempt for r in node.requests("streaming")] == [0, 1]
    assert node.requests("streaming")[1].output_ids
    assert [r.attempt for r in node.requests("waiting")] == [0, 1]


async def test_a_request_that_is_lost_for_ever_fails(node: FakeNode, client: EngineClient) -> None:
    node.step_seconds = 0.05
    stream = client.submit(ask("s", 60))
    await until(lambda: node.requests("s"))
    for attempt in range(1, 9):
        node.replace_scheduler()
        await until(lambda attempt=attempt: len(node.requests("s")) > attempt)  # type: ignore[misc]
    node.replace_scheduler()
    with pytest.raises(InternalError, match="8 times in a row"):
        await within(stream.result())


async def test_questions_survive_the_tokenizer(node: FakeNode, client: EngineClient) -> None:
    node.kill_tokenizer()
    await until(lambda: not client.connected)
    question = asyncio.create_task(client.tokenize(["ab"]))
    late = client.submit(ask("late"))
    await asyncio.sleep(0.02)
    node.start_tokenizer()
    assert [ids.tolist() for ids in await within(question)] == [[97, 98]]
    assert (await within(late.result())).text == expected_text(ask(), 20)
    assert [r.attempt for r in node.requests("late")] == [0]


async def test_cancel_while_the_node_is_away(node: FakeNode, client: EngineClient) -> None:
    node.step_seconds = 0.005
    running = client.submit(ask("running", 10_000))
    await within(anext(running))
    node.kill_tokenizer()
    node.kill_detokenizer()
    await until(lambda: not client.connected)
    unsent = client.submit(ask("unsent"))
    for stream in (running, unsent):
        stream.cancel()
        with pytest.raises(RequestAborted):
            await within(drain(stream))
    node.start()
    await client.connect()
    assert (await within(client.generate("x", {"max_new_tokens": 3}))).text
    assert not node.requests("unsent")


async def test_busy_node_does_not_end_a_request_that_was_running(node: FakeNode, client: EngineClient) -> None:
    node.step_seconds = 0.002
    node.busy_attempts.add(("s", 1))
    stream = client.submit(ask("s", 60))
    first = await within(anext(stream))
    node.kill_detokenizer()
    node.start_detokenizer()
    rest = [delta async for delta in stream]
    assert first.text + "".join(d.text for d in rest) == expected_text(ask(), 60)
    assert [r.attempt for r in node.requests("s")] == [0, 1, 2]


async def test_patience_ends(folder: str) -> None:
    node = FakeNode(folder, step_seconds=0.005)
    node.start()
    async with EngineClient(node.endpoint, patience=0.1) as client:
        stream = client.submit(ask("s", 10_000))
        question = asyncio.create_task(client.tokenize(["x"]))
        await within(anext(stream))
        await within(question)
        node.kill_tokenizer()
        node.kill_detokenizer()
        with pytest.raises(Overloaded) as gone:
            await within(drain(stream))
        assert gone.value.info.code == "node_unavailable"
    await node.close()


async def test_nobody_there(folder: str) -> None:
    client = EngineClient(f"ipc://{folder}/in")
    with pytest.raises(LinkClosed):
        client.submit(ask())
    with pytest.raises(LinkClosed):
        await client.connect(timeout=0.1)
    node = FakeNode(folder)
    node.start()
    await client.connect()
    assert (await within(client.generate("x"))).text
    await client.close()
    await client.close()
    with pytest.raises(LinkClosed):
        client.submit(ask())
    await node.close()


async def test_close_aborts_what_is_open(node: FakeNode) -> None:
    node.step_seconds = 0.005
    async with EngineClient(node.endpoint) as client:
        stream = client.submit(ask("s", 10_000))
        await within(anext(stream))
    with pytest.raises(RequestAborted):
        await within(drain(stream))
    await until(lambda: not node._tasks)


async def test_tcp_needs_a_key() -> None:
    client = EngineClient("tcp://127.0.0.1:1")
    with pytest.raises(LinkClosed, match="key"):
        await client.connect(timeout=1)
    await client.close()


@pytest.mark.parametrize(
    ("told", "dialled", "expected"),
    [
        ("ipc:///a/out", "ipc:///a/in", "ipc:///a/out"),
        ("tcp://10.0.0.1:5", "tcp://gpu:4", "tcp://10.0.0.1:5"),
        ("tcp://0.0.0.0:5", "tcp://gpu:4", "tcp://gpu:5"),
        ("tcp://*:5", "tcp://[::1]:4", "tcp://[::1]:5"),
    ],
)
def test_reachable(told: str, dialled: str, expected: str) -> None:
    assert reachable(told, dialled) == expected


@pytest.mark.parametrize("seed", range(4))
async def test_every_text_comes_out_whole_whatever_dies(node: FakeNode, client: EngineClient, seed: int) -> None:
    chance = random.Random(seed)
    node.step_seconds = 0.002
    requests = [ask(f"r{i}", chance.randint(1, 80), text=f"p{i}", logprobs=True) for i in range(12)]
    results = [asyncio.create_task(client.submit(r).result()) for r in requests[:6]]
    for step in range(6):
        results.append(asyncio.create_task(client.submit(requests[6 + step]).result()))
        await asyncio.sleep(chance.uniform(0.005, 0.04))
        what = chance.choice(["tokenizer", "detokenizer", "scheduler", "both"])
        if what == "scheduler":
            node.replace_scheduler()
            continue
        if what != "detokenizer":
            node.kill_tokenizer()
        if what != "tokenizer":
            node.kill_detokenizer()
        await asyncio.sleep(chance.uniform(0, 0.03))
        if what != "detokenizer":
            node.start_tokenizer()
        if what != "tokenizer":
            node.start_detokenizer()
    for request, output in zip(requests, await within(asyncio.gather(*results)), strict=True):
        count = request.sampling.max_new_tokens or 0
        assert output.text == expected_text(request, count)
        assert output.usage.completion_tokens == count
        assert output.logprobs is not None
        assert unpack_ids(output.logprobs.ids).tolist() == output.token_ids == [ord(c) for c in output.text]
