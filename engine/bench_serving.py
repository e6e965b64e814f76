"""python -m radixcast.bench_serving: throughput, latency and cache hits of any OpenAI server under a fixed workload.

Prompts are deterministic (--seed) and differ between runs of --repeat, so that a prefix cache can hit only what the
workload itself repeats. A line of JSON per run (for json and json-fixed: per variant of it) goes to standard output, a table
and the progress to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress

from radixcast.bench.client import BenchClient
from radixcast.bench.prompts import Prompts, count_with_file, count_with_server, make_prompts
from radixcast.bench.report import Figures, print_table, summarise
from radixcast.bench.structured import STRUCTURED, Structured, run_structured
from radixcast.bench.workloads import WORKLOADS, Tick, Workload, run_workload, warm_up


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 when a request failed, 2 for wrong options or an unreachable server."""
    options = _parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        runs = asyncio.run(_bench(options, console))
    except (OSError, ValueError, aiohttp.ClientError, TimeoutError) as error:
        print(f"bench_serving: {error or type(error).__name__}", file=sys.stderr)
        return 2
    print_table(runs, console)
    return 1 if any(run["errors"] for run in runs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m radixcast.bench_serving", description=__doc__)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:30000", help="the server's address, with or without /v1")
    add("--workload", choices=[*WORKLOADS, *STRUCTURED], default="batch16")
    add("--model", help="name to send (default: the first of /v1/models)")
    add(
        "--tokenizer", help="tokenizer.json or its folder (default: the server's /tokenize; without one, words count as tokens)"
    )
    add("--num-prompts", type=_positive, help="requests instead of the workload's own number")
    add("--seed", type=int, default=0)
    add("--repeat", type=_positive, default=1, help="runs, each with fresh prompts")
    add("--warmup", type=int, default=8, metavar="N", help="requests before the first run that are not measured")
    add("--timeout", type=float, default=600.0, help="seconds that one request may take")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="sent as a bearer token (also OPENAI_API_KEY)")
    add("--extra-request-body", type=_object, default={}, metavar="JSON", help="merged into every request")
    add("--label", help="kept in the output, to tell servers apart")
    add("--output-file", type=Path, help="JSON lines are appended here too")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


async def _bench(options: argparse.Namespace, console: Console) -> list[Figures]:
    base_url = options.base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = aiohttp.ClientTimeout(total=options.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        model = options.model or await _first_model(session, base_url)
        count = count_with_file(options.tokenizer) if options.tokenizer else count_with_server(session, base_url, model)
        prompts = await make_prompts(count)
        if not prompts.exact:
            console.print("no tokenizer: a word is taken for a token", style="yellow")
        client = BenchClient(session, base_url, model, options.extra_request_body)
        if options.warmup > 0:
            await warm_up(client, prompts, random.Random(f"{options.seed}/warm-up"), options.warmup)
        runs: list[Figures] = []
        for number in range(1, options.repeat + 1):
            for figures in await _one_run(options, client, prompts, number, console):
                runs.append(figures)
                _emit(figures, options.output_file)
        return runs


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    async with session.get(f"{base_url}/v1/models") as answer:
        answer.raise_for_status()
        document = await answer.json(content_type=None)
    try:
        return str(document["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"{base_url}/v1/models names no model; give --model") from None


async def _one_run(
    options: argparse.Namespace, client: BenchClient, prompts: Prompts, number: int, console: Console
) -> list[Figures]:
    known: dict[str, Workload | Structured] = {**WORKLOADS, **STRUCTURED}
    workload = known[options.workload].scaled(options.num_prompts)
    rng = random.Random(f"{options.seed}/{options.workload}/{number}")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{options.workload} {number}/{options.repeat}", total=workload.requests)
        found = await _run(workload, client, prompts, rng, lambda n: progress.update(task, advance=n))
    about = {"workload": options.workload, "run": number, "base_url": client.base_url, "model": client.model}
    setting = {"label": options.label, "seed": options.seed, "exact_prompts": prompts.exact}
    return [{**about, **setting, "concurrency": workload.concurrency, **figures} for figures in found]


async def _run(
    workload: Workload | Structured, client: BenchClient, prompts: Prompts, rng: random.Random, tick: Tick
) -> list[Figures]:
    if isinstance(workload, Structured):
        return await run_structured(workload, client, prompts, rng, tick)
    start = time.perf_counter()
    samples = await run_workload(workload, client, prompts, rng, tick)
    return [summarise(samples, time.perf_counter() - start)]


def _emit(figures: Figures, output: Path | None) -> None:
    line = json.dumps(figures)
    print(line, flush=True)
    if output is not None:
        with open(output, "a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
