"""OpenAI chat messages in, messages as chat templates expect them out. Every refusal names the field.

What changes on the way: `developer` becomes `system`; a list of text parts becomes one string (these templates want
strings), joined by newlines; an assistant's null content becomes ""; a tool call's `arguments`, a JSON string by OpenAI's
rule, becomes an object, since templates print it themselves. Everything else passes through. Images, audio and files are
refused; no URL is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixcast.protocols import limits
from radixcast.protocols.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")


def normalise_messages(messages: Sequence[Mapping[str, Any]], param: str = "messages") -> list[dict[str, Any]]:
    """Checked messages for a template. Raises InvalidRequest with `param` like ``messages[2].content``."""
    if not messages:
        raise InvalidRequest(f"{param} must hold at least one message", param=param)
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"{param} holds {len(messages)} messages, at most {limits.MAX_MESSAGES}", param=param)
    return [_message(message, f"{param}[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object, got {_kind(message)}", param=where)
    role = message.get("role")
    if role is None:
        raise InvalidRequest(f"{where} has no role", param=f"{where}.role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}, got {_shown(role)}", param=f"{where}.role")
    result = dict(message)
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content(message, f"{where}.content")
    if message.get("tool_calls") is None:
        result.pop("tool_calls", None)
    else:
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant":
            return ""
        raise InvalidRequest(f"{where} must be a string or a list of parts, got null", param=where)
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts, got {_kind(content)}", param=where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} must be an object with a type, got {_kind(part)}", param=where)
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}.text must be a string, got {_kind(text)}", param=f"{where}.text")
        return text
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    raise InvalidRequest(f"{where}: this model takes text only, got a part of type {_shown(kind)}", param=f"{where}.type")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list, got {_kind(calls)}", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}[{i}] must be an object with function.name", param=f"{where}[{i}]")
        result.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return result


def _arguments(arguments: Any) -> Any:
    """The object that a JSON string holds; what is no JSON object stays as it is (models do write such calls)."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
