"""The official client through the gateway: the same words as from the engine itself."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from support import wait
from support.gateway import Gateway
from support.llama import Engine

REQUEST: dict[str, Any] = {
    "model": "deepseek-tiny",
    "messages": [{"role": "user", "content": "什么是专家混合? Tell me 😀"}],
    "max_tokens": 200,
    "temperature": 0,
    "seed": 1,
    "extra_body": {"cache_prompt": False},
}


def base_url(gateway: Gateway) -> str:
    return f"http://127.0.0.1:{gateway.listen[1]}/v1"


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url(gateway), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def direct(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=base_url(gateway), api_key="none", max_retries=0
    ) as client:
        yield client


def plain(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(**REQUEST)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 200
    return answer.choices[0].message.content or ""


def streamed(client: openai.OpenAI) -> str:
    words, usage = [], None
    request = {**REQUEST, "stream_options": {"include_usage": True}}
    for piece in client.chat.completions.create(**request, stream=True):
        usage = piece.usage or usage
        words += [choice.delta.content or "" for choice in piece.choices]
    assert usage is not None
    assert usage.completion_tokens == 200
    return "".join(words)


def test_the_words_are_the_engines(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    words = plain(direct)
    assert len(words) == 200
    assert plain(client) == streamed(client) == streamed(direct) == words


async def test_the_async_client_gets_the_same_words(
    async_client: openai.AsyncOpenAI, direct: openai.OpenAI
) -> None:
    answer = await async_client.chat.completions.create(**REQUEST)
    stream = await async_client.chat.completions.create(**REQUEST, stream=True)
    pieces = [choice.delta.content or "" async for piece in stream for choice in piece.choices]
    assert answer.choices[0].message.content == "".join(pieces) == plain(direct)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["deepseek-tiny"]


def test_errors_of_the_engine_are_the_engines(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**REQUEST, "messages": "no list"})
    assert caught.value.status_code == 400


@pytest.mark.line(22)
def test_fifty_streams_one_after_the_other(gateway: Gateway, client: openai.OpenAI) -> None:
    """The engine closes its connection after each stream without saying so."""
    short = {**REQUEST, "max_tokens": 5}
    for _ in range(50):
        pieces = list(client.chat.completions.create(**short, stream=True))
        assert pieces[-1].choices[0].finish_reason == "length"


@pytest.mark.line(1)
def test_leaving_frees_the_engines_slot(
    gateway: Gateway, engine: Engine, client: openai.OpenAI
) -> None:
    """Alone the engine would go on for a long time."""
    endless = {**REQUEST, "max_tokens": 30_000, "extra_body": {"ignore_eos": True}}
    streams = [client.chat.completions.create(**endless, stream=True) for _ in range(4)]
    for stream in streams:
        assert next(iter(stream)).choices is not None
    assert engine.busy_slots() == 4
    for stream in streams:
        stream.close()
    wait.until(lambda: engine.busy_slots() == 0, 2, "free slots")
    gateway.wait_idle()
