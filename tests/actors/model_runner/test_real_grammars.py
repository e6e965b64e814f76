"""Real backends and a real vocabulary in the runner: forced text is what masks would have allowed token by token.

The model is a hash that picks any allowed token, so a mask that is off by one token would soon be met.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from fakes.plans import Planner, appended, opening
from radixcast.actors.grammar.builder import Builder
from radixcast.actors.grammar.interface import Compiled
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.actors.model_runner.constraints import GrammarOptions
from radixcast.actors.model_runner.free import FreeRunner
from radixcast.protocols.buffers import unpack_ids
from radixcast.protocols.grammar import GrammarSpec
from radixcast.protocols.internal import END_EOS, END_GRAMMAR, Capacity
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.sampling import SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_account_identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "城市": {"enum": ["北京", "上海", "São Paulo"]},
        "is_an_active_subscriber": {"type": "boolean"},
        "notes": {"type": "string", "maxLength": 6},
    },
    "required": ["customer_account_identifier", "城市", "is_an_active_subscriber", "notes"],
    "additionalProperties": False,
}
PATTERN = r"The answer to the question is (yes|no|perhaps), with a probability of 0\.[0-9]{2}\."
EBNF = 'root ::= "select " name (", " name)? " from the_table_of_all_customers;"\nname ::= [a-c]{1,3}\n'
SPECS = {
    "compact": GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA), whitespace="compact"),
    "flexible": GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA)),
    "regex": GrammarSpec(kind="regex", text=PATTERN),
    "ebnf": GrammarSpec(kind="ebnf", text=EBNF),
    "choices": GrammarSpec(kind="choices", text=json.dumps(["certainly not", "certainly", "not at all, no 🙂"])),
}


@pytest.fixture(scope="module")
def vocabulary(smollm2_spec: ModelSpec) -> Vocabulary:
    return Vocabulary.load(smollm2_spec)


@pytest.fixture(scope="module")
def compiled(vocabulary: Vocabulary) -> dict[str, Compiled]:
    builder = Builder(vocabulary)
    return {name: builder.build(spec) for name, spec in SPECS.items()}


class Grammars:
    """A constraints.Source."""

    def __init__(self, compiled: dict[str, Compiled]) -> None:
        self._compiled = compiled

    def get(self, key: str) -> Compiled:
        return self._compiled[key]


def outputs(
    compiled: dict[str, Compiled], vocabulary: Vocabulary, *, jump: bool, most: int = 8, earlier: Any = None
) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Tokens by (grammar, seed), in one batch, and how many were forced. `earlier`: what each had in an earlier life."""
    capacity = Capacity(total_tokens=100_000, max_running=64, context_length=10_000)
    options = GrammarOptions(Grammars(compiled), jump, vocabulary.eos_ids)
    runner, planner = FreeRunner(capacity, vocab_size=vocabulary.rows, grammars=options), Planner()
    jobs = {row: (name, seed) for row, (name, seed) in enumerate((name, seed) for name in compiled for seed in range(6))}
    out = {job: list((earlier or {}).get(job, ())) for job in jobs.values()}
    opens = [
        opening(
            row, [1, 2], out[job], grammar=job[0], new=200, sampling=SamplingParams(seed=job[1]), eos_ids=vocabulary.eos_ids
        )
        for row, job in jobs.items()
    ]
    todo, forced = set(jobs), 0
    for _ in range(1000):
        plan = planner.plan(dict.fromkeys(sorted(todo), most), opens)
        planner.next_slot, opens = 0, []
        result = runner.execute(plan)
        assert result.error is None
        for row, tokens in appended(plan, result).items():
            out[jobs[row]] += tokens
        forced += int(unpack_ids(result.forced).sum())
        for end in result.ends:
            assert end.reason in (END_EOS, END_GRAMMAR), end
            todo.remove(end.row)
        if not todo:
            return out, forced
    raise AssertionError(f"rows {todo} did not end")


def check(name: str, text: str) -> None:
    match name:
        case "compact" | "flexible":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "regex":
            assert re.fullmatch(PATTERN, text)
        case "ebnf":
            assert re.fullmatch("select [a-c]{1,3}(, [a-c]{1,3})? from the_table_of_all_customers;", text)
        case "choices":
            assert text in json.loads(SPECS["choices"].text)


def test_every_text_matches_and_jumps_change_nothing(compiled: dict[str, Compiled], vocabulary: Vocabulary) -> None:
    plain, none = outputs(compiled, vocabulary, jump=False)
    assert none == 0
    for (name, _), tokens in plain.items():
        kept = [t for t in tokens if t not in vocabulary.eos_ids]
        check(name, vocabulary.tokenizer.decode_bytes(kept).decode())
    for most in (2, 8, 32):
        jumped, forced = outputs(compiled, vocabulary, jump=True, most=most)
        assert jumped == plain
        assert forced > 100
    cut = {job: tokens[: len(tokens) // 2] for job, tokens in plain.items()}
    resumed, _ = outputs(compiled, vocabulary, jump=True, earlier=cut)
    assert resumed == plain
