"""Every route, in one table: methods, path, who may, and the handler. What is not in here does not exist."""

from __future__ import annotations

from radixcast.actors.gateway import control, health, info, tokens
from radixcast.actors.gateway.auth import Level
from radixcast.actors.gateway.chat import chat_completions
from radixcast.actors.gateway.completions import completions
from radixcast.actors.gateway.generate import generate
from radixcast.actors.gateway.http import Route

_GET = ("GET", "HEAD")
_POST = ("POST",)

ROUTES: tuple[Route, ...] = (
    Route(("POST", "PUT"), "/generate", Level.NORMAL, generate),
    Route(_POST, "/v1/chat/completions", Level.NORMAL, chat_completions, openai=True),
    Route(_POST, "/v1/completions", Level.NORMAL, completions, openai=True),
    Route(_GET, "/v1/models", Level.NORMAL, info.models),
    Route(_GET, "/v1/models/{id}", Level.NORMAL, info.model),
    Route(_POST, "/tokenize", Level.NORMAL, tokens.tokenize),
    Route(_POST, "/v1/tokenize", Level.NORMAL, tokens.tokenize),
    Route(_POST, "/detokenize", Level.NORMAL, tokens.detokenize),
    Route(_POST, "/v1/detokenize", Level.NORMAL, tokens.detokenize),
    Route(_GET, "/model_info", Level.NORMAL, info.model_info),
    Route(_GET, "/get_model_info", Level.NORMAL, info.model_info),
    Route(_GET, "/server_info", Level.NORMAL, info.server_info),
    Route(_GET, "/get_server_info", Level.NORMAL, info.server_info),
    Route(_GET, "/health_generate", Level.NORMAL, health.health_generate),
    Route(("GET", "POST"), "/flush_cache", Level.ADMIN, control.flush_cache),
    Route(_POST, "/abort_request", Level.ADMIN, control.abort_request),
    Route(_GET, "/", Level.OPEN, info.root),
    Route(_GET, "/health", Level.OPEN, health.health),
    Route(_GET, "/healthz", Level.OPEN, health.health),
    Route(_GET, "/livez", Level.OPEN, health.live),
    Route(_GET, "/ready", Level.OPEN, health.ready),
    Route(_GET, "/readyz", Level.OPEN, health.ready),
    Route(_GET, "/metrics", Level.OPEN, info.metrics),
)
