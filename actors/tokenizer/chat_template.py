"""The one place where a chat template runs: jinja2's immutable sandbox with limits, and transformers' conventions.

A template comes from the model or the operator, never from a request; the messages in it do. So the sandbox keeps a bad
template from the process, and the limits (length of the output, time, `range`) keep a conversation from exhausting it.
"""

from __future__ import annotations

import datetime
import json
import secrets
import time
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from radixcast.actors.tokenizer.chat_messages import normalise_messages
from radixcast.protocols import limits
from radixcast.protocols.errors import ContextLengthExceeded, InvalidRequest, StartupError
from radixcast.protocols.public import Chat

RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "raise_exception",
    "strftime_now",
)
"""Names that `template_kwargs` may not set."""


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", pad_token: str = "", max_chars: int) -> None:
        """`max_chars`: longest rendered conversation. Raises StartupError when `source` is no template."""
        self._max_chars = max_chars
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise StartupError(f"the chat template is broken in line {error.lineno}: {error.message}") from None

    def render(self, chat: Chat, *, clock: Callable[[], float] = time.monotonic) -> str:
        """The prompt text of a conversation; special tokens are written in it.

        Raises InvalidRequest for bad messages, for what the template itself refuses (`raise_exception`), and past the limits.
        """
        messages = normalise_messages(chat.messages)
        marker = ""
        if chat.continue_final_message:
            marker = self._mark_final(messages)
        taken = [name for name in chat.template_kwargs if name in RESERVED]
        if taken:
            raise InvalidRequest(f"chat_template_kwargs may not set {taken[0]!r}", param="chat_template_kwargs")
        variables = {
            **self._tokens,
            **chat.template_kwargs,
            "messages": messages,
            "tools": chat.tools or None,
            "add_generation_prompt": chat.add_generation_prompt and not chat.continue_final_message,
        }
        text = self._run(variables, clock)
        return _cut(text, marker) if marker else text

    def _mark_final(self, messages: list[dict[str, Any]]) -> str:
        """Put a mark behind the last message's text, so that everything the template adds there can be cut off."""
        final = messages[-1]
        if final["role"] != "assistant":
            raise InvalidRequest(
                f"continue_final_message needs the last message to be the assistant's, got {final['role']!r}",
                param="continue_final_message",
            )
        marker = f"⟦{secrets.token_hex(16)}⟧"
        final["content"] += marker
        return marker

    def _run(self, variables: dict[str, Any], clock: Callable[[], float]) -> str:
        deadline = clock() + limits.MAX_TEMPLATE_SECONDS
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > self._max_chars:
                    raise ContextLengthExceeded(
                        f"the conversation is over {self._max_chars} characters long, more than the model's context can hold",
                        param="messages",
                    )
                if clock() > deadline:
                    raise InvalidRequest(f"the chat template took over {limits.MAX_TEMPLATE_SECONDS:g} s", param="messages")
        except _Refused as error:
            raise InvalidRequest(f"the chat template refuses this conversation: {error}", param="messages") from None
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequest(
                f"the chat template can't render this conversation: {type(error).__name__}: {error}", param="messages"
            ) from None
        return "".join(pieces)


class _Refused(Exception):
    """A template called raise_exception."""


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; serving shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _cut(text: str, marker: str) -> str:
    if marker not in text:
        raise InvalidRequest("the chat template does not show the final message, so it can't be continued", param="messages")
    return text[: text.rindex(marker)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Namespace(Namespace):
    """Jinja's namespace without names that reach into Python (`__class__` and the like)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a template's namespace can't hold {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A new dict; the type itself stays out of templates' reach."""
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's HTML escapes, as transformers' filter writes it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object = "") -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
