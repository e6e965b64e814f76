"""Schemas, and calls of /generate, for end-to-end tests of constraints."""

from __future__ import annotations

from typing import Any

from fakes.server import Server

PROFILE = (
    r'\{\s*"name"\s*:\s*".*?",\s*"age"\s*:\s*\d+,\s*"city"\s*:\s*".*?",\s*"job"\s*:\s*".*?"\s*\}',
    "生成一个虚构用户的资料，包含姓名、年龄、城市、职业，格式为JSON：",
)
USER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "skills"],
}
STATUS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "status": {"enum": ["success", "failed"]},
        "data": {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 20}},
            "required": ["id", "name"],
            "additionalProperties": False,
        },
    },
    "required": ["status", "data"],
    "additionalProperties": False,
}
FIXED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 1, "maximum": 99},
        "newsletter_subscription_active": {"type": "boolean"},
        "preferred_contact_language": {"enum": ["en", "fr"]},
    },
    "required": ["customer_identification_number", "newsletter_subscription_active", "preferred_contact_language"],
    "additionalProperties": False,
}


def generate(server: Server, prompt: str = "Answer: ", **sampling: Any) -> Any:
    return server.post("/generate", {"text": prompt, "sampling_params": {"max_new_tokens": 200, **sampling}})


def refusal(server: Server, **sampling: Any) -> Any:
    """The error of a request that must be a 400."""
    status, body = server.request("/generate", {"text": "Answer: ", "sampling_params": {"max_new_tokens": 40, **sampling}})
    assert status == 400, body
    return body["error"]


def stopped(answer: Any) -> bool:
    return bool(answer["meta_info"]["finish_reason"]["type"] == "stop")
