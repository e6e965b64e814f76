"""/metrics: Prometheus text with the names that dashboards for SGLang know (prefix `sglang:`).

Counts of tokens and requests are the scheduler's, so what comes in over ZMQ is counted too; latencies are measured here,
where the client's bytes leave. Labels come from closed sets (route patterns, known methods, statuses): nothing that a
client writes ever becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixcast.protocols.internal import NodeState
from radixcast.protocols.public import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

UNMATCHED = "unmatched"
"""`endpoint` of requests that match no route."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_ITL = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8)
_E2E = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)

_Numbers = dict[str, tuple[str, Callable[[SchedulerStats], float]]]
"""Metric name -> (help, how to read it)."""

_GAUGES: _Numbers = {
    "num_running_reqs": ("requests in the running batch", lambda s: s.running),
    "num_queue_reqs": ("requests waiting", lambda s: s.queued),
    "num_grammar_queue_reqs": ("requests waiting for a grammar", lambda s: s.grammar_queued),
    "num_retracted_reqs": ("requests waiting after a retraction", lambda s: s.retracted),
    "num_used_tokens": ("KV slots held by running requests", lambda s: s.locked_tokens),
    "kv_used_tokens": ("KV slots held by running requests", lambda s: s.locked_tokens),
    "kv_available_tokens": ("KV slots that are free", lambda s: s.free_tokens),
    "kv_evictable_tokens": ("KV slots of cached prefixes that nobody uses now", lambda s: s.cached_tokens),
    "max_total_num_tokens": ("KV slots", lambda s: s.total_tokens),
    "token_usage": ("share of the KV slots held by running requests", lambda s: s.locked_tokens / max(1, s.total_tokens)),
    "cache_hit_rate": ("cached share of all admitted prompt tokens since start", lambda s: s.cache_hit_rate),
    "cache_hit_rate_window": ("the same over the last 60 s", lambda s: s.cache_hit_rate_window),
    "gen_throughput": ("output tokens per second", lambda s: s.gen_throughput),
    "new_token_ratio": ("share of the remaining output that is reserved for running requests", lambda s: s.new_token_ratio),
}

_COUNTERS: _Numbers = {
    "prompt_tokens": ("prompt tokens of admitted requests", lambda s: s.prompt_tokens_total),
    "cached_tokens": ("prompt tokens found in the cache", lambda s: s.cached_tokens_total),
    "generation_tokens": ("output tokens", lambda s: s.generation_tokens_total),
    "num_requests": ("admitted requests", lambda s: s.requests_total),
    "num_aborted_requests": ("requests aborted", lambda s: s.aborted_total),
    "num_retracted_requests": ("retractions", lambda s: s.retractions_total),
    "evicted_tokens": ("tokens evicted from the cache", lambda s: s.evicted_tokens_total),
    "scheduler_steps": ("plans sent to the runner", lambda s: s.steps),
    "forward_execution_seconds": ("seconds of forward passes", lambda s: s.forward_seconds_total),
    "device_wait_seconds": ("seconds the runner had no plan while requests ran", lambda s: s.device_wait_seconds_total),
    "num_grammar": ("grammars asked of the runner", lambda s: s.grammars_total),
    "num_grammar_cache_hit": ("of those, the ones that it had already", lambda s: s.grammar_hits_total),
    "forced_tokens": ("output tokens that a grammar forced (jump-forward)", lambda s: s.forced_tokens_total),
    "repaired_slips": ("bookkeeping slips found and mended", lambda s: s.repaired_total),
}


class Metrics:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.node = NodeCollector(model_name)
        self.registry.register(self.node)
        self.first_token = self._histogram("time_to_first_token_seconds", "from submission to the first token", _TTFT)
        self.inter_token = self._histogram("inter_token_latency_seconds", "between two tokens of a stream", _ITL)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "from submission to the end", _E2E)
        self._requests = Counter(
            "sglang:http_requests", "HTTP requests by route", ["endpoint", "method"], registry=self.registry
        )
        self._responses = Counter(
            "sglang:http_responses", "HTTP answers by status", ["endpoint", "status_code", "method"], registry=self.registry
        )
        self._active = Gauge("sglang:http_requests_active", "HTTP requests in progress", registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"sglang:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model)

    def observe_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` apart each."""
        for _ in range(count):
            self.inter_token.observe(seconds)

    def request(self, endpoint: str, method: str) -> None:
        """A request came in; `endpoint` is a route's pattern."""
        self._active.inc()
        self._requests.labels(endpoint, _method(method)).inc()

    def response(self, endpoint: str, method: str, status: int) -> None:
        """It was answered (499: its client left first)."""
        self._active.dec()
        self._responses.labels(endpoint, str(status), _method(method)).inc()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(_WithoutCreated(self.registry))


class _WithoutCreated(CollectorRegistry):
    """A registry without the `_created` series, which would double the size of the text for nobody."""

    def __init__(self, inner: CollectorRegistry) -> None:
        super().__init__()
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        for family in self._inner.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class NodeCollector(Collector):
    """The scheduler's numbers as last told, and the supervisor's view of the actors."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.stats = SchedulerStats()
        self.state: NodeState | None = None

    def collect(self) -> Iterator[Metric]:
        """Metric families, for the registry."""
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], read(self.stats))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(f"sglang:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], read(self.stats))
            yield counter
        actors = self.state.actors if self.state else []
        up = GaugeMetricFamily("radixcast:actor_up", "1 when the actor serves", labels=["actor"])
        age = GaugeMetricFamily("radixcast:actor_heartbeat_age_seconds", "since its last heartbeat", labels=["actor"])
        restarts = GaugeMetricFamily("radixcast:actor_epoch", "incarnation of the actor", labels=["actor"])
        for actor in actors:
            up.add_metric([actor.name], float(actor.state == "ready"))
            age.add_metric([actor.name], actor.heartbeat_age)
            restarts.add_metric([actor.name], actor.epoch)
        yield from (up, age, restarts)


def _method(method: str) -> str:
    return method if method in _METHODS else "OTHER"
