"""What the gateway credits a replica with is what its engine holds: whole deployments, real processes.

The agents' half of each behaviour is in test_index_truth.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from statistics import fmean
from typing import Any

import httpx
import pytest
from cluster_support import READY_S, tiny_cluster

from gateway.demo.cluster import Cluster
from gateway.demo.questions import DOCUMENTS

SETTLE_S = 60.0
GONE_S = 10.0
"""From a kill -9 of an engine until nothing of it is credited, on a busy host; an idle one takes some tenths."""
BLOCK = 16


@pytest.fixture(scope="module")
def deployment() -> Iterator[Cluster]:
    with tiny_cluster(replicas=2, kv_tokens=4_096) as running:
        running.start_all()
        asyncio.run(running.wait_ready(READY_S))
        yield running


class Operator:
    """Asks, and looks at what gateway and engines say. Owns its connections."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.http = httpx.AsyncClient(trust_env=False, timeout=120)

    @staticmethod
    def body(document: int, question: str = "What is this about?", max_tokens: int = 4) -> dict[str, Any]:
        """A question about the head of a document: about 900 tokens of the tiny model."""
        return {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": DOCUMENTS[document].text[:1_800]},
                {"role": "user", "content": question},
            ],
            "max_tokens": max_tokens,
            "temperature": 0,
        }

    async def ask(self, document: int, *, pin: int | None = None, url: str = "", **body: Any) -> httpx.Response:
        """One whole answer, through the gateway or from the engine at `url`."""
        headers = {} if pin is None else {"x-gateway-pin": f"replica-{pin}"}
        response = await self.http.post(
            f"{url or self.cluster.url}/v1/chat/completions", json=self.body(document, **body), headers=headers
        )
        assert response.status_code == 200, response.text
        return response

    async def credited(self, document: int) -> list[int]:
        """Tokens of the document that the gateway believes each replica to hold; 0 for one that takes no requests."""
        response = await self.http.post(f"{self.cluster.admin_url}/admin/explain", json=self.body(document))
        if response.status_code == 503:
            return [0] * self.cluster.count
        found = {each["replica"]: each["cached_tokens"] for each in response.json()["placement"]["candidates"]}
        return [found.get(f"replica-{at}", 0) for at in range(self.cluster.count)]

    async def replicas(self) -> list[dict[str, Any]]:
        """The gateway's view, in order."""
        found: list[dict[str, Any]] = (await self.http.get(f"{self.cluster.admin_url}/admin/replicas")).json()[
            "replicas"
        ]
        return found

    async def answers(self, at: int) -> bool:
        """Whether an engine itself answers, and the gateway takes it for up and reporting."""
        try:
            await self.http.get(f"{self.cluster.engine_url(at)}/health")
        except httpx.HTTPError:
            return False
        view = (await self.replicas())[at]
        return bool(view["engine_up"] and view["reporting"])

    async def blocks(self, at: int) -> set[str]:
        """What an engine holds by its own table."""
        table = (await self.http.get(f"{self.cluster.engine_url(at)}/debug/blocks")).json()
        return {block["hash"] for block in table["blocks"]}

    async def exact(self) -> None:
        """Until gateway and engines count the same blocks, and the same bytes held twice."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                tables = [await self.blocks(at) for at in range(self.cluster.count)]
                view = await self.replicas()
                report = (await self.http.get(f"{self.cluster.admin_url}/admin/duplication")).json()
                shared = len(set.intersection(*tables)) * view[0]["block_bytes"]
                if [each["held_blocks"] for each in view] == list(map(len, tables)) and report[
                    "excess_bytes"
                ] == shared:
                    return
                await asyncio.sleep(0.05)

    async def until_credited(self, document: int, at: int, *, anything: bool) -> None:
        """Until the replica is, or is no more, credited with the document."""
        async with asyncio.timeout(SETTLE_S):
            while bool((await self.credited(document))[at]) is not anything:
                await asyncio.sleep(0.02)


@pytest.fixture
async def operator(deployment: Cluster) -> AsyncIterator[Operator]:
    """Both engines start a test empty, and the gateway knows."""
    made = Operator(deployment)
    try:
        for at in range(deployment.count):
            await made.http.post(f"{deployment.engine_url(at)}/reset_prefix_cache")
        await made.exact()
        yield made
    finally:
        await made.http.aclose()


async def test_engine_restart_credits_nothing_old_at_the_gateway(operator: Operator) -> None:
    cluster = operator.cluster
    await operator.ask(0, pin=0)
    await operator.ask(0, pin=1)
    await operator.until_credited(0, 0, anything=True)
    await operator.exact()
    other = (await operator.credited(0))[1]
    assert other > 500
    killed = time.monotonic()
    cluster.kill("engine-0")
    cluster.start_engine(0)
    await operator.until_credited(0, 0, anything=False)
    assert time.monotonic() - killed < GONE_S
    async with asyncio.timeout(READY_S):
        while not await operator.answers(0):
            assert await operator.credited(0) == [0, other], "once gone it stays gone, and the other keeps its own"
            await asyncio.sleep(0.05)
    await operator.ask(1, pin=0)
    await operator.until_credited(1, 0, anything=True)
    await operator.exact()
    assert await operator.credited(0) == [0, other]


async def test_silent_clear_is_noticed_at_the_gateway(operator: Operator) -> None:
    await operator.ask(0, pin=0)
    await operator.ask(1, pin=0)
    await operator.until_credited(1, 0, anything=True)
    epoch = (await operator.replicas())[0]["epoch"]
    await operator.http.post(f"{operator.cluster.engine_url(0)}/reset_prefix_cache")
    await operator.until_credited(0, 0, anything=False)
    assert await operator.blocks(0) == set()
    await operator.exact()
    assert (await operator.replicas())[0]["held_blocks"] == 0
    answer = await operator.ask(0, pin=0)
    assert answer.headers["x-gateway-predicted-cached-tokens"] == answer.headers["x-gateway-cached-tokens"] == "0"
    await operator.until_credited(0, 0, anything=True)
    assert epoch is not None


async def test_replicas_are_isolated_at_the_gateway(operator: Operator) -> None:
    """Both hold one document. What is then evicted or cleared on one changes nothing of the other's."""
    for at in (0, 1):
        await operator.ask(0, pin=at)
    await operator.exact()
    before = await operator.blocks(1)
    credited = (await operator.credited(0))[1]
    assert credited > 500
    for document in range(1, len(DOCUMENTS)):
        await operator.ask(document, pin=0)
    await operator.exact()
    assert not before <= await operator.blocks(0), "something of it was evicted on the first"
    assert await operator.blocks(1) == before
    assert (await operator.credited(0))[1] == credited
    await operator.http.post(f"{operator.cluster.engine_url(0)}/reset_prefix_cache")
    await operator.until_credited(0, 0, anything=False)
    await operator.exact()
    assert (await operator.credited(0))[1] == credited
    assert (await operator.replicas())[1]["held_blocks"] == len(before)


async def test_slow_gateway_never_blocks_an_engine_at_the_gateway(operator: Operator) -> None:
    """The gateway's process is stopped: engines and agents go on, and it catches up when it goes on too."""
    cluster = operator.cluster
    await operator.ask(0, pin=0)
    await operator.exact()
    process = cluster.pid("gateway")
    os.kill(process, signal.SIGSTOP)
    try:
        for document in range(len(DOCUMENTS)):
            for at in (0, 1):
                answer = await operator.ask(document, url=cluster.engine_url(at))
                assert answer.json()["usage"]["completion_tokens"] > 0
        async with asyncio.timeout(SETTLE_S):
            for at in (0, 1):
                while True:
                    health = (await operator.http.get(f"{cluster.agent_url(at)}/health")).json()
                    if health["blocks"] == len(await operator.blocks(at)) > 0 and health["status"] == "ok":
                        break
                    await asyncio.sleep(0.02)
    finally:
        os.kill(process, signal.SIGCONT)
    await operator.exact()
    async with asyncio.timeout(SETTLE_S):
        while not all(each["reporting"] and each["engine_up"] for each in await operator.replicas()):
            await asyncio.sleep(0.02)
    await operator.exact()


async def test_receipt_matches_the_engine_at_the_gateway(operator: Operator) -> None:
    """Several questions about documents that fit: what was predicted is what the engine then took from its cache."""
    errors, hits = [], 0
    for question in ("What is this about?", "Who wrote it?", "When was that, and where exactly?", "Why?"):
        for document in range(min(4, len(DOCUMENTS))):
            answer = await operator.ask(document, question=question)
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            receipt = await operator.http.get(
                f"{operator.cluster.admin_url}/admin/receipts/{answer.headers['x-request-id']}"
            )
            assert receipt.json()["cached_tokens"] == cached == int(answer.headers["x-gateway-cached-tokens"])
            predicted = receipt.json()["predicted_cached_tokens"]
            assert predicted == int(answer.headers["x-gateway-predicted-cached-tokens"])
            errors.append(abs(predicted - cached))
            hits += cached > 500
    assert fmean(errors) < BLOCK, errors
    assert hits >= len(errors) / 2
