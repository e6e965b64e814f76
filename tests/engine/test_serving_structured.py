"""The real model through the real server under constraints: whatever ends with `stop` matches, and nobody else is held up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

import radixcast
from fakes.server import Server
from fakes.structured import FIXED, PROFILE, STATUS, USER, generate, stopped
from radixcast.protocols.model import ModelSpec

REGEXES = [
    r"^user@example\.com$",
    r"^(Hello|Hi|Hey)$",
    r"^\d{3}$",
    r"^\(\d{3}\) \d{3}-\d{4}$",
    r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$",
    r"^#[0-9A-F]{6}$",
    r'^\{"name": "[a-zA-Z]{1,12}", "age": [1-9][0-9]?\}$',
    r"^\[\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}\] (INFO|WARN|ERROR): [a-z ]{5,20}$",
]
GRAMMARS = [
    ('root ::= [a-z]{1,8} "@" [a-z]{1,8} ".com"', r"[a-z]{1,8}@[a-z]{1,8}\.com"),
    ('root ::= "Hello" | "Hi" | "Hey"', r"Hello|Hi|Hey"),
    ("root ::= digit digit digit\ndigit ::= [0-9]", r"[0-9]{3}"),
    ('root ::= "(" d d d ") " d d d "-" d d d d\nd ::= [0-9]', r"\(\d{3}\) \d{3}-\d{4}"),
    (
        'root ::= year "-" month "-" day\nyear ::= [0-9]{4}\nmonth ::= "0" [1-9] | "1" [0-2]\nday ::= [0-2] [0-9]',
        r"\d{4}-\d\d-\d\d",
    ),
    ('root ::= "#" hex hex hex hex hex hex\nhex ::= [0-9A-F]', r"#[0-9A-F]{6}"),
    (
        'root ::= "{" ws "\\"name\\":" ws string "," ws "\\"age\\":" ws number "}"\n'
        'string ::= "\\"" [a-zA-Z]{1,12} "\\""\nnumber ::= [1-9] [0-9]?\nws ::= " "?',
        r'\{ ?"name": ?"[a-zA-Z]{1,12}", ?"age": ?[1-9][0-9]?\}',
    ),
    (
        'root ::= "[" level "] " word (" " word){0,4}\nlevel ::= "INFO" | "WARN" | "ERROR"\nword ::= [a-z]{1,8}',
        r"\[(INFO|WARN|ERROR)\] [a-z ]+",
    ),
    ('root ::= "run(" (arg ("," arg)?)? ")"\narg ::= ("x" | "y") "=" [0-9]', r"run\(([xy]=\d(,[xy]=\d)?)?\)"),
]


SETTINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}]


@pytest.fixture(scope="module")
def server(smollm2_spec: ModelSpec) -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


# ------------------------------------------------------------------ the calls as users print them


def test_schema_in_a_chat_of_the_openai_client(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(
        model="smollm2",
        messages=[
            {"role": "system", "content": "Extract user information from the text."},
            {"role": "user", "content": "张三今年28岁，擅长Python、Go和Rust编程。"},
        ],
        extra_body={"json_schema": USER},
    )
    jsonschema.validate(json.loads(response.choices[0].message.content or ""), USER)
    assert response.choices[0].finish_reason == "stop"


def test_regex_in_a_chat_of_the_openai_client(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Generate a phone number."}],
        extra_body={"regex": r"\d{3}-\d{3}-\d{4}"},
    )
    assert re.fullmatch(r"\d{3}-\d{3}-\d{4}", response.choices[0].message.content or "", re.ASCII)


def test_the_profile_regex_is_valid_json_ten_times(server: Server) -> None:
    pattern, prompt = PROFILE
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda seed: generate(server, prompt, regex=pattern, seed=seed), range(10)))
    for answer in answers:
        assert stopped(answer), answer
        profile = json.loads(answer["text"])
        assert list(profile) == ["name", "age", "city", "job"]
        assert isinstance(profile["age"], int)
        assert re.fullmatch(pattern, answer["text"])


def test_the_status_language(server: Server) -> None:
    for seed in range(4):
        answer = generate(server, json_schema=STATUS, seed=seed)
        assert stopped(answer)
        assert answer["text"].lstrip().startswith("{")
        jsonschema.validate(json.loads(answer["text"]), STATUS)


@pytest.mark.parametrize("pattern", REGEXES)
def test_regexes(server: Server, pattern: str) -> None:
    for sampling in SETTINGS:
        answer = generate(server, regex=pattern, **sampling)
        assert stopped(answer)
        assert re.fullmatch(pattern, answer["text"], re.ASCII), answer["text"]


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS)
def test_grammars(server: Server, grammar: str, pattern: str) -> None:
    for sampling in SETTINGS:
        answer = generate(server, ebnf=grammar, **sampling)
        assert stopped(answer)
        assert re.fullmatch(pattern, answer["text"], re.ASCII), answer["text"]


def test_response_formats(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Describe yourself in JSON."}]
    wrapped: Any = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": STATUS}}
    answer = client.chat.completions.create(model="smollm2", messages=messages, response_format=wrapped, max_tokens=100)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), STATUS)
    anything: Any = {"type": "json_object"}
    answer = client.chat.completions.create(model="smollm2", messages=messages, response_format=anything, max_tokens=200)
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)
    plain = client.completions.create(model="smollm2", prompt="Answer: ", max_tokens=100, extra_body={"json_schema": STATUS})
    jsonschema.validate(json.loads(plain.choices[0].text), STATUS)


def test_both_forms_of_a_structural_tag(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Call f."}]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    older: Any = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    answer = client.chat.completions.create(model="smollm2", messages=messages, response_format=older, max_tokens=40)
    for call in re.findall(r"<f>(.*?)</f>", answer.choices[0].message.content or ""):
        jsonschema.validate(json.loads(call), schema)
    content = {"type": "json_schema", "json_schema": schema}
    newer: Any = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    answer = client.chat.completions.create(model="smollm2", messages=messages, response_format=newer, max_tokens=60)
    call = re.fullmatch(r"<f>(.*)</f>", answer.choices[0].message.content or "", re.DOTALL)
    assert call
    jsonschema.validate(json.loads(call[1]), schema)


# ------------------------------------------------------------------ with everything else


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}])
@pytest.mark.parametrize("constraint", [{"json_schema": STATUS}, {"regex": PROFILE[0]}, {"choices": ["left", "right 🧭"]}])
def test_streamed_equals_plain(server: Server, sampling: dict[str, Any], constraint: dict[str, Any]) -> None:
    body = {"text": "Answer: ", "sampling_params": {"max_new_tokens": 120, **sampling, **constraint}}
    whole = server.post("/generate", body)
    last = list(server.stream("/generate", body))[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    openai_body = {"prompt": "Answer: ", "max_tokens": 120, **sampling, **constraint}
    events = list(server.stream("/v1/completions", openai_body))
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == whole["text"]


def test_choices_of_one_prompt(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Flip a coin."}]
    extra = {"choices": ["heads", "tails"]}
    answer = client.chat.completions.create(model="smollm2", messages=messages, n=8, temperature=1, seed=5, extra_body=extra)
    texts = [choice.message.content for choice in answer.choices]
    assert set(texts) <= {"heads", "tails"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_logprobs_under_a_constraint_are_finite(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Answer yes or no."}]
    answer = client.chat.completions.create(
        model="smollm2",
        messages=messages,
        max_tokens=16,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
        extra_body={"regex": "(yes|no)"},
    )
    choice = answer.choices[0]
    assert choice.message.content in ("yes", "no")
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert "".join(entry.token for entry in entries) == choice.message.content
    values = [entry.logprob for entry in entries] + [top.logprob for entry in entries for top in entry.top_logprobs]
    assert all(-1e4 < value <= 0 for value in values)


@pytest.mark.parametrize("pattern", ["(🧭|🇳🇱|👨‍👩‍👧){4}", "B 潮龘x 驫骉k齉 end", "(北京|東京|서울)，(é|ß|ø){2}"])
def test_text_beyond_the_vocabulary(server: Server, pattern: str) -> None:
    body = {"text": "Draw: ", "sampling_params": {"max_new_tokens": 160, "temperature": 0, "regex": pattern}}
    whole = server.post("/generate", body)
    assert re.fullmatch(pattern, whole["text"])
    assert list(server.stream("/generate", body))[-1]["text"] == whole["text"]


def test_jump_forward_changes_the_cost_not_the_language(server: Server) -> None:
    for seed in range(3):
        answers = [
            generate(server, json_schema=FIXED, json_whitespace="compact", jump_forward=on, seed=seed) for on in (True, False)
        ]
        for answer in answers:
            assert stopped(answer)
            assert answer["text"] == json.dumps(json.loads(answer["text"]), separators=(",", ":"))
            jsonschema.validate(json.loads(answer["text"]), FIXED)
        assert answers[0]["meta_info"]["forced_tokens"] > 8
        assert answers[0]["meta_info"]["forced_tokens"] < answers[0]["meta_info"]["completion_tokens"]
        assert answers[1]["meta_info"]["forced_tokens"] == 0


def test_forced_tokens_are_in_the_usage_and_in_the_metrics(server: Server, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Fill in."}]
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, extra_body={"json_schema": FIXED, "json_whitespace": "compact"}
    )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.model_dump()["forced_tokens"] > 8
    counted = re.search(r"sglang:forced_tokens_total\{[^}]*\} (\S+)", server.get("/metrics")[1])
    assert counted
    assert float(counted[1]) > 0


def test_a_stop_string_and_the_length_end_a_constrained_output(server: Server) -> None:
    cut = generate(server, json_schema=STATUS, stop='"data"', temperature=0)
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": '"data"'}
    assert '"data"' not in cut["text"]
    short = generate(server, json_schema=STATUS, max_new_tokens=5)
    assert short["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    others: list[dict[str, Any]] = [
        {"min_new_tokens": 20},
        {"ignore_eos": True},
        {"logit_bias": {"18": 5.0}, "repetition_penalty": 1.3},
    ]
    for sampling in others:
        answer = generate(server, regex="(yes|no)", **sampling)
        assert (answer["text"] in ("yes", "no"), stopped(answer)) == (True, True)


async def test_zmq_client(server: Server) -> None:
    async with radixcast.EngineClient(server.zmq_endpoint) as client:
        output = await client.generate("Answer: ", {"json_schema": FIXED, "json_whitespace": "compact", "max_new_tokens": 120})
        jsonschema.validate(json.loads(output.text), FIXED)
        assert output.usage.forced_tokens > 8


def test_a_mixed_crowd(server: Server) -> None:
    """Constrained and free requests in the same steps; a free one's text does not depend on it."""
    free: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1, "seed": 11}
    alone = generate(server, **free)["text"]
    work: list[dict[str, Any]] = [
        free,
        {"json_schema": FIXED, "json_whitespace": "compact"},
        {"regex": REGEXES[7]},
        {"json_schema": STATUS},
    ]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: generate(server, **{"seed": i, **work[i % 4]}), range(24)))
    for i, answer in enumerate(answers):
        if i % 4 == 0:
            assert answer["text"] == alone
            continue
        assert stopped(answer)
        if i % 4 == 2:
            assert re.fullmatch(REGEXES[7], answer["text"])
        else:
            jsonschema.validate(json.loads(answer["text"]), FIXED if i % 4 == 1 else STATUS)


@pytest.mark.parametrize(
    "flags",
    [
        ("--force-retract-interval", "5"),
        ("--chunked-prefill-size", "4", "--disable-overlap-schedule"),
        ("--disable-jump-forward", "--max-total-tokens", "256", "--constrained-json-disable-any-whitespace"),
    ],
    ids=["retraction", "chunks", "small-pool"],
)
def test_other_ways_through_the_scheduler(smollm2_spec: ModelSpec, flags: tuple[str, ...]) -> None:
    with Server(*flags) as server, ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(
                lambda i: generate(server, json_schema=FIXED, json_whitespace="compact", max_new_tokens=100, seed=i), range(6)
            )
        )
    for answer in answers:
        assert stopped(answer)
        jsonschema.validate(json.loads(answer["text"]), FIXED)
        assert (answer["meta_info"]["forced_tokens"] > 0) == ("--disable-jump-forward" not in flags)
    if "--force-retract-interval" in flags:
        assert any(answer["meta_info"]["num_retractions"] for answer in answers)
