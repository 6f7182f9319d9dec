"""LangChain's OpenAI chat model against the gateway."""

from __future__ import annotations

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

MODEL = "tiny"
QUESTION = "When does the last red car leave?"


@pytest.fixture(autouse=True)
def _no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def chat(gateway_url: str) -> ChatOpenAI:
    return chat_model(gateway_url, MODEL)


def chat_model(gateway_url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{gateway_url}/v1",
        api_key=SecretStr("unused"),
        model=model,
        temperature=0,
        max_completion_tokens=12,
        max_retries=0,
        timeout=60,
        stream_usage=True,
    )


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream_adds_up_to_the_answer(chat: ChatOpenAI) -> None:
    whole, *more = chat.stream(QUESTION)
    for part in more:
        whole += part
    assert whole.content == chat.invoke(QUESTION).content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0


async def test_async(chat: ChatOpenAI) -> None:
    answer = await chat.ainvoke(QUESTION)
    assert "".join([str(part.content) async for part in chat.astream(QUESTION)]) == answer.content


def test_unknown_model(gateway_url: str) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        chat_model(gateway_url, "no-such-model").invoke(QUESTION)
    assert error.value.code == "model_not_found"
    assert error.value.request_id


def test_bad_body(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat.invoke(QUESTION, max_completion_tokens=-1)
    assert error.value.request_id
