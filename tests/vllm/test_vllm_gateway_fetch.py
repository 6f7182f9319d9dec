"""All of it at once: a gateway before two real vLLM servers, each with the connector and an agent with a pool. What one
computed the other fetches because the gateway says so, and answers the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from agent_support import until
from pinned_client import ONE, TWO, PinnedClient
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


def system(number: int) -> str:
    """A text that no other number has."""
    return f"You are assistant {number}. {DOCUMENTS[number % len(DOCUMENTS)].text[:3_000]}"


@pytest.fixture
async def client(engines: tuple[PooledEngine, PooledEngine], tmp_path: Path) -> AsyncIterator[PinnedClient]:
    replicas = [{"id": each.replica, "engine": each.server.url, "agent": each.agent_url} for each in engines]
    config = tmp_path / "gateway.yaml"
    config.write_text(json.dumps({"replicas": replicas, "placement": {"allow_pinning": True}}))
    async with serving("--config", str(config), token=TOKEN) as (url, admin):
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            asking = PinnedClient(url, admin, http, model=NAME, block=BLOCK, system=system)

            async def ready() -> bool:
                found = await asking.get("/admin/replicas")
                pools = all(each["reporting"] and "namespace" in each["fetch"] for each in found["replicas"])
                return pools and found["identity"].get(NAME, {}).get("mode") == "exact"

            await until(ready, "exact, and every pool is known")
            yield asking


async def test_what_one_vllm_computed_the_other_fetches(client: PinnedClient) -> None:
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
