"""Constraints on their way through the tokenizer: read, proved beside everything else, and sent on or refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes.byte_tokenizer import EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from fakes.recorded_actor import Recorded, model_spec, node_setup
from radixcast.actors.tokenizer.actor import TokenizerActor
from radixcast.actors.tokenizer.constraints import grammar_of, named
from radixcast.protocols.buffers import pack_ids
from radixcast.protocols.errors import ErrorInfo
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.internal import Submit
from radixcast.protocols.public import Abort, Generate, Refused
from radixcast.protocols.sampling import SamplingParams
from radixcast.protocols.server_args import ServerArgs

CLIENT = "client:a"


def spec_of(args: dict[str, Any] | None = None, **sampling: Any) -> GrammarSpec | None:
    return grammar_of(SamplingParams(**sampling), ServerArgs(**(args or {})), 1000)


# ------------------------------------------------------------------ reading


def test_each_field_is_its_kind() -> None:
    assert spec_of() is None
    assert spec_of(regex="a+", max_new_tokens=8) == GrammarSpec(kind="regex", text="a+", max_tokens=8)
    assert spec_of(ebnf="root ::= x") == GrammarSpec(kind="ebnf", text="root ::= x")
    assert spec_of(choices=("b", "ä")) == GrammarSpec(kind="choices", text='["b","ä"]')
    assert spec_of(json_schema="{}") == GrammarSpec(kind="json_schema", text="{}")
    assert spec_of(structural_tag="{}") == GrammarSpec(kind="structural_tag", text="{}")


@pytest.mark.parametrize(
    ("flags", "wish", "whitespace"),
    [
        ({}, None, "flexible"),
        ({}, "compact", "compact"),
        ({"constrained_json_disable_any_whitespace": True}, None, "compact"),
        ({"constrained_json_disable_any_whitespace": True}, "flexible", "flexible"),
        ({"constrained_json_whitespace_pattern": "[ ]?"}, None, "[ ]?"),
        ({"constrained_json_whitespace_pattern": "[ ]?"}, "compact", "compact"),
    ],
)
def test_whitespace_is_the_requests_wish_or_the_servers_rule(flags: dict[str, Any], wish: Any, whitespace: str) -> None:
    for name in ("json_schema", "structural_tag"):
        spec = spec_of(flags, json_whitespace=wish, **{name: "{}"})
        assert spec is not None
        assert spec.whitespace == whitespace
    assert spec_of(flags, json_whitespace=wish, regex="a") == spec_of(regex="a")


def test_expressions_are_told_about_how_long_the_output_may_be() -> None:
    """Roughly, so that like requests share a grammar."""
    for new, told in ((200, 192), (223, 192), (224, 224), (None, 896)):
        spec = spec_of(regex="a", max_new_tokens=new)
        assert spec is not None
        assert spec.max_tokens == told
    assert spec_of(ebnf="x", max_new_tokens=200) == spec_of(ebnf="x", max_new_tokens=300)


def test_flags_go_along() -> None:
    spec = spec_of({"grammar_lenient": True, "grammar_backend": "llguidance"}, json_schema="{}")
    assert spec == GrammarSpec(kind="json_schema", text="{}", lenient=True, backend="llguidance")


@pytest.mark.parametrize(
    ("param", "status", "told"),
    [
        (None, 400, "sampling_params.json_schema"),
        ("json_schema", 400, "sampling_params.json_schema"),
        ("/properties/a", 400, "/properties/a"),
        ("", 400, ""),
        (None, 503, None),
    ],
)
def test_errors_name_the_place(param: str | None, status: int, told: str | None) -> None:
    assert named(ErrorInfo("no", status=status, param=param), SamplingParams(json_schema="{}")).param == told


# ------------------------------------------------------------------ proving


class Quiet(Recorded, TokenizerActor):
    """The actor under test, with its real process for grammars."""

    async def settle(self) -> None:
        await asyncio.gather(*self.work)


@pytest.fixture
async def actor(tmp_path: Path) -> AsyncIterator[Quiet]:
    model = model_spec(write_byte_tokenizer(tmp_path), vocab_size=VOCAB_SIZE, context_length=1000, eos_token_ids=(EOS_ID,))
    quiet = Quiet(node_setup(model, tmp_path, random_seed=5), 1)
    quiet.record()
    await quiet.start()
    yield quiet
    await quiet.settle()
    await quiet.stop()


def request(rid: str, **sampling: Any) -> Generate:
    return Generate(rid=rid, text="hi", sampling=SamplingParams(max_new_tokens=8, **sampling))


async def test_good_grammars_go_on_bad_ones_are_refused_by_name(actor: Quiet) -> None:
    bad = {
        "regex": ({"regex": "(a"}, "sampling_params.regex", "invalid_regex"),
        "schema": ({"json_schema": '{"properties":{"a":{"type":5}}}'}, "/properties/a/type", "invalid_schema"),
        "ebnf": ({"ebnf": "root ::= x"}, "sampling_params.ebnf", "invalid_grammar"),
    }
    good: dict[str, dict[str, Any]] = {
        "regex+": {"regex": "a|b"},
        "schema+": {"json_schema": '{"type":"object"}'},
        "ebnf+": {"ebnf": 'root ::= "a"'},
        "choices+": {"choices": ("yes", "no")},
    }
    for rid, (sampling, _, _) in bad.items():
        await actor.say(request(rid, **sampling), CLIENT)
    for rid, sampling in good.items():
        await actor.say(request(rid, **sampling), CLIENT)
    await actor.settle()
    submits = {m.rid: m for _, m in actor.sent if isinstance(m, Submit)}
    assert set(submits) == set(good)
    for rid, sampling in good.items():
        assert submits[rid].grammar == spec_of(None, max_new_tokens=8, **sampling)
    refused = {m.rid: m.error for m in actor.take(Refused)}
    for rid, (_, param, code) in bad.items():
        assert (refused[rid].status, refused[rid].param, refused[rid].code) == (400, param, code)
    assert actor.stats()["grammars_proven"] == len(good)
    assert not actor.busy


async def test_others_overtake_a_request_whose_grammar_is_being_proved(actor: Quiet) -> None:
    await actor.say(request("g", regex="a|b"), CLIENT)
    await actor.say(request("plain"), CLIENT)
    assert [m.rid for m in actor.take(Submit)] == ["plain"]
    assert actor.busy
    await actor.settle()
    assert [m.rid for m in actor.take(Submit)] == ["g"]


async def test_abort_while_proving(actor: Quiet) -> None:
    await actor.say(request("g", regex="a|b"), CLIENT)
    await actor.say(Abort(rid="g"), CLIENT)
    assert [m.error.status for m in actor.take(Refused)] == [499]
    await actor.settle()
    assert actor.take() == []


async def test_own_ids_and_a_bad_prompt(actor: Quiet) -> None:
    ids = Generate(rid="ids", input_ids=pack_ids([5, 6]), sampling=SamplingParams(max_new_tokens=2, regex="a"))
    await actor.say(ids, CLIENT)
    await actor.say(Generate(rid="bad", input_ids=pack_ids([VOCAB_SIZE]), sampling=SamplingParams(regex="a")), CLIENT)
    await actor.settle()
    sent = actor.take()
    assert [m.prompt_ids for m in sent if isinstance(m, Submit)] == [pack_ids([5, 6])]
    assert [(m.rid, m.error.param) for m in sent if isinstance(m, Refused)] == [("bad", "input_ids")]


async def test_two_constraints_never_come_that_far(actor: Quiet) -> None:
    await actor.say(request("r", regex="a", ebnf='root ::= "a"'), CLIENT)
    assert [m.error.param for m in actor.take(Refused)] == ["sampling_params.ebnf"]
