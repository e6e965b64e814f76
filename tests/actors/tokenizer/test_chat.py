"""Chat messages and templates: as transformers renders them, and a clear 400 for what can't be rendered."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fakes.byte_tokenizer import CHATML, byte_tokenizer
from radixcast.actors.tokenizer.chat_messages import normalise_messages
from radixcast.actors.tokenizer.chat_template import ChatTemplate
from radixcast.actors.tokenizer.templates import BUILTIN_TEMPLATES
from radixcast.protocols.errors import ContextLengthExceeded, InvalidRequest, StartupError
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.public import Chat

TOOLS_TEMPLATE = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
Today: {{ date_string }}
{%- if tools is not none and tools %}
{%- for t in tools %}
    {{- t | tojson(indent=4) }}
    {{- "\\n\\n" }}
{%- endfor %}
{%- endif %}
{{- system_message }}
{%- set ns = namespace(last='', count=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {{- "<|tool|>" + message.content + message.tool_call_id }}
    {%- else %}
        {% generation %}{{- '<|' + message['role'] + '|>' + message['content'] | trim }}{% endgeneration %}
    {%- endif %}
    {%- set ns.last = message.role %}{% set ns.count = ns.count + 1 %}
{%- endfor %}
{{ ns.last }} {{ ns.count }} {{ dict(a=1)['a'] }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

TALK = [
    {"role": "system", "content": "Be brief. <b>&'\""},
    {"role": "user", "content": "  Hallo Wörld 你好 👍\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And?"},
]
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"q": "Zürich"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
TOOLS = [{"type": "function", "function": {"name": "w", "description": "é", "parameters": {"type": "object"}}}]


def template(source: str, **changes: Any) -> ChatTemplate:
    values: dict[str, Any] = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "max_chars": 10_000}
    return ChatTemplate(source, **(values | changes))


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_tokenizer(), bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )
    return str(tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options))


SOURCES = {**BUILTIN_TEMPLATES, "tests": CHATML, "tools": TOOLS_TEMPLATE}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_renders_as_transformers(name: str, prompt: bool) -> None:
    source = SOURCES[name]
    chat = Chat(messages=TALK, add_generation_prompt=prompt)
    assert template(source).render(chat) == reference(source, TALK, add_generation_prompt=prompt)


def test_smollm2_renders_as_transformers(smollm2_spec: ModelSpec) -> None:
    source = smollm2_spec.chat_template or ""
    ours = template(source, bos_token=smollm2_spec.bos_token, eos_token=smollm2_spec.eos_token)
    for messages in (TALK, TALK[1:]):
        assert ours.render(Chat(messages=messages)) == reference(source, messages, add_generation_prompt=True)


def test_tools_and_tool_calls() -> None:
    parsed = [dict(m) for m in TOOL_TALK]
    parsed[1] = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w", "arguments": {"q": "Zürich"}}}]}
    text = template(TOOLS_TEMPLATE).render(Chat(messages=TOOL_TALK, tools=TOOLS))
    assert text == reference(TOOLS_TEMPLATE, parsed, tools=TOOLS, add_generation_prompt=True)
    assert '"parameters": {"q": "Zürich"}}' in text
    assert datetime.datetime.now().strftime("%Y") in text


def test_template_kwargs_reach_the_template() -> None:
    chat = Chat(messages=TALK, template_kwargs={"date_string": "long ago"})
    assert "Today: long ago" in template(TOOLS_TEMPLATE).render(chat)
    with pytest.raises(InvalidRequest, match="'messages'"):
        template(CHATML).render(Chat(messages=TALK, template_kwargs={"messages": []}))


@pytest.mark.parametrize("name", ["chatml", "llama-3", "zephyr", "mistral", "vicuna", "tests"])
@pytest.mark.parametrize("final", ["The answer is", "a", "ends in a space "])
def test_continue_final_message(name: str, final: str) -> None:
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": final}]
    text = template(SOURCES[name]).render(Chat(messages=messages, continue_final_message=True))
    assert text.endswith(final)
    if final.strip() == final:
        assert text == reference(SOURCES[name], messages, continue_final_message=True)


def test_only_an_assistant_message_can_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="assistant") as caught:
        template(CHATML).render(Chat(messages=[{"role": "user", "content": "x"}], continue_final_message=True))
    assert caught.value.info.param == "continue_final_message"
    hides = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="does not show"):
        template(hides).render(Chat(messages=TALK[:3], continue_final_message=True))


def test_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    messages = normalise_messages([{"role": "developer", "content": parts, "name": "dev"}])
    assert messages == [{"role": "system", "content": "one\ntwo\nthree", "name": "dev"}]


def test_messages_are_not_changed_in_place() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    template(CHATML).render(Chat(messages=messages, continue_final_message=True))
    assert messages[1]["content"] == "y"


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "what"}, IMAGE]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [{"text": "no type"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "x"}] * 5000, "messages"),
        (["hello"], "messages[0]"),
    ],
)
def test_bad_messages_name_the_field(messages: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalise_messages(messages)
    assert caught.value.info.param == param
    assert caught.value.info.status == 400


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    for arguments in ("{broken", "[1]", "7", {"a": 1}, "[" * 100_000):
        call = {"function": {"name": "f", "arguments": arguments}}
        (message,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_what_the_template_refuses_is_a_400_with_its_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template(BUILTIN_TEMPLATES["mistral"]).render(Chat(messages=[TALK[2], TALK[1]]))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 + 'x' }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ dict.mro() }}",
    ],
)
def test_template_errors_are_400s_and_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest, match="can't render"):
        template(source).render(Chat(messages=TALK))


def test_output_and_time_are_limited() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(ContextLengthExceeded, match="10000 characters"):
        template(endless).render(Chat(messages=TALK))
    ticks = iter(range(100_000_000))
    with pytest.raises(InvalidRequest, match="took over 5 s"):
        template(endless, max_chars=1 << 60).render(Chat(messages=TALK), clock=lambda: next(ticks) / 10)


def test_broken_template_stops_the_start() -> None:
    with pytest.raises(StartupError, match="line 2"):
        template("fine\n{% if %}")
