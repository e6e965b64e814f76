"""What is served here: models, the model, the server."""

from __future__ import annotations

import time
from importlib.metadata import version as package_version
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from radixcast.actors.gateway.http import Call
from radixcast.actors.gateway.metrics import CONTENT_TYPE
from radixcast.actors.gateway.service import Gateway
from radixcast.protocols.errors import NotFound


async def root(call: Call) -> web.StreamResponse:
    """A line for people and for probes that want 200 here."""
    return call.text("Radixcast is running\n")


async def models(call: Call) -> web.StreamResponse:
    """GET /v1/models."""
    return call.json({"object": "list", "data": [_card(call.gateway)]})


async def model(call: Call) -> web.StreamResponse:
    """GET /v1/models/{id}."""
    name = unquote(call.tail)
    if name != call.gateway.served:
        raise NotFound(
            f"the model {name[:200]!r} does not exist; this server serves {call.gateway.served!r}",
            param="model",
            code="model_not_found",
        )
    return call.json(_card(call.gateway))


async def model_info(call: Call) -> web.StreamResponse:
    """GET /model_info."""
    gateway = call.gateway
    return call.json(
        {
            "model_path": gateway.model.path,
            "tokenizer_path": gateway.args.tokenizer_path or gateway.model.path,
            "served_model_name": gateway.served,
            "is_generation": True,
            "preferred_sampling_params": gateway.sampling_defaults or None,
            "weight_version": gateway.weight_version,
            "load_format": gateway.model.weight_format,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": gateway.model.config.architecture.removesuffix("ForCausalLM").lower(),
            "architectures": [gateway.model.config.architecture],
            "context_length": gateway.context_length,
            "vocab_size": gateway.model.config.vocab_size,
        }
    )


async def server_info(call: Call) -> web.StreamResponse:
    """GET /server_info: every flag (secrets masked), the pool, and the scheduler's numbers now."""
    gateway = call.gateway
    stats = await gateway.fresh_stats()
    pool = stats.total_tokens or (gateway.welcome.max_total_tokens if gateway.welcome else 0)
    info: dict[str, Any] = {
        **gateway.args.public(),
        "version": package_version("radixcast"),
        "status": gateway.state,
        "served_model_name": gateway.served,
        "context_length": gateway.context_length,
        "max_total_num_tokens": pool,
        "max_req_input_len": max(0, gateway.context_length - 1),
        "uptime_seconds": time.time() - gateway.created,
        "internal_states": [
            {
                "last_gen_throughput": stats.gen_throughput,
                "memory_usage": {"token_capacity": pool},
                **msgspec.to_builtins(stats),
            }
        ],
        "actors": [msgspec.structs.asdict(actor) for actor in gateway.actors()],
    }
    return call.json(info)


async def metrics(call: Call) -> web.StreamResponse:
    """GET /metrics."""
    await call.gateway.fresh_stats()
    headers = call.headers | {"Content-Type": CONTENT_TYPE}
    return web.Response(body=call.gateway.metrics.render(), headers=headers)


def _card(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.served,
        "object": "model",
        "created": gateway.created,
        "owned_by": "radixcast",
        "root": gateway.served,
        "parent": None,
        "max_model_len": gateway.context_length,
    }
