"""An operator drains a replica of a running deployment: what runs there ends in peace, and all else goes elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from agent_support import until
from prometheus_client.parser import text_string_to_metric_families

from gateway.demo.cluster import Cluster

NAME = "replica-1"


class Operator:
    """Somebody with both ports of the shared deployment at hand; leaves no replica drained."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.http = http

    async def drain(self, replica: str = NAME) -> httpx.Response:
        return await self.http.put(f"{self.cluster.admin_url}/admin/replicas/{replica}/drain")

    async def undrain(self, replica: str = NAME) -> httpx.Response:
        return await self.http.delete(f"{self.cluster.admin_url}/admin/replicas/{replica}/drain")

    async def replica(self) -> dict[str, Any]:
        found = (await self.http.get(f"{self.cluster.admin_url}/admin/replicas")).json()["replicas"]
        (told,) = [each for each in found if each["id"] == NAME]
        return dict(told)

    async def gauge(self) -> float:
        text = (await self.http.get(f"{self.cluster.admin_url}/metrics")).text
        (value,) = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "prefix_gateway_replica_draining" and sample.labels["replica"] == NAME
        ]
        return value

    async def ask(self, at: int, **headers: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": [at % 200 + 1] * 40, "max_tokens": 1}
        return await self.http.post(f"{self.cluster.url}/v1/completions", json=body, headers=headers)

    async def served_by(self, count: int) -> set[str]:
        return {(await self.ask(at)).headers["x-gateway-replica"] for at in range(count)}


@pytest.fixture
async def operator(cluster: Cluster) -> AsyncIterator[Operator]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        operator = Operator(cluster, http)
        try:
            yield operator
        finally:
            await operator.undrain()


async def test_a_drained_replica_ends_what_it_has_and_gets_nothing_new(operator: Operator) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    pinned = {"x-gateway-pin": NAME}
    url = f"{operator.cluster.url}/v1/completions"
    async with operator.http.stream("POST", url, json=body, headers=pinned) as running:
        assert running.headers["x-gateway-replica"] == NAME
        lines = running.aiter_lines()
        await anext(lines)
        answer = await operator.drain()
        assert answer.status_code == 200
        told = answer.json()
        assert (told["id"], told["draining"], told["running_sequences"]) == (NAME, True, 1)
        assert await operator.served_by(30) == {"replica-0", "replica-2"}
        refused = await operator.ask(0, **pinned)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_replica")
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    assert sum('"text"' in line for line in rest) > 100

    async def idle() -> bool:
        told = await operator.replica()
        return bool(told["running_sequences"] == 0 and told["engine_load"]["running"] == 0)

    await until(idle, "idle")
    told = await operator.replica()
    assert (told["draining"], told["engine_up"], told["reporting"]) == (True, True, True)
    assert told["held_blocks"] > 0, "what it holds is still known"
    assert await operator.gauge() == 1.0

    again = await operator.undrain()
    assert (again.status_code, again.json()["draining"]) == (200, False)
    assert await operator.gauge() == 0.0
    assert await operator.served_by(30) == {"replica-0", NAME, "replica-2"}
    assert (await operator.ask(0, **pinned)).headers["x-gateway-replica"] == NAME


async def test_draining_twice_is_no_error_and_nobody_is_drained_by_mistake(operator: Operator) -> None:
    for _ in range(2):
        assert (await operator.drain()).json()["draining"] is True
    for _ in range(2):
        assert (await operator.undrain()).json()["draining"] is False
    missing = await operator.drain("replica-9")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    url = f"{operator.cluster.admin_url}/admin/replicas/{NAME}/drain"
    assert (await operator.http.post(url)).status_code == 405, "a web page may send a POST, and nothing else"
    assert (await operator.replica())["draining"] is False
