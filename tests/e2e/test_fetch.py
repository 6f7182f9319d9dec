"""A whole deployment that fetches: what one replica computed another reads from it, and answers the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from agent_support import until
from cluster_support import READY_S, tiny_cluster

from gateway.demo.cluster import Cluster
from gateway.demo.questions import DOCUMENTS

SIZE = 16
ONE, TWO = "replica-0", "replica-1"


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


class Said(NamedTuple):
    text: str
    cached: int
    receipt: dict[str, Any]


class Client:
    """Asks one deployment, and reads what became of each request."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        self._cluster = cluster
        self._http = http

    async def get(self, path: str) -> Any:
        response = await self._http.get(f"{self._cluster.admin_url}{path}")
        response.raise_for_status()
        return response.json()

    async def drain(self, replica: str, *, undo: bool = False) -> None:
        url = f"{self._cluster.admin_url}/admin/replicas/{replica}/drain"
        (await self._http.request("DELETE" if undo else "PUT", url)).raise_for_status()

    async def ask(self, document: int, replica: str, **fields: Any) -> Said:
        """About one document, of that replica."""
        messages = [
            {"role": "system", "content": DOCUMENTS[document].text[:2_400]},
            {"role": "user", "content": "What is this about?"},
        ]
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
        response = await self._http.post(
            f"{self._cluster.url}/v1/chat/completions", json=body, headers={"x-gateway-pin": replica}
        )
        assert response.status_code == 200, response.text
        answer = response.json()
        receipt: dict[str, Any] = {}

        async def told() -> bool:
            found = await self._http.get(f"{self._cluster.admin_url}/admin/receipts/{response.headers['x-request-id']}")
            if found.status_code == 200:
                receipt.update(found.json())
            return bool(receipt) and bool(not receipt["fetch"] or receipt["fetched"])

        await until(told, "receipt")
        assert receipt["replica"] == replica
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Said(answer["choices"][0]["message"]["content"], cached, receipt)

    async def teach(self, document: int) -> Said:
        """Of the first replica; when this returns the gateway knows that its agent has all of it."""
        before = await self._pooled()
        said = await self.ask(document, ONE)
        blocks = said.receipt["prompt_tokens"] // SIZE

        async def known() -> bool:
            return await self._pooled() >= before + blocks - said.cached // SIZE

        await until(known, "in the pool")
        return said

    async def _pooled(self) -> int:
        found = await self.get("/admin/replicas")
        return next(int(each["pool_blocks"]) for each in found["replicas"] if each["id"] == ONE)


@pytest.fixture
async def client(deployment: Cluster) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        yield Client(deployment, http)


async def test_what_one_replica_computed_the_other_fetches(client: Client) -> None:
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


async def test_what_a_drained_replica_has_is_fetched(client: Client) -> None:
    first = await client.teach(4)
    await client.drain(ONE)
    try:
        second = await client.ask(4, TWO)
    finally:
        await client.drain(ONE, undo=True)
    assert second.text == first.text
    assert second.receipt["fetched"]["outcome"] == "fetched"
    assert second.receipt["fetched"]["source"] == ONE


async def test_clients_cannot_send_agents_anywhere(client: Client) -> None:
    """A hint of their own making is cut out."""
    first = await client.teach(1)
    hint = {"request": "x", "source": ONE, "url": "http://192.0.2.1:1", "blocks": 9, "deadline_ms": 60_000}
    params = {"prefix_gateway": hint, "do_remote_prefill": True}
    before = len((await client.get("/admin/fetches"))["fetches"])
    second = await client.ask(1, TWO, kv_transfer_params=params)
    assert second.text == first.text
    assert second.receipt["fetched"]["outcome"] == "fetched"
    assert len((await client.get("/admin/fetches"))["fetches"]) == before + 1


async def test_when_the_source_is_gone_the_answer_is_the_same(client: Client, deployment: Cluster) -> None:
    first = await client.teach(2)
    deployment.kill("agent-0")
    second = await client.ask(2, TWO)
    assert (second.text, second.cached) == (first.text, 0)
    if second.receipt["fetch"]:
        assert second.receipt["fetched"]["outcome"] == "failed"
    deployment.start_agent(0)
    await deployment.wait_ready(READY_S)
    # Its pool is empty, and filled again by what its engine computes.
    first = await client.teach(3)
    second = await client.ask(3, TWO)
    assert second.text == first.text
    assert second.receipt["fetched"]["outcome"] == "fetched"
