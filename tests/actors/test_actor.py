"""The base actor, as tasks over inproc: dispatch, errors, links, start and stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from fakes.dialling import Client, eventually
from fakes.echo import Door, Echo, Hub, Say, tiny_model
from radixcast.actors.actor import Actor, Bind, Dial
from radixcast.actors.local import LocalNode, local_setup
from radixcast.actors.setup import SCHEDULER, TOKENIZER
from radixcast.protocols.errors import StartupError
from radixcast.protocols.internal import NodeState
from radixcast.protocols.server_args import ServerArgs


def make_node(*actors: type[Actor], **args: object) -> LocalNode:
    return LocalNode(local_setup(msgspec.convert(args, ServerArgs), tiny_model()), actors or (Hub, Door))


@pytest_asyncio.fixture
async def node() -> AsyncIterator[LocalNode]:
    async with make_node() as started:
        yield started


@pytest_asyncio.fixture
async def client(node: LocalNode) -> AsyncIterator[Client]:
    made = Client(node.context, node.setup.endpoints.public_in, Echo, peer=TOKENIZER)
    yield made
    made.close()


async def test_messages_go_through_both_actors_and_back(client: Client) -> None:
    for i in range(50):
        answer = await client.ask(Say(f"hello {i}"))
        assert answer.text == f"hello {i}"


async def test_many_messages_keep_their_order(client: Client) -> None:
    await client.up()
    for i in range(300):
        assert client.dealer.send(Say(str(i)))
    await eventually(lambda: len(client.received) == 300)
    assert [m.text for m in client.received] == [str(i) for i in range(300)]


async def test_error_in_a_handler_reaches_on_error_and_harms_nobody_else(client: Client) -> None:
    assert (await client.ask(Say("raise"))).text == "error: raise"
    assert (await client.ask(Say("still here"))).text == "still here"


async def test_error_in_on_error_ends_the_actor_and_it_is_replaced(node: LocalNode, client: Client) -> None:
    before = (await client.ask(Say("x"))).epoch
    old = node.actor(SCHEDULER)
    client.dealer.send(Say("crash"))
    await eventually(lambda: node.actor(SCHEDULER) is not old and node.supervisor.state == "ready")
    door = node.actor(TOKENIZER)
    assert isinstance(door, Door)
    await eventually(lambda: door.writable(SCHEDULER))
    answer = await client.ask(Say("y"))
    assert answer.text == "y"
    assert answer.epoch > before
    assert door.links.count("-scheduler") >= 1
    assert door.links[-1] == "+scheduler"


async def test_send_to_nobody_is_refused(node: LocalNode) -> None:
    assert not node.actor(SCHEDULER).send("client:nobody", Echo("x", 0))
    assert not node.actor(SCHEDULER).writable("client:nobody")
    assert node.actor(SCHEDULER).writable(TOKENIZER)


async def test_who_finds_a_window_full_is_told_when_there_is_room(node: LocalNode) -> None:
    hub = node.actor(SCHEDULER)
    while hub.writable(TOKENIZER):
        assert hub.send(TOKENIZER, Echo("x", 0, "client:nobody"))
    await eventually(lambda: hub.message_stats().get("messages.on_writable.count"))
    assert hub.writable(TOKENIZER)


async def test_message_stats_count_what_was_handled(node: LocalNode, client: Client) -> None:
    for _ in range(3):
        await client.ask(Say("x"))
    stats = node.actor(SCHEDULER).message_stats()
    assert stats["messages.Say.count"] == 3
    assert stats["messages.Say.handle_seconds"] > 0
    assert stats["messages.Say.wait_seconds"] >= 0


async def test_heartbeat_stats_reach_the_supervisor(node: LocalNode, client: Client) -> None:
    await client.ask(Say("x"))
    await eventually(lambda: "messages.Say.count" in node.supervisor.actors()[SCHEDULER].stats)


async def test_stop_ends_spawned_work() -> None:
    ended = asyncio.Event()

    class Worker(Hub):
        async def start(self) -> None:
            self.spawn(self.work(), "work")

        async def work(self) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

    async with make_node(Worker):
        assert not ended.is_set()
    assert ended.is_set()


async def test_error_in_spawned_work_ends_the_actor() -> None:
    class Worker(Hub):
        async def start(self) -> None:
            self.spawn(self.work(), "work")

        async def work(self) -> None:
            await asyncio.sleep(0.05)
            raise ZeroDivisionError("in spawned work")

    async with make_node(Worker, max_restarts=0) as node:
        assert await node.supervisor.wait() == 1
    assert "ZeroDivisionError: in spawned work" in node.supervisor.cause


async def test_call_from_another_thread_runs_on_the_loop_and_is_followed_by_after_batch() -> None:
    seen: list[object] = []

    class Threaded(Hub):
        async def start(self) -> None:
            threading.Thread(target=self.call_soon_threadsafe, args=(self.note, "called")).start()

        def note(self, what: str) -> None:
            seen.append((what, threading.current_thread() is threading.main_thread()))

        async def after_batch(self) -> None:
            seen.append("batch")

    async with make_node(Threaded):
        await eventually(lambda: ("called", True) in seen)
        await eventually(lambda: seen[-1] == "batch")


async def test_after_batch_follows_a_whole_batch() -> None:
    batches: list[int] = []

    class Batching(Hub):
        async def after_batch(self) -> None:
            batches.append(len(self.seen) - sum(batches))

    async with make_node(Batching, Door) as node:
        client = Client(node.context, node.setup.endpoints.public_in, Echo)
        await client.up()
        for i in range(100):
            client.dealer.send(Say(str(i)))
        await eventually(lambda: len(client.received) == 100)
        client.close()
    assert sum(batches) == 100
    assert max(batches) > 10


async def test_node_state_reaches_every_actor() -> None:
    states: list[NodeState] = []

    class Listening(Hub):
        async def on_NodeState(self, message: NodeState, peer: str) -> None:
            states.append(message)

    async with make_node(Listening, Door):
        await eventually(lambda: any(s.state == "ready" for s in states))
    assert states[-1].state in ("draining", "stopping")
    assert {a.name for a in states[-1].actors} == {SCHEDULER, TOKENIZER}


async def test_drain_is_asked_for_before_the_end(node: LocalNode) -> None:
    hub = node.actor(SCHEDULER)
    assert isinstance(hub, Hub)
    await node.supervisor.shutdown(drain=True, timeout=5)
    assert hub.seen == ["drained"]
    assert await node.supervisor.wait() == 0


@pytest.mark.parametrize(
    ("how", "text"), [("refuse", "does not want to start"), ("break", "ZeroDivisionError: the hub breaks")]
)
async def test_failed_start_tells_why(how: str, text: str) -> None:
    node = make_node(chat_template=how)
    with pytest.raises(StartupError, match=text):
        await node.start()


async def test_messages_wait_until_start_has_returned() -> None:
    gate = asyncio.Event()

    class Slow(Hub):
        async def start(self) -> None:
            await gate.wait()

    node = make_node(Slow, Door)
    starting = asyncio.ensure_future(node.start())
    client = Client(node.context, node.setup.endpoints.public_in, Echo)
    await client.up()
    client.dealer.send(Say("early"))
    await asyncio.sleep(0.1)
    hub = node.actor(SCHEDULER)
    assert isinstance(hub, Slow)
    assert hub.seen == []
    gate.set()
    await starting
    await eventually(lambda: [m.text for m in client.received] == ["early"])
    client.close()
    await node.stop()


async def test_stop_while_starting() -> None:
    class Endless(Hub):
        async def start(self) -> None:
            await asyncio.sleep(3600)

    node = make_node(Endless)
    starting = asyncio.ensure_future(node.start())
    await eventually(lambda: node.supervisor.actors())
    await node.supervisor.shutdown(drain=False)
    with pytest.raises(StartupError):
        await starting


def test_a_missing_handler_is_found_when_the_actor_is_made() -> None:
    class Deaf(Actor):
        name = TOKENIZER
        dials = (Dial(SCHEDULER, "scheduler", Echo),)

    with pytest.raises(TypeError, match="on_Echo"):
        Deaf(local_setup(ServerArgs(), tiny_model()), 1)


def test_public_endpoints_are_for_clients_only() -> None:
    with pytest.raises(TypeError, match="only clients"):
        Bind("public_in", inboxes={"client:": Say, SCHEDULER: Say})
