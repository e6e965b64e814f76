"""Samples -> figures -> a table. Times are milliseconds, rates are per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from radixcast.bench.client import Sample

Figures = dict[str, Any]

_ROWS = (
    ("requests", "requests", ""),
    ("errors", "errors", ""),
    ("duration", "duration_s", "s"),
    ("request rate", "request_throughput", "req/s"),
    ("input rate", "input_throughput", "tok/s"),
    ("output rate", "output_throughput", "tok/s"),
    ("prompt tokens", "prompt_tokens", ""),
    ("output tokens", "completion_tokens", ""),
    ("cache hit rate", "cache_hit_rate", ""),
    ("TTFT p50", "ttft_ms_p50", "ms"),
    ("TTFT p90", "ttft_ms_p90", "ms"),
    ("TTFT p99", "ttft_ms_p99", "ms"),
    ("ITL p50", "itl_ms_p50", "ms"),
    ("ITL p99", "itl_ms_p99", "ms"),
    ("TPOT p50", "tpot_ms_p50", "ms"),
    ("e2e p50", "e2e_ms_p50", "ms"),
    ("e2e p90", "e2e_ms_p90", "ms"),
    ("e2e p99", "e2e_ms_p99", "ms"),
    ("valid JSON", "json_valid", ""),
    ("forced tokens", "forced_tokens", ""),
    ("output rate / plain", "output_throughput_vs_plain", ""),
    ("request rate / no jump", "request_throughput_vs_no_jump", ""),
    ("texts as without jump", "same_text_as_no_jump", ""),
)


def percentile(values: Sequence[float], q: float) -> float | None:
    """q-th percentile (0-100), linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(samples: Sequence[Sample], seconds: float) -> Figures:
    """Figures of one run that took `seconds`; failed requests count as errors and in nothing else."""
    good = [sample for sample in samples if sample.error is None]
    prompt = sum(sample.prompt_tokens for sample in good)
    output = sum(sample.completion_tokens for sample in good)
    cached = sum(sample.cached_tokens for sample in good)
    seconds = max(seconds, 1e-9)
    figures: Figures = {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "duration_s": round(seconds, 3),
        "request_throughput": round(len(good) / seconds, 3),
        "input_throughput": round(prompt / seconds, 2),
        "output_throughput": round(output / seconds, 2),
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "cached_tokens": cached,
        "cache_hit_rate": round(cached / prompt, 4) if prompt else None,
    }
    tpots = [sample.tpot for sample in good]
    figures |= _spread("ttft", [sample.ttft for sample in good], (50, 90, 99))
    figures |= _spread("itl", [gap for sample in good for gap in sample.gaps], (50, 99))
    figures |= _spread("tpot", [tpot for tpot in tpots if tpot is not None], (50, 99))
    figures |= _spread("e2e", [sample.end - sample.start for sample in good], (50, 90, 99))
    figures["finish_reasons"] = dict(Counter(str(sample.finish_reason) for sample in good))
    figures["usage_reported"] = bool(good) and all(sample.has_usage for sample in good)
    first = next((sample.error for sample in samples if sample.error), None)
    if first:
        figures["first_error"] = first
    return figures


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[int]) -> Figures:
    found = {f"{name}_ms_p{q}": percentile(seconds, q) for q in percentiles}
    return {key: None if value is None else round(1000 * value, 3) for key, value in found.items()}


def print_table(runs: Sequence[Figures], console: Console) -> None:
    """One column a run, or a variant of one."""
    table = Table(title=f"{runs[0]['workload']} on {runs[0]['base_url']} ({runs[0]['model']})", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(_title(run), justify="right")
    table.add_column("", style="dim")
    for title, key, unit in _ROWS:
        if any(key in run for run in runs):
            table.add_row(title, *("–" if run.get(key) is None else f"{run[key]:g}" for run in runs), unit)
    console.print(table)
    for run in runs:
        if run.get("first_error"):
            console.print(f"{_title(run)}: first error: {run['first_error']}", markup=False)
        if not run["usage_reported"]:
            console.print(f"{_title(run)}: the server reports no usage; tokens are counted by events", markup=False)


def _title(run: Figures) -> str:
    return f"run {run['run']}" + (f" {run['variant']}" if "variant" in run else "")
