"""What can't be enforced is refused by name, hostile grammars are answered, every keyword is enforced or refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fakes.server import Server
from fakes.structured import generate, refusal, stopped
from radixcast.protocols.model import ModelSpec


@pytest.fixture(scope="module")
def server(smollm2_spec: ModelSpec) -> Iterator[Server]:
    with Server() as running:
        yield running


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "(ab"}, "sampling_params.regex", "invalid_regex"),
    ({"regex": "a{3,1}"}, "sampling_params.regex", "invalid_regex"),
    ({"regex": "*x"}, "sampling_params.regex", "invalid_regex"),
    ({"json_schema": '{"type": '}, "", "invalid_schema"),
    ({"json_schema": {"type": "strinng"}}, "/type", "invalid_schema"),
    ({"json_schema": {"properties": {"a": {"type": "string", "pattern": "([a-z"}}}}, "/properties/a/pattern", "invalid_regex"),
    ({"ebnf": "root ::= x"}, "sampling_params.ebnf", "invalid_grammar"),
    ({"ebnf": "root ::= root"}, "sampling_params.ebnf", "invalid_grammar"),
    ({"structural_tag": "{}"}, "", "invalid_grammar"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "sampling_params.ebnf", ""),
    ({"json_schema": {}, "choices": ["a"]}, "sampling_params.choices", ""),
]


@pytest.mark.parametrize(("sampling", "param", "code"), BAD, ids=[json.dumps(b[0])[:40] for b in BAD])
def test_bad_grammars_are_refused_by_name(server: Server, sampling: dict[str, Any], param: str, code: str) -> None:
    error = refusal(server, **sampling)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param:
        assert error["param"] == param
    if code:
        assert error["code"] == code


def test_an_openai_body_hears_of_its_own_fields(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    for extra, param in (
        ({"regex": "(a"}, "regex"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strinng"}}}}, "/type"),
    ):
        status, body = server.request("/v1/chat/completions", {**chat, **extra})
        assert (status, body["error"]["param"]) == (400, param)


def nested_one_of(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        schema = {"oneOf": [schema, {"type": "array", "items": schema, "minItems": level}, {"type": "integer"}]}
    return schema


def hostile() -> dict[str, dict[str, Any]]:
    return {
        "1 MB": {"json_schema": {"type": "object", "properties": {f"key_{i:06}": {"type": "string"} for i in range(32_000)}}},
        "oneOf": {"json_schema": nested_one_of(10)},
        "enum": {"json_schema": {"enum": [f"value {i}" for i in range(60_000)]}},
        "regex": {"regex": "(.{1,200}x){1,200}"},
        "optionals": {"regex": "(a?){4000}a{4000}"},
        "recursion": {"ebnf": "root ::= root"},
        "broken": {"json_schema": '{"type": "object"'},
        "empty": {"regex": "a[^\\s\\S]"},
        "never": {"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        "loop": {"json_schema": {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}},
        "deep": {"json_schema": json.loads('{"items":' * 300 + "{}" + "}" * 300)},
        "nul": {"regex": "a\x00b"},
    }


def test_hostile_grammars_are_answered_while_a_stream_goes_on(server: Server) -> None:
    grammars = hostile()
    with ThreadPoolExecutor(len(grammars) + 1) as pool:
        body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        stream = pool.submit(lambda: list(server.stream("/generate", body)))
        began = time.monotonic()
        sent = {
            name: pool.submit(server.request, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4, **sampling}})
            for name, sampling in grammars.items()
        }
        answers = {name: future.result() for name, future in sent.items()}
        elapsed = time.monotonic() - began
        events = stream.result()
    for name, (status, answer) in answers.items():
        assert status in (200, 400, 503), (name, answer)
        assert status == 200 or answer["error"]["message"], name
    for name in ("recursion", "broken", "empty", "never", "loop", "deep"):
        assert answers[name][0] == 400, (name, answers[name])
    assert events[-1]["meta_info"]["completion_tokens"] == 200
    assert elapsed < 60
    assert generate(server, regex="a|b")["text"] in ("a", "b")


def test_aborted_while_the_grammar_is_compiled(server: Server) -> None:
    body = {"text": "x", "rid": "slow-grammar", "sampling_params": {"max_new_tokens": 4, "regex": "(.{1,190}y){1,190}"}}
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.request, "/generate", body)
        time.sleep(0.1)
        server.request("/abort_request", {"rid": "slow-grammar"})
        status, reply = answer.result()
    assert status in (200, 400, 499), reply
    assert generate(server, choices=["a"])["text"] == "a"


# ------------------------------------------------------------------ every keyword


KEYWORDS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "schema_keywords.jsonl").read_text().splitlines()
]


def validator(schema: Any) -> jsonschema.protocols.Validator:
    """Of the draft that the schema was written for, as its keywords show. Decimals are exact: 0.14 is 14 times 0.01."""
    text = json.dumps(schema)
    schema = json.loads(text, parse_float=Decimal)
    if re.search(r'"exclusiveM(in|ax)imum": true', text):
        kind: Any = jsonschema.Draft4Validator
    elif re.search(r'"items": \[|"additionalItems"|"dependencies"', text):
        kind = jsonschema.Draft7Validator
    else:
        kind = jsonschema.Draft202012Validator
    checked: jsonschema.protocols.Validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    return checked


@pytest.mark.slow
def test_every_keyword_is_enforced_or_refused(server: Server) -> None:
    def ask(case: dict[str, Any], seed: int) -> tuple[int, Any]:
        sampling = {"json_schema": case["schema"], "temperature": 1, "seed": seed, "max_new_tokens": 200}
        return server.request("/generate", {"text": "Some JSON: ", "sampling_params": sampling})

    with ThreadPoolExecutor(16) as pool:
        asked = [(case, pool.submit(ask, case, seed)) for case in KEYWORDS for seed in range(3)]
        answers = [(case, *future.result()) for case, future in asked]
    refused: set[str] = set()
    wrong: list[Any] = []
    ended = 0
    for case, status, answer in answers:
        if status == 400:
            refused.add(case["group"])
            pointer, message = answer["error"]["param"], answer["error"]["message"]
            if pointer is None or not re.match("/|$", pointer) or not message:
                wrong.append((case["group"], answer["error"]))
        elif status != 200:
            wrong.append((case["group"], answer))
        elif stopped(answer):
            ended += 1
            errors = validator(case["schema"]).iter_errors(json.loads(answer["text"], parse_float=Decimal))
            wrong += [(case["group"], answer["text"], error.message) for error in errors]
        elif answer["meta_info"]["finish_reason"]["type"] != "length":
            wrong.append((case["group"], answer["meta_info"]["finish_reason"]))
    assert not wrong
    assert len(refused) <= 20, sorted(refused)
    assert ended > 100


@pytest.mark.slow
def test_thousands_of_schemas_leave_memory_bounded(smollm2_spec: ModelSpec) -> None:
    with Server() as running, ThreadPoolExecutor(8) as pool:

        def resident() -> int:
            return sum(int(child.memory_info().rss) for child in running.children()) >> 20

        assert set(pool.map(lambda i: running.request("/generate", distinct(i))[0], range(300))) == {200}
        before = resident()
        assert set(pool.map(lambda i: running.request("/generate", distinct(i))[0], range(300, 2300))) == {200}
        grown = resident() - before
    assert grown < 400, f"{before} MiB, and {grown} more after 2000 schemas"


def distinct(i: int) -> dict[str, Any]:
    """A body with a schema like no other."""
    properties = {f"key_{i}_{j}": {"type": "string", "pattern": f"^[a-z]{{1,{1 + i % 9}}}x{j}$"} for j in range(5)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"text": "x", "sampling_params": {"json_schema": schema, "max_new_tokens": 2}}
