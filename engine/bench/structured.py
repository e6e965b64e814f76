"""What a JSON schema costs, and what jump-forward gives: the same chats with the schema and without, in one run.

============ ======== ================================== ============= ==============================================
name         requests schema                             whitespace    what differs between variants
============ ======== ================================== ============= ==============================================
json         32       a person: short keys, free strings the server's  plain, schema (jump-forward off), schema+jump
json-fixed   32       a form: long keys, short values    none          the same
============ ======== ================================== ============= ==============================================

8 requests at once. The variants take turns, 8 requests each, so a machine that gets slower or faster meanwhile favours
nobody. `plain` writes as many tokens as the answer under the schema had. Each variant has a cache salt of its own and so
computes its prompts itself. Servers that don't tell forced tokens have no jump-forward that could be turned off.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, replace
from typing import Any

from radixcast.bench.client import BenchClient, Sample
from radixcast.bench.prompts import Prompts
from radixcast.bench.report import Figures, summarise
from radixcast.bench.workloads import Job, Tick, run_at_once

CONCURRENCY = 8
PLAIN, SCHEMA, JUMP = "plain", "schema", "schema+jump"

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "enum": ["Paris", "Tokyo", "Lima", "Oslo", "Cairo"]},
        "member": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 24},
                "number": {"type": "integer", "minimum": 1, "maximum": 9999},
            },
            "required": ["street", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "city", "member", "tags", "address"],
    "additionalProperties": False,
}

_FORM = {
    "customer_identification_number": {"type": "integer", "minimum": 1, "maximum": 99},
    "preferred_contact_language": {"enum": ["en", "fr", "de"]},
    "newsletter_subscription_active": {"type": "boolean"},
    "account_registration_year": {"type": "integer", "minimum": 2000, "maximum": 2030},
    "loyalty_programme_membership_level": {"enum": ["basic", "silver", "gold"]},
    "accepts_electronic_invoices": {"type": "boolean"},
    "number_of_previous_orders": {"type": "integer", "minimum": 0, "maximum": 99},
    "delivery_address_verified": {"type": "boolean"},
}
FORM: dict[str, Any] = {"type": "object", "properties": _FORM, "required": list(_FORM), "additionalProperties": False}


@dataclass(frozen=True)
class Structured:
    """One row of the table above."""

    question: str
    schema: dict[str, Any]
    max_tokens: int
    compact: bool = False
    requests: int = 32
    concurrency: int = CONCURRENCY

    def scaled(self, requests: int | None) -> Structured:
        """The same with another number of requests."""
        return self if requests is None else replace(self, requests=requests)


STRUCTURED = {
    "json": Structured(
        "Invent a person for a test data base and answer with one JSON object that has name, age, city, member, tags and "
        "address. Hints: {hints}",
        PERSON,
        max_tokens=160,
    ),
    "json-fixed": Structured(
        "Fill in the customer form as one JSON object. Hints: {hints}", FORM, max_tokens=220, compact=True
    ),
}


_ORDERS = ((SCHEMA, PLAIN, JUMP), (JUMP, SCHEMA, PLAIN), (SCHEMA, JUMP, PLAIN))
"""Of the variants in one turn; `plain` comes after `schema`, whose lengths it takes."""


async def run_structured(
    workload: Structured, client: BenchClient, prompts: Prompts, rng: random.Random, tick: Tick
) -> list[Figures]:
    """Figures of every variant that the server has, `plain` first; each with its `variant` and its ratios to others."""
    salt = f"{rng.getrandbits(64):x}"
    questions = [workload.question.format(hints=prompts.text(rng, 24)) for _ in range(workload.requests)]
    warm_up = await _ask(workload, client, questions[0], SCHEMA, f"{salt}/warm-up")
    variants = [PLAIN, SCHEMA, JUMP] if warm_up.forced_tokens is not None else [PLAIN, SCHEMA]
    samples: dict[str, list[Sample]] = {variant: [] for variant in variants}
    seconds = dict.fromkeys(variants, 0.0)
    for number, start in enumerate(range(0, len(questions), workload.concurrency)):
        block = questions[start : start + workload.concurrency]
        lengths: list[int] = []
        for variant in _ORDERS[number % len(_ORDERS)]:
            if variant not in variants:
                continue
            began = time.perf_counter()
            jobs = [
                _job(workload, client, question, variant, f"{salt}/{variant}", lengths[i] if variant == PLAIN else 0)
                for i, question in enumerate(block)
            ]
            done = await run_at_once(workload.concurrency, jobs)
            seconds[variant] += time.perf_counter() - began
            samples[variant] += done
            if variant == SCHEMA:
                lengths = [max(1, sample.completion_tokens) for sample in done]
            tick(len(done) if variant == PLAIN else 0)
    return _figures(workload, samples, seconds)


def _job(workload: Structured, client: BenchClient, question: str, variant: str, salt: str, length: int) -> Job:
    async def job() -> list[Sample]:
        return [await _ask(workload, client, question, variant, salt, length)]

    return job


async def _ask(workload: Structured, client: BenchClient, question: str, variant: str, salt: str, length: int = 0) -> Sample:
    extra: dict[str, Any] = {"cache_salt": salt}
    if variant != PLAIN:
        wrapped = {"name": "answer", "strict": True, "schema": workload.schema}
        extra |= {"response_format": {"type": "json_schema", "json_schema": wrapped}, "ignore_eos": False}
        extra["jump_forward"] = variant == JUMP
        if workload.compact:
            extra["json_whitespace"] = "compact"
    return await client.chat([{"role": "user", "content": question}], length or workload.max_tokens, **extra)


def _figures(workload: Structured, samples: dict[str, list[Sample]], seconds: dict[str, float]) -> list[Figures]:
    found = {}
    for variant, done in samples.items():
        found[variant] = figures = {"variant": variant, **summarise(done, seconds[variant])}
        if variant != PLAIN:
            figures["json_valid"] = sum(_is_json(sample) for sample in done)
            figures["forced_tokens"] = sum(sample.forced_tokens or 0 for sample in done)
            figures["output_throughput_vs_plain"] = _ratio(figures, found[PLAIN], "output_throughput")
    if JUMP in found:
        texts = zip(samples[SCHEMA], samples[JUMP], strict=True)
        found[JUMP]["request_throughput_vs_no_jump"] = _ratio(found[JUMP], found[SCHEMA], "request_throughput")
        found[JUMP]["same_text_as_no_jump"] = sum(a.text == b.text for a, b in texts)
    return list(found.values())


def _ratio(one: Figures, other: Figures, key: str) -> float | None:
    return round(one[key] / other[key], 4) if other[key] else None


def _is_json(sample: Sample) -> bool:
    """Whether the answer is a JSON object (one that was cut off at max_tokens is none)."""
    try:
        return isinstance(json.loads(sample.text), dict)
    except ValueError:
        return False
