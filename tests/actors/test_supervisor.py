"""The supervisor with real child processes and real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import zmq

from fakes.dialling import Client, eventually
from fakes.echo import Echo, Say, tiny_model
from radixcast.actors.placement import ActorSpec
from radixcast.actors.process import Processes, describe
from radixcast.actors.run_folder import RunFolder, process_setup
from radixcast.actors.setup import SCHEDULER, TOKENIZER, NodeSetup
from radixcast.actors.supervisor import Supervisor
from radixcast.protocols.errors import StartupError
from radixcast.protocols.server_args import ServerArgs

TESTS = Path(__file__).parents[1]
SPECS = (ActorSpec(SCHEDULER, module="fakes.echo_hub"), ActorSpec(TOKENIZER, module="fakes.echo_door"))


def supervise(
    tmp: Path, *, specs: tuple[ActorSpec, ...] = SPECS, listener: socket.socket | None = None, **args: Any
) -> Supervisor:
    folder = RunFolder(tmp)
    setup = process_setup(msgspec.convert({"log_level": "warning"} | args, ServerArgs), tiny_model(), folder)
    setup.write()
    fd = None if listener is None else listener.fileno()
    placement = Processes(setup.run_dir, fd, env={"PYTHONPATH": str(TESTS)})
    return Supervisor(setup, specs, placement=placement, folder=folder)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as folder:
        yield Path(folder)


class Node:
    """A running supervisor and a client of its door."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.context: zmq.Context[Any] = zmq.Context()
        setup = supervisor.setup
        self.client = Client(self.context, setup.endpoints.public_in, Echo, peer=TOKENIZER, key=setup.curve_server_public)

    async def close(self) -> None:
        self.client.close()
        self.context.destroy(linger=0)
        await self.supervisor.shutdown(drain=False)

    def pid(self, name: str) -> int:
        return self.supervisor.actors()[name].pid

    async def replaced(self, name: str, pid: int) -> None:
        """Wait until `name` runs under another process id and the door reaches the hub again."""
        await eventually(lambda: self.supervisor.state == "ready" and self.pid(name) != pid)
        async with asyncio.timeout(20):
            while (await self.client.ask(Say("ready?"))).text != "ready?":  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def node(short_tmp: Path) -> AsyncIterator[Node]:
    supervisor = supervise(short_tmp, watchdog_timeout=2.0)
    await supervisor.start()
    made = Node(supervisor)
    yield made
    await made.close()


def exists(path: str) -> bool:
    return Path(path).exists()


def mode(path: str) -> int:
    return Path(path).stat().st_mode & 0o777


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


async def test_a_node_lives_serves_and_ends_without_a_trace(node: Node, short_tmp: Path) -> None:
    assert (await node.client.ask(Say("hello"))).text == "hello"
    pids = [a.pid for a in node.supervisor.actors().values()]
    assert all(map(alive, pids))
    run_dir = node.supervisor.setup.run_dir
    assert mode(run_dir) == 0o700
    assert mode(f"{run_dir}/setup.json") == 0o600
    await node.supervisor.shutdown(drain=True, timeout=5)
    assert await node.supervisor.wait() == 0
    assert not any(map(alive, pids))
    assert not exists(run_dir)


async def test_each_actor_that_is_killed_is_replaced_under_a_greater_epoch(node: Node) -> None:
    before = await node.client.ask(Say("x"))
    for name in (SCHEDULER, TOKENIZER):
        pid = node.pid(name)
        os.kill(pid, signal.SIGKILL)
        await node.replaced(name, pid)
    after = await node.client.ask(Say("y"))
    assert after.text == "y"
    assert after.epoch > before.epoch
    assert "-tokenizer" in node.client.events


async def test_an_actor_that_exits_or_raises_is_replaced(node: Node) -> None:
    for harm in ("die", "crash"):
        pid = node.pid(SCHEDULER)
        await node.client.up()
        node.client.dealer.send(Say(harm))
        await node.replaced(SCHEDULER, pid)


async def test_a_busy_actor_without_progress_is_killed_and_replaced(node: Node) -> None:
    pid = node.pid(SCHEDULER)
    await node.client.ask(Say("x"))
    node.client.dealer.send(Say("hang"))
    await node.replaced(SCHEDULER, pid)


async def test_an_actor_whose_loop_stands_still_is_killed_and_replaced(node: Node) -> None:
    pid = node.pid(SCHEDULER)
    await node.client.ask(Say("x"))
    node.client.dealer.send(Say("freeze"))
    await node.replaced(SCHEDULER, pid)


async def test_a_group_is_replaced_together(short_tmp: Path) -> None:
    specs = tuple(ActorSpec(s.name, s.module, "both") for s in SPECS)
    supervisor = supervise(short_tmp, specs=specs)
    await supervisor.start()
    node = Node(supervisor)
    pids = {name: node.pid(name) for name in (SCHEDULER, TOKENIZER)}
    os.kill(pids[SCHEDULER], signal.SIGKILL)
    await node.replaced(TOKENIZER, pids[TOKENIZER])
    assert node.pid(SCHEDULER) != pids[SCHEDULER]
    await node.close()


async def test_the_node_gives_up_beyond_its_budget(short_tmp: Path) -> None:
    supervisor = supervise(short_tmp, max_restarts=1)
    await supervisor.start()
    node = Node(supervisor)
    pid = node.pid(SCHEDULER)
    os.kill(pid, signal.SIGKILL)
    await node.replaced(SCHEDULER, pid)
    os.kill(node.pid(SCHEDULER), signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await supervisor.wait() == 1
    assert "scheduler died 2 times" in supervisor.cause
    assert "SIGKILL" in supervisor.cause
    assert not exists(supervisor.setup.run_dir)
    await node.close()


@pytest.mark.parametrize(
    ("how", "text"),
    [("refuse", "does not want to start"), ("break", "the hub breaks at start"), ("exit", "status 7 before it was ready")],
)
async def test_a_failed_start_stops_everything_and_says_why(short_tmp: Path, how: str, text: str) -> None:
    supervisor = supervise(short_tmp, chat_template=how)
    with pytest.raises(StartupError, match=text):
        await supervisor.start()
    assert not any(alive(a.pid) for a in supervisor.actors().values())
    assert not exists(supervisor.setup.run_dir)


async def test_a_second_shutdown_cuts_the_first_short(node: Node) -> None:
    pid = node.pid(SCHEDULER)
    await node.client.ask(Say("x"))
    node.client.dealer.send(Say("freeze"))
    await asyncio.sleep(0.1)
    first = asyncio.ensure_future(node.supervisor.shutdown(drain=True, timeout=60))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        await node.supervisor.shutdown(drain=False)
        await first
    assert not alive(pid)


async def test_connections_queue_at_the_listening_socket_while_its_actor_is_replaced(short_tmp: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        specs = (ActorSpec(SCHEDULER, "fakes.echo_hub", listens=True),)
        supervisor = supervise(short_tmp, specs=specs, listener=listener)
        await supervisor.start()

        async def fetch() -> bytes:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            answer = await reader.read()
            writer.close()
            return answer

        async with asyncio.timeout(20):
            first = await fetch()
            pid = supervisor.actors()[SCHEDULER].pid
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: not alive(pid))
            second = await fetch()
        assert first == b"%d" % pid
        assert second == b"%d" % supervisor.actors()[SCHEDULER].pid
        assert first != second
        await supervisor.shutdown(drain=False)


async def test_tcp_endpoints_have_keys(short_tmp: Path) -> None:
    supervisor = supervise(short_tmp, zmq_endpoint="tcp://127.0.0.1:0")
    await supervisor.start()
    node = Node(supervisor)
    assert supervisor.setup.endpoints.public_in.startswith("tcp://127.0.0.1:")
    assert (await node.client.ask(Say("secret"))).text == "secret"
    await node.close()


def test_no_process_outlives_a_killed_parent(short_tmp: Path) -> None:
    code = f"""
        import asyncio, sys
        sys.path.insert(0, {str(TESTS)!r})
        from pathlib import Path
        from radixcast.actors.placement import ActorSpec
        from radixcast.actors.process import Processes
        from radixcast.actors.run_folder import RunFolder, process_setup
        from radixcast.actors.supervisor import Supervisor
        from radixcast.protocols.server_args import ServerArgs
        from fakes.echo import tiny_model

        async def main():
            folder = RunFolder({str(short_tmp)!r})
            setup = process_setup(ServerArgs(), tiny_model(), folder)
            setup.write()
            placement = Processes(setup.run_dir, env={{"PYTHONPATH": {str(TESTS)!r}}})
            specs = [ActorSpec("scheduler", "fakes.echo_hub"), ActorSpec("tokenizer", "fakes.echo_door")]
            supervisor = Supervisor(setup, specs, placement=placement, folder=folder)
            await supervisor.start()
            print(*(a.pid for a in supervisor.actors().values()), flush=True)
            await supervisor.wait()

        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(alive, pids))
    parent.kill()
    parent.wait()
    psutil.wait_procs([psutil.Process(p) for p in pids if alive(p)], timeout=20)
    assert not any(map(alive, pids))
    # The next node removes the folder that was left behind.
    (left,) = short_tmp.glob("radixcast-*")
    folder = RunFolder(short_tmp)
    assert not left.exists()
    assert folder.path.exists()
    folder.remove()


def test_run_folders_of_living_nodes_stay(short_tmp: Path) -> None:
    first, second = RunFolder(short_tmp), RunFolder(short_tmp)
    assert first.path.exists()
    assert second.path.exists()
    first.remove()
    first.remove()
    second.remove()
    assert not list(short_tmp.iterdir())


def test_a_run_folder_that_is_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(StartupError, match="too long"):
        RunFolder(deep)
    assert not list(deep.iterdir())


def test_endpoints_follow_the_flag(short_tmp: Path) -> None:
    folder = RunFolder(short_tmp)

    def setup(endpoint: str | None) -> NodeSetup:
        return process_setup(ServerArgs(zmq_endpoint=endpoint), tiny_model(), folder)

    assert setup(None).endpoints.public_in == f"ipc://{folder.path}/public_in"
    assert setup("ipc:///tmp/x").endpoints.public_out == "ipc:///tmp/x.out"
    assert not setup("ipc:///tmp/x").curve_server_secret
    assert setup("tcp://127.0.0.1:7000").endpoints.public_out == "tcp://127.0.0.1:7001"
    assert len(setup("tcp://127.0.0.1:7000").curve_server_public) == 40
    for bad in ("tcp://127.0.0.1", "tcp://:x", "tcp://h:70000", "ipc://" + "/x" * 60):
        with pytest.raises(StartupError, match="zmq-endpoint"):
            setup(bad)
    folder.remove()


def test_exit_statuses_in_words() -> None:
    assert describe(3) == "exited with status 3"
    assert describe(-11) == "was ended by SIGSEGV"
    assert "memory" in describe(-9)
