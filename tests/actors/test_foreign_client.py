"""The example client, which knows nothing of Radixcast, against a node: what protocols/README.md promises is enough."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from fakes.fake_node import FakeNode, expected_text
from radixcast.protocols.public import EndAck, Generate

EXAMPLE = Path(__file__).parents[2] / "scripts" / "zmq_client_example.py"


async def run(endpoint: str, prompt: str, tokens: int) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the example."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE),
        endpoint,
        prompt,
        str(tokens),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_example_client() -> None:
    assert "radixcast" not in {
        line.split()[1].split(".")[0] for line in EXAMPLE.read_text().splitlines() if "import " in line[:7]
    }
    with tempfile.TemporaryDirectory(prefix="rc-") as folder:
        async with FakeNode(folder, step_seconds=0.001) as node:
            status, out, err = await run(node.endpoint, "Once", 25)
            assert (status, err) == (0, "")
            (request,) = [m for m in node.received if isinstance(m, Generate)]
            assert out == expected_text(request, 25) + "\n[length, 25 tokens]\n"
            assert node.end_acks == [EndAck(rid="r1")]
            node.refuse.add("r1")
            status, _, err = await run(node.endpoint, "Once", 25)
            assert (status, err) == (1, "refused: too long\n")
