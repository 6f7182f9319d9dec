"""All of it at once: a gateway before two real vLLM servers, each with the connector and an agent with a pool. What one
computed the other fetches because the gateway says so, and answers the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from agent_support import until
from vllm_deployment import serving
from vllm_engine import prompt_of
from vllm_models import model_directory
from vllm_pool import PooledEngine, start_all
from vllm_server import BLOCK

from gateway.demo.questions import DOCUMENTS

pytestmark = pytest.mark.vllm

TOKEN = "the-deployments-own"
NAME = "tiny"
"""As our servers call any model."""
ONE, TWO = "replica-0", "replica-1"
TRIES = 12
"""Of fresh prompts: a host that gives the agents no core for the 45 ms that a lease may take loses a fetch."""


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[PooledEngine, PooledEngine]]:
    """Of a model that takes so long to compute that an agent fetches by its own reckoning, with its usual margin."""
    model, agent = model_directory("mid"), {"fetch-margin": "0.1"}
    with (
        PooledEngine(model, ONE, kv_tokens=96 * BLOCK, core="0", agent=agent, token=TOKEN) as one,
        PooledEngine(model, TWO, kv_tokens=96 * BLOCK, core="1", agent=agent, token=TOKEN) as two,
    ):
        start_all((one, two))
        yield one, two


class Said(NamedTuple):
    text: str
    cached: int
    receipt: dict[str, Any]


class Client:
    """Asks one gateway, and reads what became of each request."""

    def __init__(self, url: str, admin: str, http: httpx.AsyncClient) -> None:
        self._url = url
        self._admin = admin
        self._http = http

    async def get(self, path: str) -> Any:
        response = await self._http.get(f"{self._admin}{path}")
        response.raise_for_status()
        return response.json()

    async def ask(self, number: int, replica: str) -> Said:
        """About one text that no other number has, of that replica."""
        text = DOCUMENTS[number % len(DOCUMENTS)].text[:3_000]
        messages = [
            {"role": "system", "content": f"You are assistant {number}. {text}"},
            {"role": "user", "content": "What is this about?"},
        ]
        body = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        pin = {"x-gateway-pin": replica}
        response = await self._http.post(f"{self._url}/v1/chat/completions", json=body, headers=pin)
        assert response.status_code == 200, response.text
        answer = response.json()
        receipt: dict[str, Any] = {}

        async def told() -> bool:
            found = await self._http.get(f"{self._admin}/admin/receipts/{response.headers['x-request-id']}")
            if found.status_code == 200:
                receipt.update(found.json())
            return bool(receipt) and bool(not receipt["fetch"] or receipt["fetched"])

        await until(told, "receipt")
        assert receipt["replica"] == replica
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Said(answer["choices"][0]["message"]["content"], cached, receipt)

    async def teach(self, number: int) -> Said:
        """Of the first replica; when this returns the gateway knows that its agent has all of it."""
        before = await self._pooled()
        said = await self.ask(number, ONE)
        blocks = (said.receipt["prompt_tokens"] - said.cached) // BLOCK

        async def known() -> bool:
            return await self._pooled() >= before + blocks

        await until(known, "in the pool")
        return said

    async def _pooled(self) -> int:
        found = await self.get("/admin/replicas")
        return next(int(each["pool_blocks"]) for each in found["replicas"] if each["id"] == ONE)


@pytest.fixture
async def client(engines: tuple[PooledEngine, PooledEngine], tmp_path: Path) -> AsyncIterator[Client]:
    replicas = [{"id": each.replica, "engine": each.server.url, "agent": each.agent_url} for each in engines]
    config = tmp_path / "gateway.yaml"
    config.write_text(json.dumps({"replicas": replicas, "placement": {"allow_pinning": True}}))
    async with serving("--config", str(config), token=TOKEN) as (url, admin):
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            asking = Client(url, admin, http)

            async def ready() -> bool:
                found = await asking.get("/admin/replicas")
                pools = all(each["reporting"] and "namespace" in each["fetch"] for each in found["replicas"])
                return pools and found["identity"].get(NAME, {}).get("mode") == "exact"

            await until(ready, "exact, and every pool is known")
            yield asking


async def test_what_one_vllm_computed_the_other_fetches(client: Client) -> None:
    became = []
    for number in range(TRIES):
        first = await client.teach(number)
        second = await client.ask(number, TWO)
        # Fetched or not, in part or whole.
        assert second.text == first.text
        assert second.receipt["identity"] == "exact"
        fetched = second.receipt["fetched"] or {}
        became.append((fetched.get("outcome"), fetched.get("reason"), second.receipt["fetch"]))
        if fetched.get("outcome") == "fetched":
            break
    else:
        pytest.fail(f"none was fetched: {became}")
    tokens = (second.receipt["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert tokens >= 4 * BLOCK
    assert second.receipt["fetch"]["source"] == ONE
    assert (fetched["source"], fetched["replica"], fetched["failed"]) == (ONE, TWO, 0)
    assert fetched["moved"] and fetched["moved"] + fetched["own"] == fetched["loaded"]
    assert fetched["moved"] * BLOCK >= tokens - BLOCK
    assert second.receipt["cached_tokens"] == second.cached
    assert abs(second.cached - second.receipt["predicted_cached_tokens"]) <= BLOCK
    assert abs(second.cached - tokens) <= BLOCK
    page = await client.get("/admin/fetches")
    assert second.receipt["request_id"] in [each["gateway_request"] for each in page["fetches"]]
    assert sum(each["outcome"] == "fetched" for each in page["fetches"]) == 1
    # Now both have it: nothing more is fetched.
    third = await client.ask(number, TWO)
    assert (third.text, third.receipt["fetch"]) == (first.text, None)
    assert third.cached == tokens


def test_a_hint_that_is_not_the_gateways_is_not_followed(engines: tuple[PooledEngine, PooledEngine]) -> None:
    source, reader = engines
    prompt = prompt_of(71, 72, 73, extra=1)
    expected = source.complete(prompt)
    source.wait_saved(3)
    answer = reader.complete(prompt, **source.hint(prompt))
    assert (answer.tokens, answer.cached) == (expected.tokens, 0)
    last = reader.fetches()[-1]
    assert (last["outcome"], last["reason"], last["moved"]) == ("refused", "hint", 0)
