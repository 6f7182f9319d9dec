"""A whole deployment that fetches: what one replica computed another reads from it, and answers the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from cluster_support import READY_S, tiny_cluster
from pinned_client import ONE, TWO, PinnedClient

from gateway.demo.cluster import Cluster
from gateway.demo.questions import DOCUMENTS

SIZE = 16


@pytest.fixture(scope="module")
def deployment() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, tiny_cluster(replicas=2, pool_bytes=64 * 1024 * 1024) as running:
        # The tiny model computes about as fast as it fetches: here that decides nothing.
        patch.setenv("REPLICA_AGENT_FETCH_MARGIN", "-20")
        running.start_all()
        asyncio.run(running.wait_ready(READY_S))
        yield running
        running.stop()
        assert not running.leftovers()


@pytest.fixture
async def client(deployment: Cluster) -> AsyncIterator[PinnedClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        yield PinnedClient(
            deployment.url,
            deployment.admin_url,
            http,
            model="tiny",
            block=SIZE,
            system=lambda document: DOCUMENTS[document].text[:2_400],
        )


async def test_what_one_replica_computed_the_other_fetches(client: PinnedClient) -> None:
    first = await client.teach(0)
    second = await client.ask(0, TWO)
    assert second.text == first.text
    tokens = (second.receipt["prompt_tokens"] - 1) // SIZE * SIZE
    assert second.cached == second.receipt["predicted_cached_tokens"] == tokens
    assert second.receipt["fetch"]["source"] == ONE
    fetched = second.receipt["fetched"]
    assert (fetched["outcome"], fetched["source"], fetched["replica"]) == ("fetched", ONE, TWO)
    assert fetched["moved"] == fetched["loaded"] == tokens // SIZE
    page = await client.get("/admin/fetches")
    assert [each["gateway_request"] for each in page["fetches"]] == [second.receipt["request_id"]]
    # Now both have it: nothing more is fetched.
    third = await client.ask(0, TWO)
    assert (third.text, third.cached, third.receipt["fetch"]) == (first.text, tokens, None)


async def test_what_a_drained_replica_has_is_fetched(client: PinnedClient) -> None:
    first = await client.teach(4)
    await client.drain(ONE)
    try:
        second = await client.ask(4, TWO)
    finally:
        await client.drain(ONE, undo=True)
    assert second.text == first.text
    assert second.receipt["fetched"]["outcome"] == "fetched"
    assert second.receipt["fetched"]["source"] == ONE


async def test_clients_cannot_send_agents_anywhere(client: PinnedClient) -> None:
    """A hint of their own making is cut out."""
    first = await client.teach(1)
    hint = {"request": "x", "source": ONE, "url": "http://192.0.2.1:1", "blocks": 9, "deadline_ms": 60_000}
    params = {"prefix_gateway": hint, "do_remote_prefill": True}
    before = len((await client.get("/admin/fetches"))["fetches"])
    second = await client.ask(1, TWO, kv_transfer_params=params)
    assert second.text == first.text
    assert second.receipt["fetched"]["outcome"] == "fetched"
    assert len((await client.get("/admin/fetches"))["fetches"]) == before + 1


async def test_when_the_source_is_gone_the_answer_is_the_same(client: PinnedClient, deployment: Cluster) -> None:
    first = await client.teach(2)
    deployment.kill("agent-0")
    second = await client.ask(2, TWO, recorded=False)
    assert (second.text, second.cached) == (first.text, 0)
    deployment.start_agent(0)
    await deployment.wait_ready(READY_S)
    receipt = await client.get(f"/admin/receipts/{second.receipt['request_id']}")
    assert receipt["fetched"] is None or (receipt["fetch"] and receipt["fetched"]["outcome"] == "failed")
    # Its pool is empty, and filled again by what its engine computes.
    first = await client.teach(3)
    second = await client.ask(3, TWO)
    assert second.text == first.text
    assert second.receipt["fetched"]["outcome"] == "fetched"
