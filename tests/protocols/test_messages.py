"""Messages: they travel whole, the README's bytes are what we send, and internal arrays only ever grow at their end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import radixcast.protocols.wire as wire_module
from radixcast.protocols import internal, public
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ErrorInfo, ProtocolError
from radixcast.protocols.public import Abort, EndAck, Finish, Generate, TextDelta, Usage, Welcome
from radixcast.protocols.sampling import SamplingParams
from radixcast.protocols.wire import PROTOCOL_VERSION, Codec, Header, Kind, decode_header, encode_header

README = Path(wire_module.__file__).parent / "README.md"

# ------------------------------------------------------------------ the exchange that the README shows

C, T, D = 1000, 2000, 3000
"""Epochs of the client, the tokenizer and the detokenizer."""

GENERATE = Generate(rid="r1", group="r1", text="Hi", sampling=SamplingParams(max_new_tokens=2, temperature=0.0, seed=7))
EXCHANGE: list[tuple[str, Header, msgspec.Struct | None]] = [
    ("client → tokenizer", Header(PROTOCOL_VERSION, Kind.HELLO, C, 0, 0, 0), None),
    ("tokenizer → client", Header(PROTOCOL_VERSION, Kind.HELLO, T, C, 0, 0), None),
    (
        "tokenizer → client",
        Header(PROTOCOL_VERSION, Kind.DATA, T, C, 1, 0),
        Welcome(output_endpoint="ipc:///run/out", model="smollm2", context_length=8192, vocab_size=49152),
    ),
    ("client → detokenizer", Header(PROTOCOL_VERSION, Kind.HELLO, C, 0, 0, 0), None),
    ("detokenizer → client", Header(PROTOCOL_VERSION, Kind.HELLO, D, C, 0, 0), None),
    ("client → tokenizer", Header(PROTOCOL_VERSION, Kind.DATA, C, T, 1, 1), GENERATE),
    (
        "detokenizer → client",
        Header(PROTOCOL_VERSION, Kind.DATA, D, C, 1, 0),
        TextDelta(rid="r1", token_ids=pack_ids([28, 339]), text=", I"),
    ),
    (
        "detokenizer → client",
        Header(PROTOCOL_VERSION, Kind.DATA, D, C, 2, 0),
        TextDelta(
            rid="r1",
            token_offset=2,
            text_offset=3,
            usage=Usage(prompt_tokens=1, completion_tokens=2),
            finish=Finish(reason="length"),
        ),
    ),
    ("client → detokenizer", Header(PROTOCOL_VERSION, Kind.DATA, C, D, 1, 2), EndAck(rid="r1")),
]


def dump() -> str:
    """The exchange as the README shows it: who, frame number, bytes in hex."""
    lines = []
    for who, header, message in EXCHANGE:
        lines.append(f"{who}  {header.kind.name}")
        lines += hex_lines(0, encode_header(header))
        lines += hex_lines(1, b"" if message is None else msgspec.msgpack.encode(message))
    return "\n".join(lines) + "\n"


def hex_lines(frame: int, data: bytes) -> list[str]:
    """32 bytes a line, the first with the frame's number."""
    rows = [data[i : i + 32].hex(" ") for i in range(0, max(len(data), 1), 32)]
    return [f"  {frame if i == 0 else ' '}  {row}".rstrip() for i, row in enumerate(rows)]


def shown_frames() -> list[bytes]:
    """The frames in the README's dump, read by its own rules."""
    block = re.search(r"```text dump\n(.*?)```", README.read_text(), re.S)
    assert block is not None, "no dump in the README"
    frames: list[bytes] = []
    for line in block[1].splitlines():
        if (start := re.match(r"  (\d)(?:  ([0-9a-f ]+))?$", line)) is not None:
            frames.append(bytes.fromhex(start[2] or ""))
        elif (more := re.match(r"     ([0-9a-f ]+)$", line)) is not None:
            frames[-1] += bytes.fromhex(more[1])
    return frames


def test_readme_shows_what_is_sent() -> None:
    block = re.search(r"```text dump\n(.*?)```", README.read_text(), re.S)
    assert block is not None
    assert block[1] == dump(), f"put this into {README}:\n{dump()}"


def test_readme_bytes_decode_to_the_messages() -> None:
    frames = shown_frames()
    assert len(frames) == 2 * len(EXCHANGE)
    inbox = Generate | Welcome | TextDelta | EndAck
    codec: Codec[Any] = Codec(inbox)
    for i, (_, header, message) in enumerate(EXCHANGE):
        assert decode_header(frames[2 * i]) == header
        assert (codec.decode(frames[2 * i + 1]) if frames[2 * i + 1] else None) == message


def test_readme_names_every_public_message_and_field() -> None:
    text = README.read_text()
    messages = [
        *get_args(public.ClientToTokenizer),
        *get_args(public.TokenizerToClient),
        EndAck,
        TextDelta,
        *(public.Chat, public.Finish, public.Usage, public.Logprobs, ErrorInfo),
    ]
    missing = [
        f"{m.__name__}.{field}"
        for m in messages
        for field in (m.__struct_fields__)
        if f"`{field}`" not in text or m.__name__ not in text
    ]
    assert missing == []


# ------------------------------------------------------------------ shapes

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(pack_ids)


@given(ids, st.text(max_size=10), st.integers(0, 2**40))
def test_deltas_travel_whole(token_ids: bytes, text: str, offset: int) -> None:
    delta = TextDelta(
        rid="r", token_ids=token_ids, text=text, token_offset=offset, usage=Usage(prompt_tokens=1, completion_tokens=2)
    )
    codec: Codec[TextDelta] = Codec(public.DetokenizerToClient)
    back = codec.decode(codec.encode(delta))
    assert back == delta
    assert unpack_ids(back.token_ids).tobytes() == token_ids


def test_public_messages_are_maps_without_defaults() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Generate(rid="r", text="x"))) == {
        "type": "Generate",
        "rid": "r",
        "text": "x",
    }


def test_unknown_public_fields_are_ignored_and_wrong_types_refused() -> None:
    codec: Codec[Any] = Codec(public.ClientToTokenizer)
    later = {"type": "Generate", "rid": "r", "text": "x", "of_a_later_version": 1}
    assert codec.decode(msgspec.msgpack.encode(later)) == Generate(rid="r", text="x")
    for wrong in ({"type": "Generate"}, {"type": "Generate", "rid": 5}, {"type": "Nothing", "rid": "r"}, {"rid": "r"}, [1]):
        with pytest.raises(ProtocolError):
            codec.decode(msgspec.msgpack.encode(wrong))
    with pytest.raises(ProtocolError, match="unknown field"):
        codec.decode(msgspec.msgpack.encode({"type": "Generate", "rid": "r", "sampling": {"temprature": 1}}))


def test_internal_messages_are_arrays_that_older_readers_understand() -> None:
    sent = msgspec.msgpack.decode(
        msgspec.msgpack.encode(internal.SubmitRefused(client="c", rid="r", attempt=1, error=ErrorInfo("x")))
    )
    assert sent[:4] == ["SubmitRefused", "c", "r", 1]
    codec: Codec[Any] = Codec(internal.TokenizerToScheduler)
    longer = msgspec.msgpack.encode(["AbortOf", "r", False, "why", "c", True, "a later field"])
    assert codec.decode(longer) == internal.AbortOf(rid="r", reason="why", client="c", exact=True)
    shorter = msgspec.msgpack.encode(["AbortOf", "r"])
    assert codec.decode(shorter) == internal.AbortOf(rid="r")


UNIONS = {
    "ClientToTokenizer": public.ClientToTokenizer,
    "TokenizerToClient": public.TokenizerToClient,
    "TokenizerToScheduler": internal.TokenizerToScheduler,
    "SchedulerToTokenizer": internal.SchedulerToTokenizer,
    "RunnerToScheduler": internal.RunnerToScheduler,
    "SchedulerToDetokenizer": internal.SchedulerToDetokenizer,
    "SupervisorToActor": internal.SupervisorToActor,
    "ActorToSupervisor": internal.ActorToSupervisor,
}


@pytest.mark.parametrize("name", UNIONS)
def test_every_union_can_be_decoded_and_is_tagged_by_class_name(name: str) -> None:
    Codec(UNIONS[name])
    assert all(m.__struct_config__.tag == m.__name__ for m in get_args(UNIONS[name]))


@pytest.mark.parametrize(
    ("abort", "named"),
    [
        (Abort(rid="g"), {"g", "g_1"}),
        (Abort(rid="g", exact=True), {"g"}),
        (Abort(rid="g_1"), {"g_1"}),
        (Abort(all=True), {"g", "g_1", "x"}),
        (Abort(), set()),
    ],
)
def test_what_an_abort_names(abort: Abort, named: set[str]) -> None:
    requests = [("g", "g"), ("g_1", "g"), ("x", "")]
    assert {rid for rid, group in requests if abort.names(rid, group)} == named
    passed_on = internal.AbortOf(rid=abort.rid, all=abort.all, exact=abort.exact, client="client:a")
    assert {rid for rid, group in requests if passed_on.names("client:a", rid, group)} == named
    assert not any(passed_on.names("client:b", rid, group) for rid, group in requests)
