"""kill -9 of each part under load: clean answers meanwhile, and an exact index once the part is back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster_support import READY_S, tiny_cluster

from gateway.demo.cluster import Cluster
from gateway.demo.questions import DOCUMENTS

CLIENTS = 6
SETTLE_S = 60.0
GONE_S = 10.0
"""From a kill until nothing of the engine is credited, on a busy host; an idle one takes some tenths."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Cluster]:
    with tiny_cluster(kv_tokens=12_000) as running:
        running.start_all()
        asyncio.run(running.wait_ready(READY_S))
        yield running


class Load:
    """Clients that ask about the demo's documents until stopped, and what came of every request."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rng = random.Random(3)
        self._stop = asyncio.Event()
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=120) as http:
            await asyncio.gather(*(self._client(http) for _ in range(CLIENTS)))

    def stop(self) -> None:
        self._stop.set()

    async def answered(self, more: int) -> None:
        """Until this many more requests were answered with a 200."""
        target = self.outcomes["ok"] + more
        async with asyncio.timeout(SETTLE_S * 2):
            while self.outcomes["ok"] < target:
                await asyncio.sleep(0.02)

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            document = self._rng.choice(DOCUMENTS)
            body: dict[str, Any] = {
                "model": "tiny",
                "messages": [
                    {"role": "system", "content": document.text[:3000]},
                    {"role": "user", "content": self._rng.choice(document.questions)},
                ],
                "max_tokens": 12,
                "stream": self._rng.random() < 0.5,
            }
            try:
                response = await http.post("/v1/chat/completions", json=body)
            except httpx.HTTPError as error:
                self.outcomes[type(error).__name__] += 1
                await asyncio.sleep(0.05)
                continue
            self._judge(response, streamed=body["stream"])

    def _judge(self, response: httpx.Response, *, streamed: bool) -> None:
        if response.status_code >= 500:
            error = response.json()["error"]
            self.outcomes[str(error["code"])] += 1
            if not error["message"] or not response.headers["x-request-id"]:
                self.wrong.append(response.text)
        elif response.status_code != 200:
            self.wrong.append(f"{response.status_code} {response.text}")
        elif not streamed:
            self.outcomes["ok"] += 1
            if not response.json()["choices"]:
                self.wrong.append(response.text)
        else:
            events = [part.removeprefix(b"data: ") for part in response.content.split(b"\n\n") if part]
            if events[-1] == b"[DONE]":
                self.outcomes["ok"] += 1
            elif "error" in json.loads(events[-1]):
                self.outcomes["told mid-stream"] += 1
            else:
                self.wrong.append(f"silently truncated: {response.text[-200:]}")


async def replicas(http: httpx.AsyncClient, cluster: Cluster) -> dict[str, dict[str, Any]]:
    found = (await http.get(f"{cluster.admin_url}/admin/replicas")).json()["replicas"]
    return {each["id"]: each for each in found}


async def index_is_exact(cluster: Cluster) -> None:
    """The gateway holds, per replica, exactly as many blocks as the engine's own table, and the same excess."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http, asyncio.timeout(SETTLE_S):
        while True:
            tables = [(await http.get(f"{cluster.engine_url(at)}/debug/blocks")).json() for at in range(cluster.count)]
            hashes = [{block["hash"] for block in table["blocks"]} for table in tables]
            known = await replicas(http, cluster)
            counts = [known[f"replica-{at}"]["held_blocks"] for at in range(cluster.count)]
            copies = Counter(block for table in hashes for block in table)
            excess = sum(count - 1 for count in copies.values()) * tables[0]["block_bytes"]
            ledger = (await http.get(f"{cluster.admin_url}/admin/duplication")).json()["excess_bytes"]
            if counts == [len(table) for table in hashes] and excess == ledger:
                return
            await asyncio.sleep(0.1)


def assert_clean(load: Load) -> None:
    assert not load.wrong, load.wrong[:3]
    assert load.outcomes["ok"] > 0


async def test_an_engine_is_killed_and_comes_back(deployment: Cluster) -> None:
    load = Load(deployment.url)
    running = asyncio.create_task(load.run())
    await load.answered(20)
    killed = time.monotonic()
    deployment.kill("engine-1")
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(SETTLE_S):
        while (dead := (await replicas(http, deployment))["replica-1"])["engine_up"] or dead["held_blocks"]:
            await asyncio.sleep(0.02)
    assert time.monotonic() - killed < GONE_S
    await load.answered(20)
    deployment.start_engine(1)
    await deployment.wait_ready(READY_S)
    await load.answered(20)
    load.stop()
    await running
    assert_clean(load)
    assert set(load.outcomes) <= {"ok", "told mid-stream", "upstream_reset", "upstream_unreachable"}, load.outcomes
    await index_is_exact(deployment)


async def test_an_agent_is_killed_and_comes_back(deployment: Cluster) -> None:
    load = Load(deployment.url)
    running = asyncio.create_task(load.run())
    await load.answered(20)
    deployment.kill("agent-1")
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(SETTLE_S):
        while (lost := (await replicas(http, deployment))["replica-1"])["reporting"]:
            await asyncio.sleep(0.02)
        assert lost["agent_error"]
        assert lost["routed_by"] == "learned"
        assert lost["held_blocks"] == 0
        assert lost["engine_up"]
    await load.answered(40)
    deployment.start_agent(1)
    await deployment.wait_ready(READY_S)
    await load.answered(20)
    load.stop()
    await running
    assert_clean(load)
    assert set(load.outcomes) == {"ok"}, load.outcomes
    await index_is_exact(deployment)


async def test_the_gateway_is_killed_and_comes_back(deployment: Cluster) -> None:
    load = Load(deployment.url)
    running = asyncio.create_task(load.run())
    await load.answered(20)
    deployment.kill("gateway")
    deployment.start_gateway()
    await deployment.wait_ready(READY_S)
    await load.answered(20)
    load.stop()
    await running
    assert_clean(load)
    lost_connections = {"ReadError", "RemoteProtocolError", "ConnectError"}
    assert set(load.outcomes) <= {"ok", "no_replica"} | lost_connections, load.outcomes
    await index_is_exact(deployment)
