"""Text in, text out: the real tokenizer, detokenizer and client over real links, around a scheduler that repeats the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fakes.byte_tokenizer import CHATML, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from fakes.dialling import eventually
from fakes.parrot import Parrot
from fakes.recorded_actor import model_spec
from radixcast.actors.client import EngineClient
from radixcast.actors.detokenizer.actor import DetokenizerActor
from radixcast.actors.local import LocalNode, local_setup
from radixcast.actors.setup import SCHEDULER
from radixcast.actors.tokenizer.actor import TokenizerActor
from radixcast.protocols.errors import ContextLengthExceeded, InvalidRequest
from radixcast.protocols.public import Chat, Generate
from radixcast.protocols.sampling import SamplingParams
from radixcast.protocols.server_args import ServerArgs

TEXT = "naïve 你好 👨‍👩‍👧 — done."
OPEN = SamplingParams(max_new_tokens=None)


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[LocalNode]:
    model = model_spec(
        write_byte_tokenizer(tmp_path),
        vocab_size=VOCAB_SIZE,
        context_length=20_000,
        chat_template=CHATML,
        eos_token_ids=(EOS_ID,),
    )
    async with LocalNode(local_setup(ServerArgs(), model), [TokenizerActor, Parrot, DetokenizerActor]) as started:
        yield started


@pytest_asyncio.fixture
async def client(node: LocalNode) -> AsyncIterator[EngineClient]:
    async with EngineClient(node.setup.endpoints.public_in, context=node.context) as connected:
        yield connected


@pytest.mark.parametrize("stream", [True, False])
async def test_text_comes_back(client: EngineClient, node: LocalNode, stream: bool) -> None:
    pieces, last = [], None
    async with client.submit(Generate(rid="r", text=TEXT, sampling=OPEN, stream=stream)) as output:
        async for delta in output:
            pieces.append(delta.text)
            last = delta
    assert "".join(pieces) == TEXT
    assert last is not None
    assert last.finish is not None
    assert (last.finish.reason, last.finish.matched) == ("stop", EOS_ID)
    assert last.usage is not None
    assert last.usage.completion_tokens == len(TEXT.encode()) + 1
    scheduler = node.actor(SCHEDULER)
    assert isinstance(scheduler, Parrot)
    await eventually(lambda: list(scheduler.finished.values()) == [len(TEXT.encode()) + 1])


async def test_many_at_once_each_get_their_own(client: EngineClient) -> None:
    outputs = await asyncio.gather(*(client.generate(f"text number {n}", {"max_new_tokens": 50}) for n in range(20)))
    assert [o.text for o in outputs] == [f"text number {n}" for n in range(20)]


async def test_stop_string_ends_it(client: EngineClient) -> None:
    output = await client.generate(TEXT, {"max_new_tokens": 100, "stop": ["好 "]})
    assert output.text == "naïve 你"


async def test_refusals_arrive_as_exceptions(client: EngineClient) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        await client.generate("", {})
    with pytest.raises(ContextLengthExceeded):
        await client.generate("q" * 5_000_000, {"max_new_tokens": 16})


async def test_abort_ends_a_running_output(client: EngineClient) -> None:
    reasons, tokens = [], 0
    async with client.submit(Generate(rid="long", text="x" * 15_000, sampling=OPEN)) as output:
        async for delta in output:
            tokens += len(delta.token_ids) // 4
            if delta.token_offset == 0:
                await client.abort("long")
            if delta.finish:
                reasons.append(delta.finish.reason)
    assert reasons == ["abort"]
    assert tokens < 15_000


async def test_questions_are_answered(client: EngineClient) -> None:
    (ids,) = await client.tokenize([TEXT])
    assert await client.detokenize([ids]) == [TEXT]
    chat = await client.tokenize_chat(Chat(messages=[{"role": "user", "content": "x"}]))
    assert len(chat) == 1 + len("user\nx") + 1 + 1 + 1 + len("assistant\n")
    assert (await client.stats()).running == 0
