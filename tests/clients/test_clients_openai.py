"""OpenAI's Python SDK, sync and async, against the gateway as it stands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

MODEL = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Name the stops of the red line, in order."}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}

REFUSED_BY_THE_GATEWAY = [{"model": ""}, {"stream": "yes"}, {"messages": [], "extra_body": {"model": 5}}]
REFUSED_BY_THE_ENGINE = [{"messages": "hello"}, {"messages": []}, {"max_tokens": -1}]


@pytest.fixture
def client(gateway_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway_url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(gateway_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway_url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY)
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 12


def test_receipt_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**GREEDY)
    assert raw.headers["x-request-id"] == raw.request_id
    assert raw.headers["x-gateway-replica"]
    assert raw.headers["x-gateway-identity"] in ("exact", "text", "hash")
    assert int(raw.headers["x-gateway-predicted-cached-tokens"]) >= 0


def test_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY).choices[0]
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        whole.finish_reason
    ]
    assert all(chunk.usage is None for chunk in chunks), "usage that was not asked for"


def test_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The lens turns on", max_tokens=8, temperature=0)
    parts = client.completions.create(model=MODEL, prompt="The lens turns on", max_tokens=8, temperature=0, stream=True)
    assert answer.choices[0].text
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_stream_left_early(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**{**GREEDY, "max_tokens": 64}, stream=True) as stream:
        assert next(iter(stream)).model == MODEL
    assert client.chat.completions.create(**GREEDY).choices


def test_models(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("no-such-model")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(**{**GREEDY, "model": "no-such-model"}, stream=stream)
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"
    assert error.value.request_id


@pytest.mark.parametrize("bad", REFUSED_BY_THE_GATEWAY, ids=str)
def test_bad_body(client: openai.OpenAI, bad: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**GREEDY, **bad})
    assert error.value.code
    assert error.value.param == ("stream" if "stream" in bad else "model")
    assert error.value.request_id


@pytest.mark.parametrize("bad", REFUSED_BY_THE_ENGINE, ids=str)
def test_bad_body_that_only_the_engine_refuses(client: openai.OpenAI, bad: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**GREEDY, **bad})
    assert next(iter(bad)) in str(error.value)
    assert error.value.request_id


def test_request_id_of_the_client_is_kept(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**GREEDY, extra_headers={"x-request-id": "trip-17"})
    assert raw.request_id == "trip-17"


async def test_async_chat(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(**GREEDY)
    assert answer.choices[0].message.content


async def test_async_stream_adds_up_to_the_answer(async_client: openai.AsyncOpenAI) -> None:
    whole = (await async_client.chat.completions.create(**GREEDY)).choices[0]
    stream = await async_client.chat.completions.create(**GREEDY, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == whole.message.content


async def test_async_models(async_client: openai.AsyncOpenAI) -> None:
    assert MODEL in [model.id async for model in async_client.models.list()]


async def test_async_errors(async_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await async_client.chat.completions.create(**{**GREEDY, "model": "no-such-model"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await async_client.chat.completions.create(**{**GREEDY, "model": ""})
    assert bad.value.code
    assert bad.value.request_id
