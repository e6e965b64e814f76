"""The `openai` client against the gateway."""

from __future__ import annotations

import openai
import pytest

from fakes.gateway_app import Http, serving


def client(http: Http, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=http.url + "/v1", api_key=key, max_retries=0)


async def test_chat() -> None:
    async with serving() as http, client(http) as api:
        whole = await api.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "Hello"}], temperature=0, logprobs=True, top_logprobs=2
        )
        stream = await api.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hello"}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "olleH"
    assert whole.choices[0].logprobs is not None
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "olleH"
    assert chunks[-1].usage == whole.usage


async def test_completions_and_models() -> None:
    async with serving(api_key="k") as http, client(http, "k") as api:
        answer = await api.completions.create(model="tiny", prompt=["ab", "cd"], n=2, temperature=0, logprobs=1, echo=True)
        stream = await api.completions.create(model="tiny", prompt="abc", temperature=0, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        models = [m.id async for m in api.models.list()]
        assert (await api.models.retrieve("tiny")).id == "tiny"
    assert [c.text for c in answer.choices] == ["abba", "abba", "cddc", "cddc"]
    assert text == "cba"
    assert models == ["tiny"]


async def test_errors_become_the_clients_own_classes() -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "x"}]
    async with serving(api_key="k") as http, client(http, "k") as api:
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="gpt-9", messages=messages)
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="tiny", messages=messages, temperature=-1)
        with pytest.raises(openai.AuthenticationError):
            await client(http, "wrong").models.list()
    assert missing.value.code == "model_not_found"
    assert bad.value.param == "temperature"
