"""kill -9 of a real vLLM under load, and its next life at the same ports: no stale credit, and no request fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from agent_support import until
from cluster_support import READY_S
from vllm_deployment import beside
from vllm_models import model_directory
from vllm_server import BLOCK, VllmServer, start_servers

from gateway.demo.cluster import Cluster

pytestmark = pytest.mark.vllm

AT_ONCE = 4


@dataclass(frozen=True)
class Asked:
    """One answered request. Tokens."""

    conversation: int
    replica: str
    predicted: int
    cached: int


class Load:
    """Conversations, several at a time, each of its own opening; every answer is kept."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count()
        self.answers: list[Asked] = []
        self.failed: list[str] = []

    async def run(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(base_url=self._cluster.url, trust_env=False, timeout=120) as http:
            await asyncio.gather(*(self._worker(http) for _ in range(AT_ONCE)))

    async def _worker(self, http: httpx.AsyncClient) -> None:
        for number in self._numbers:
            messages = [{"role": "system", "content": f"You are assistant {number}. " + "Be brief. " * 150}]
            for turn in range(5):
                messages.append({"role": "user", "content": f"Question {turn}, " + "in some more words, " * 50})
                await self._ask(http, number, messages)

    async def _ask(self, http: httpx.AsyncClient, number: int, messages: list[dict[str, str]]) -> None:
        body = {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0}
        response = await http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            self.failed.append(f"{response.status_code} {response.text}")
            return
        predicted, cached = (
            int(response.headers[f"x-gateway-{name}"]) for name in ("predicted-cached-tokens", "cached-tokens")
        )
        self.answers.append(Asked(number, response.headers["x-gateway-replica"], predicted, cached))

    def of(self, replica: str, since: int = 0) -> list[Asked]:
        """Answers of one replica from the `since`-th of all on."""
        return [answer for answer in self.answers[since:] if answer.replica == replica]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[VllmServer]]:
    with contextlib.ExitStack() as stack:
        model = model_directory("tiny")
        pair = [stack.enter_context(VllmServer(model, kv_tokens=128 * 1024, core=core)) for core in ("0", "1")]
        start_servers(pair)
        yield pair


async def test_kill_and_restart_under_load(servers: list[VllmServer]) -> None:
    with beside(servers) as cluster:
        for at in range(len(servers)):
            cluster.start_agent(at)
        cluster.start_gateway()
        await cluster.wait_ready(READY_S)
        load = Load(cluster)
        running = asyncio.create_task(load.run())
        async with httpx.AsyncClient(base_url=cluster.admin_url, trust_env=False, timeout=30) as admin:

            async def first() -> dict[str, object]:
                found = (await admin.get("/admin/replicas")).json()["replicas"][0]
                assert isinstance(found, dict)
                return found

            async def forgotten() -> bool:
                return not (await first())["held_blocks"]

            async def back() -> bool:
                found = await first()
                return bool(found["engine_up"] and found["reporting"])

            await until(lambda: len(load.of("replica-0")) >= 15, "both serve")
            await asyncio.to_thread(servers[0].kill)
            killed = len(load.answers)
            await until(forgotten, "nothing of it is credited")
            await asyncio.to_thread(servers[0].start)
            await asyncio.to_thread(servers[0].wait_ready)
            await until(back, "it is back")
            returned = len(load.answers)
            await until(lambda: len(load.of("replica-0", returned)) >= 25, "it serves again")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not load.failed
    assert load.of("replica-1", killed), "the other went on"
    assert any(answer.cached for answer in load.of("replica-0", returned)), "what it computed since is credited"
    over = [answer for answer in load.answers if answer.predicted > answer.cached + BLOCK]
    assert not over, "stale credit"
    exact = [abs(answer.predicted - answer.cached) <= BLOCK for answer in load.answers]
    assert sum(exact) >= 0.98 * len(exact)
