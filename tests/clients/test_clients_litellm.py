"""litellm, as a library, against the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

# litellm declares some fields in a way that pydantic remarks on; the remark says nothing of the gateway.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Item .* on TypedDict class .* is using the `ReadOnly` qualifier:UserWarning"
)

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Which bus replaces the green line?"}]


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """Imported without its network look-up of prices, and without reading a .env file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("LITELLM_MODE", "PRODUCTION")
        import litellm

        yield litellm
        for cached in litellm.in_memory_llm_clients_cache.cache_dict.values():
            if isinstance(cached, openai.OpenAI):
                cached.close()


@pytest.fixture
def call(gateway_url: str) -> dict[str, Any]:
    """The arguments that every call shares."""
    return {
        "model": f"openai/{MODEL}",
        "messages": MESSAGES,
        "api_base": f"{gateway_url}/v1",
        "api_key": "unused",
        "max_tokens": 12,
        "temperature": 0,
        "max_retries": 0,
        "timeout": 60,
    }


def test_chat(litellm: Any, call: dict[str, Any]) -> None:
    answer = litellm.completion(**call)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def test_stream_adds_up_to_the_answer(litellm: Any, call: dict[str, Any]) -> None:
    whole = litellm.completion(**call).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**call, stream=True)]
    assert "".join(parts) == whole


async def test_async(litellm: Any, call: dict[str, Any]) -> None:
    whole = (await litellm.acompletion(**call)).choices[0].message.content
    stream = await litellm.acompletion(**call, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == whole
    await litellm.close_litellm_async_clients()


def test_models(litellm: Any, gateway_url: str) -> None:
    models = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=gateway_url, api_key="unused"
    )
    assert [name.removeprefix("openai/") for name in models] == [MODEL]


def test_unknown_model(litellm: Any, call: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError) as error:
        litellm.completion(**{**call, "model": "openai/no-such-model"})
    assert error.value.status_code == 404
    assert "'no-such-model' does not exist" in str(error.value)
    assert error.value.request_id


def test_bad_body(litellm: Any, call: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError) as error:
        litellm.completion(**{**call, "max_tokens": -1})
    assert error.value.status_code == 400
    assert error.value.request_id
