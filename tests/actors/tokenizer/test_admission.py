"""Admission: what is refused and why, and what a Submit says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from fakes.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, byte_tokenizer, ids_of
from fakes.recorded_actor import model_spec
from radixcast.actors.tokenizer.admission import Admission, namespace, prompt_ids
from radixcast.actors.tokenizer.text_encoder import TextEncoder
from radixcast.protocols import limits
from radixcast.protocols.buffers import pack_ids, unpack_ids
from radixcast.protocols.errors import ContextLengthExceeded, InvalidRequest
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.internal import Capacity, Submit
from radixcast.protocols.public import Chat, Generate
from radixcast.protocols.sampling import SamplingParams

MODEL = model_spec(
    Path("tokenizer.json"), vocab_size=VOCAB_SIZE, context_length=128, eos_token_ids=(EOS_ID,), chat_template="x"
)
ENCODER = TextEncoder(byte_tokenizer(), MODEL)


def admit(admission: Admission | None = None, grammar: GrammarSpec | None = None, **fields: Any) -> Submit:
    """The whole way of a request with ids or text; `grammar` has been proved."""
    admission = admission or Admission(MODEL, ENCODER)
    values: dict[str, Any] = {"rid": "r", "sampling": SamplingParams(max_new_tokens=16)}
    if "input_ids" not in fields:
        values["text"] = "hello"
    generate = Generate(**(values | fields))
    admission.check(generate)
    if generate.input_ids is not None:
        prompt = prompt_ids(generate, ENCODER)
    else:
        prompt = ENCODER.encode(generate.text or "", add_special_tokens=generate.add_special_tokens)
    return admission.submit(generate, "client:a", prompt, grammar)


def params(**fields: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**({"max_new_tokens": 16} | fields))}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"text": None}, "text"),
    ({"text": "x", "input_ids": pack_ids([1])}, "input_ids"),
    ({"text": ""}, "text"),
    ({"input_ids": b""}, "input_ids"),
    ({"input_ids": b"abc"}, "input_ids"),
    ({"input_ids": pack_ids([1, VOCAB_SIZE])}, "input_ids"),
    ({"input_ids": pack_ids([-1])}, "input_ids"),
    ({"output_ids": pack_ids([VOCAB_SIZE])}, "output_ids"),
    ({"output_ids": b"x"}, "output_ids"),
    ({"rid": ""}, "rid"),
    ({"rid": "a\nb"}, "rid"),
    ({"rid": "x" * 257}, "rid"),
    ({"group": "\x00"}, "group"),
    ({"cache_salt": "x" * 513}, "cache_salt"),
    ({"priority": 1 << 40}, "priority"),
    ({"attempt": -1}, "attempt"),
    ({"choice": limits.MAX_N}, "choice"),
    ({"depth": -1}, "depth"),
    ({"logprob_start": -2}, "logprob_start"),
    ({"logprob_start": 6}, "logprob_start"),
    ({"top_logprobs": 129}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"logprob_token_ids": (VOCAB_SIZE,)}, "logprob_token_ids"),
    ({"logprob_token_ids": (1,) * 513}, "logprob_token_ids"),
    (params(temperature=-1.0), "sampling_params.temperature"),
    (params(temperature=float("nan")), "sampling_params.temperature"),
    (params(top_p=7.0), "sampling_params.top_p"),
    (params(n=2), "sampling_params.n"),
    (params(logit_bias={VOCAB_SIZE + 7: 5.0}), "sampling_params.logit_bias"),
    (params(stop_token_ids=(-5,)), "sampling_params.stop_token_ids"),
    (params(stop_regex=("(a+)+$x",)), "sampling_params.stop_regex"),
    (params(stop_regex=("[",)), "sampling_params.stop_regex"),
    (params(stop=("",)), "sampling_params.stop"),
    (params(regex="(yes|no)", json_schema="{}"), "sampling_params.regex"),
    (params(max_new_tokens=None, min_new_tokens=500), "sampling_params.min_new_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{i}-{p}" for i, (_, p) in enumerate(BAD)])
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admit(**fields)
    assert caught.value.info.param == param
    assert caught.value.info.status == 400
    assert len(caught.value.info.message) < 400


@pytest.mark.parametrize("name", ["regex", "json_schema", "ebnf", "structural_tag"])
def test_constraints_need_text(name: str) -> None:
    grammar = GrammarSpec(kind="regex", text="a")
    assert admit(grammar=grammar, **params(**{name: "{}"})).grammar == grammar
    with pytest.raises(InvalidRequest, match=f"{name} needs text"):
        admit(Admission(MODEL, TextEncoder(None, MODEL)), input_ids=pack_ids([1]), **params(**{name: "{}"}))


@pytest.mark.parametrize(
    ("length", "new", "ok"), [(127, 1, True), (128, 1, False), (128, 0, False), (129, 1, False), (100, 29, False)]
)
def test_prompt_and_output_must_fit_the_context(length: int, new: int, ok: bool) -> None:
    fields = {"input_ids": pack_ids([7] * length), **params(max_new_tokens=new)}
    if ok:
        assert admit(**fields).sampling.max_new_tokens == new
        return
    with pytest.raises(ContextLengthExceeded) as caught:
        admit(**fields)
    info = caught.value.info
    assert (info.code, info.type, info.status) == ("context_length_exceeded", "invalid_request_error", 400)
    assert "128" in info.message
    assert str(length) in info.message


def test_too_long_a_text_is_refused_before_it_is_tokenised() -> None:
    longest = 128 * limits.MAX_PROMPT_CHARS_PER_TOKEN
    with pytest.raises(ContextLengthExceeded, match=f"{longest + 1} characters"):
        Admission(MODEL, ENCODER).check(Generate(rid="r", text="q" * (longest + 1)))
    Admission(MODEL, ENCODER).check(Generate(rid="r", text="q" * longest))


def test_open_end_goes_to_the_end_of_context_or_pool() -> None:
    admission = Admission(MODEL, ENCODER)
    assert admit(admission, **params(max_new_tokens=None)).sampling.max_new_tokens == 123
    admission.set_capacity(Capacity(total_tokens=50, max_running=4, context_length=128))
    assert admit(admission, **params(max_new_tokens=None)).sampling.max_new_tokens == 45
    too_long = admit(admission, input_ids=pack_ids([1] * 60), **params(max_new_tokens=None))
    assert too_long.sampling.max_new_tokens == 1, "the scheduler refuses what its pool can't hold"
    admission.set_capacity(Capacity(total_tokens=500, max_running=4, context_length=64))
    assert admit(admission, **params(max_new_tokens=None)).sampling.max_new_tokens == 59
    assert admission.context_length == 64


def test_a_default_length_is_clipped_to_what_fits() -> None:
    admission = Admission(MODEL, ENCODER)
    fields = {"input_ids": pack_ids([7] * 100), **params(max_new_tokens=128)}
    with pytest.raises(ContextLengthExceeded):
        admit(admission, **fields)
    submit = admit(admission, clip=True, **fields)
    assert (submit.sampling.max_new_tokens, submit.clip) == (28, True)
    admission.set_capacity(Capacity(total_tokens=110, max_running=4, context_length=128))
    assert admit(admission, clip=True, **fields).sampling.max_new_tokens == 10
    assert admit(admission, clip=True, **params(max_new_tokens=5)).sampling.max_new_tokens == 5
    with pytest.raises(ContextLengthExceeded) as caught:
        admit(admission, clip=True, input_ids=pack_ids([7] * 100), **params(max_new_tokens=128, min_new_tokens=20))
    assert caught.value.info.param == "sampling_params.min_new_tokens"
    with pytest.raises(ContextLengthExceeded):
        admit(admission, clip=True, input_ids=pack_ids([7] * 128), **params(max_new_tokens=128))


def test_seed_is_drawn_unless_given() -> None:
    assert admit(**params(seed=3)).sampling.seed == 3
    drawn = {admit().sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(isinstance(s, int) and 0 <= s < 2**63 for s in drawn)
    assert admit(Admission(MODEL, ENCODER, random_seed=11)).sampling.seed == 11


def test_end_ids_are_resolved() -> None:
    submit = admit(**params(stop_token_ids=(5, EOS_ID)))
    assert (submit.eos_ids, submit.stop_ids) == ((EOS_ID,), (5,))
    ignoring = admit(**params(stop_token_ids=(5,), ignore_eos=True))
    assert (ignoring.eos_ids, ignoring.stop_ids) == ((), ())


def test_everything_else_is_passed_on() -> None:
    fields: dict[str, Any] = {
        "attempt": 2,
        "choice": 3,
        "output_ids": pack_ids([9]),
        "stream": False,
        "logprobs": True,
        "logprob_start": 5,
        "top_logprobs": 4,
        "logprob_token_ids": (1, 2),
        "priority": -7,
        "program": "p",
        "depth": 2,
        "return_prompt_ids": True,
        "return_text_in_logprobs": True,
    }
    submit = admit(**fields)
    assert (submit.client, submit.rid, submit.group) == ("client:a", "r", "r")
    assert unpack_ids(submit.prompt_ids).tolist() == ids_of("hello")
    assert submit.logprob_start == -1, "a start behind the prompt asks for nothing"
    for name in set(fields) - {"logprob_start"}:
        assert getattr(submit, name) == fields[name]
    assert admit(group="g").group == "g"


@given(st.lists(st.tuples(st.text(), st.text(), st.text()), min_size=2, max_size=2, unique=True))
def test_namespaces_never_collide(triples: list[tuple[str, str, str]]) -> None:
    assert namespace(*triples[0]) != namespace(*triples[1])


def test_salt_makes_a_namespace() -> None:
    assert admit(cache_salt="a").namespace != admit().namespace == admit(rid="other").namespace


def test_chat_needs_a_template_and_text_a_tokenizer() -> None:
    chat = Generate(rid="r", chat=Chat(messages=[]))
    without = model_spec(Path("t"), vocab_size=VOCAB_SIZE)
    with pytest.raises(InvalidRequest, match="no chat template"):
        Admission(without, ENCODER).check(chat)
    blind = Admission(MODEL, TextEncoder(None, MODEL))
    for generate in (chat, Generate(rid="r", text="x"), Generate(rid="r", input_ids=b"", **params(stop=("x",)))):
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            blind.check(generate)


def test_bos_comes_from_the_model_when_the_tokenizer_has_none() -> None:
    with_bos = model_spec(Path("t"), vocab_size=VOCAB_SIZE, add_bos=True, bos_token_id=BOS_ID)
    encoder = TextEncoder(byte_tokenizer(), with_bos)
    assert encoder.encode("hi", add_special_tokens=True).tolist() == [BOS_ID, *ids_of("hi")]
    assert encoder.encode("<|bos|>hi", add_special_tokens=True).tolist() == [BOS_ID, *ids_of("hi")], "never twice"
    assert encoder.encode("hi", add_special_tokens=False).tolist() == ids_of("hi")
    assert encoder.encode("", add_special_tokens=True).tolist() == [BOS_ID]


def test_bos_of_the_post_processor_is_honoured() -> None:
    tokenizer = byte_tokenizer().__class__.from_str(byte_tokenizer().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)])
    encoder = TextEncoder(tokenizer, MODEL)
    assert encoder.encode("hi", add_special_tokens=True).tolist() == [BOS_ID, *ids_of("hi")]
    assert encoder.encode("hi", add_special_tokens=False).tolist() == ids_of("hi")


def test_encoding_is_int32() -> None:
    assert ENCODER.encode("hi", add_special_tokens=True).dtype == np.int32


def test_a_length_that_nobody_asked_for_is_cut_to_what_fits() -> None:
    prompt = pack_ids(np.ones(MODEL.context_length - 3, np.int32))
    with pytest.raises(ContextLengthExceeded):
        admit(input_ids=prompt, **params(max_new_tokens=4))
    assert admit(input_ids=prompt, clip=True, **params(max_new_tokens=4)).sampling.max_new_tokens == 3
    assert admit(input_ids=prompt, clip=True, **params(max_new_tokens=2)).sampling.max_new_tokens == 2
