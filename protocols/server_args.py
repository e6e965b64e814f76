"""ServerArgs: everything that one deployment chooses, checked once at the border.

The command line, `Engine(**kwargs)` and `--config FILE` are all derived from this struct: a field `max_total_tokens`
is the flag `--max-total-tokens`. Secret fields never show in a repr, a log or /server_info.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from radixcast.protocols.errors import StartupError


class Flag(msgspec.Struct, frozen=True):
    """What the command line needs to know of a field beyond its name and type."""

    help: str
    aliases: tuple[str, ...] = ()
    group: str = "server"
    secret: bool = False


def flag(help: str, *aliases: str, group: str = "server", secret: bool = False) -> msgspec.Meta:
    """Metadata of a field that becomes a command-line flag."""
    return msgspec.Meta(description=help, extra={"flag": Flag(help, aliases, group, secret)})


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random"]
Eviction = Literal["lru", "lfu", "slru", "priority"]

_SECRETS = ("api_key", "admin_api_key")


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All flags of `radixcast serve`, with their defaults."""

    model_path: Annotated[str, flag("alias, folder, .gguf file or hub id", "--model", group="model")] = "smollm2"
    tokenizer_path: Annotated[str | None, flag("folder with tokenizer.json (default: the model's)", group="model")] = None
    served_model_name: Annotated[str | None, flag("name in /v1/models and in answers", group="model")] = None
    chat_template: Annotated[str | None, flag("built-in name or jinja file (default: the model's)", group="model")] = None
    context_length: Annotated[int | None, flag("tokens of prompt plus output (default: the model's)", group="model")] = None
    dtype: Annotated[Dtype, flag("auto: float32 on CPU, the model's own on CUDA", group="model")] = "auto"
    quantization: Annotated[
        Literal["auto", "none"],
        flag("auto keeps the file's form where that is faster; none computes in --dtype", group="model"),
    ] = "auto"
    device: Annotated[str, flag("auto, cpu, cuda or cuda:N", group="model")] = "auto"
    random_seed: Annotated[int | None, flag("seed of requests that bring none (default: random)", group="model")] = None
    weight_version: Annotated[str, flag("label of the weights, told in every answer", group="model")] = "default"

    host: Annotated[str, flag("address to listen on", group="http")] = "127.0.0.1"
    port: Annotated[int, flag("port to listen on; 0 picks a free one", group="http")] = 30000
    zmq_endpoint: Annotated[
        str | None,
        flag("public ZMQ endpoint: ipc://PATH or tcp://HOST:PORT (default: a socket in the run folder)", group="http"),
    ] = None
    api_key: Annotated[str | None, flag("key that clients must send (also RADIXCAST_API_KEY)", group="http", secret=True)] = (
        None
    )
    admin_api_key: Annotated[
        str | None, flag("key of the admin routes (also RADIXCAST_ADMIN_API_KEY)", group="http", secret=True)
    ] = None
    allow_any_model: Annotated[bool, flag("answer whatever model name a request gives", group="http")] = False
    max_connections: Annotated[int, flag("open HTTP connections", group="http")] = 4096
    shutdown_timeout: Annotated[float, flag("seconds that running requests get after SIGTERM", group="http")] = 30.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], flag("least severe messages shown", group="log")] = (
        "info"
    )
    decode_log_interval: Annotated[int, flag("steps between two log lines of running decodes", group="log")] = 40

    mem_fraction_static: Annotated[
        float | None,
        flag(
            "share of the device's memory for weights plus KV (default: 0.88 on CUDA; CPU: half of the free, at most 4 GiB)",
            group="memory",
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None, flag("tokens in the KV pool (default: from --mem-fraction-static)", group="memory")
    ] = None
    page_size: Annotated[
        int, flag("tokens a KV page; only whole pages are shared", "--radix-cache-redundancy", group="memory")
    ] = 1
    enable_radix_cache: Annotated[bool, flag("accepted; the default", group="memory")] = True
    disable_radix_cache: Annotated[bool, flag("compute every prompt afresh", group="memory")] = False
    radix_eviction_policy: Annotated[Eviction, flag("which leaf goes first", group="memory")] = "lru"

    max_running_requests: Annotated[
        int | None, flag("requests in one step (default: from the pool, at most 256)", group="schedule")
    ] = None
    max_queued_requests: Annotated[int, flag("requests waiting beyond the running ones; more get 503", group="schedule")] = 4096
    max_prefill_tokens: Annotated[int, flag("prompt tokens admitted to one step", group="schedule")] = 16384
    chunked_prefill_size: Annotated[
        int | None,
        flag("prompt tokens computed in one step; -1: whole prompts (default: 512 on CPU, 8192 on CUDA)", group="schedule"),
    ] = None
    schedule_policy: Annotated[Policy, flag("order of the waiting requests", group="schedule")] = "fcfs"
    schedule_conservativeness: Annotated[float, flag("higher reserves more room for running requests", group="schedule")] = 1.0
    enable_priority_scheduling: Annotated[bool, flag("honour `priority` (higher first), with ageing", group="schedule")] = False
    disable_overlap_schedule: Annotated[bool, flag("one plan in flight instead of two", group="schedule")] = False
    force_retract_interval: Annotated[
        int, flag("retract a running request every N steps (a test of ours; 0: never)", group="schedule")
    ] = 0

    grammar_backend: Annotated[
        Literal["auto", "llguidance", "outlines"],
        flag("auto: outlines for regular expressions within a budget, llguidance for all else", group="grammar"),
    ] = "auto"
    grammar_timeout: Annotated[float, flag("seconds that compiling one grammar may take", group="grammar")] = 10.0
    grammar_lenient: Annotated[
        bool, flag("ignore schema keywords that can't be enforced instead of refusing them", group="grammar")
    ] = False
    disable_jump_forward: Annotated[bool, flag("sample forced text token by token", group="grammar")] = False
    constrained_json_whitespace_pattern: Annotated[
        str | None, flag("regular expression of the whitespace between JSON tokens", group="grammar")
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool, flag("compact JSON: no whitespace between JSON tokens", group="grammar")
    ] = False

    max_restarts: Annotated[
        int, flag("restarts of one actor within --restart-window before the node gives up", group="faults")
    ] = 3
    restart_window: Annotated[float, flag("seconds", group="faults")] = 300.0
    watchdog_timeout: Annotated[float, flag("seconds after which a step counts as stuck", group="faults")] = 300.0

    @property
    def radix_cache(self) -> bool:
        """Whether prefixes are shared."""
        return not self.disable_radix_cache

    def public(self) -> dict[str, Any]:
        """Every field as plain data with secrets masked: what /server_info and logs may show."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        for name in _SECRETS:
            if shown[name] is not None:
                shown[name] = "***"
        return shown

    def __repr__(self) -> str:
        return f"ServerArgs({', '.join(f'{k}={v!r}' for k, v in self.public().items())})"


def check(args: ServerArgs) -> None:
    """Check ranges and combinations. Raises StartupError naming the flag."""

    def need(ok: bool, name: str, rule: str) -> None:
        if not ok:
            raise StartupError(f"--{name.replace('_', '-')} must be {rule}, got {getattr(args, name)}")

    need(0 <= args.port <= 65535, "port", "in [0, 65535]")
    need(args.page_size >= 1, "page_size", ">= 1")
    need(args.mem_fraction_static is None or 0 < args.mem_fraction_static <= 1, "mem_fraction_static", "in (0, 1]")
    need(args.context_length is None or args.context_length >= 2, "context_length", ">= 2")
    need(args.max_total_tokens is None or args.max_total_tokens >= 2, "max_total_tokens", ">= 2")
    need(args.max_running_requests is None or args.max_running_requests >= 1, "max_running_requests", ">= 1")
    need(args.max_queued_requests >= 0, "max_queued_requests", ">= 0")
    need(args.max_prefill_tokens >= 1, "max_prefill_tokens", ">= 1")
    need(
        args.chunked_prefill_size is None or args.chunked_prefill_size == -1 or args.chunked_prefill_size >= 1,
        "chunked_prefill_size",
        "-1 or >= 1",
    )
    need(args.schedule_conservativeness > 0, "schedule_conservativeness", "> 0")
    need(args.shutdown_timeout >= 0, "shutdown_timeout", ">= 0")
    need(args.max_connections >= 1, "max_connections", ">= 1")
    need(args.grammar_timeout > 0, "grammar_timeout", "> 0")
    if args.zmq_endpoint and not args.zmq_endpoint.startswith(("ipc://", "tcp://")):
        raise StartupError(f"--zmq-endpoint must be ipc://PATH or tcp://HOST:PORT, got {args.zmq_endpoint}")
