"""Data-parallel ranks of one real vLLM: each is a replica of its own, with its own agent and its own blocks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from agent_support import agent_running, mirroring, until
from vllm_deployment import serving
from vllm_engine import Engine, agent_settings, held_tokens, keys_of, prompt_of
from vllm_models import model_directory
from vllm_server import BLOCK, VllmServer

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    with VllmServer(model_directory("tiny"), kv_tokens=32 * BLOCK, ranks=2, core="0|1", dev_mode=True) as running:
        running.start()
        running.wait_ready()
        yield running


async def test_blocks_of_a_rank_are_credited_to_that_rank(server: VllmServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(server))
        agents, mirrors = [], []
        for rank in range(2):
            replica, url = await stack.enter_async_context(agent_running(agent_settings(server, rank=rank)))
            agents.append(replica)
            mirrors.append(await stack.enter_async_context(mirroring(url)))
        for replica in agents:
            await until(lambda replica=replica: replica.engine_state().up and replica.subscriber.connected)
        for number in range(24):
            rank = number % 2
            prompt = prompt_of(rank, number // 2 % 6, 10 + rank, extra=1)
            foretold = held_tokens(mirrors[rank], prompt)
            assert await engine.compute(prompt, mirrors[rank], rank=rank) == foretold, number
            for replica in agents:
                replica.check()
        assert mirrors[0].hbm.isdisjoint(mirrors[1].hbm), "both ranks began with blocks of their own"
        shared = prompt_of(77, 78, extra=1)
        assert await engine.compute(shared, mirrors[1], rank=1) == 0
        assert not mirrors[0].hbm & set(keys_of(shared))
        assert await engine.compute(shared, mirrors[0], rank=0) == 0
        assert [replica.subscriber.counts.other_rank for replica in agents] == [0, 0]
        # Both ranks are told to forget at once, and neither says so before its next request.
        assert await engine.reset()
        await until(lambda: not mirrors[0].hbm and not mirrors[1].hbm, "no block is credited")
        assert await engine.compute(shared, mirrors[1], rank=1) == 0
        await until(lambda: agents[1].events["cleared"] == 1)
        assert agents[0].events["cleared"] == 0


async def test_the_gateway_sends_each_request_to_its_rank(server: VllmServer, tmp_path: Path) -> None:
    """Two replicas behind one address: a conversation stays with the rank that has it, as predicted."""
    async with contextlib.AsyncExitStack() as stack:
        replicas = []
        for rank in range(2):
            settings = agent_settings(server, rank=rank, replica_id=f"r{rank}", route_seed="0")
            _, agent = await stack.enter_async_context(agent_running(settings))
            replicas.append({"id": f"r{rank}", "engine": server.url, "dp_rank": rank, "agent": agent})
        config = tmp_path / "gateway.yaml"
        config.write_text(json.dumps({"replicas": replicas}))
        url, admin = await stack.enter_async_context(serving("--config", str(config)))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=60))

        async def exact() -> bool:
            found = (await http.get(f"{admin}/admin/replicas")).json()
            reporting = all(replica["reporting"] for replica in found["replicas"])
            return reporting and found["identity"].get("tiny", {}).get("mode") == "exact"

        await until(exact, "both ranks report")
        homes = set()
        for number in range(8):
            messages = [{"role": "system", "content": f"You are assistant {number}. " + "Be brief. " * 150}]
            went = set()
            for turn in range(3):
                messages.append({"role": "user", "content": f"Question {turn}, " + "in some more words, " * 60})
                body = {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0}
                response = await http.post(f"{url}/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                predicted = int(response.headers["x-gateway-predicted-cached-tokens"])
                cached = int(response.headers["x-gateway-cached-tokens"])
                assert predicted == cached, (number, turn)
                assert bool(cached) == bool(turn)
                went.add(response.headers["x-gateway-replica"])
            assert len(went) == 1
            homes |= went
        assert homes == {"r0", "r1"}


async def test_an_agent_of_the_wrong_rank_credits_nothing_and_says_why(server: VllmServer) -> None:
    """Told to follow rank 0, at the port where rank 1 publishes."""
    settings = msgspec.structs.replace(agent_settings(server, rank=1), dp_rank=0)
    async with agent_running(settings) as (replica, url), mirroring(url) as mirror, Engine(server) as engine:
        await until(lambda: replica.engine_state().up and replica.subscriber.connected)
        await engine.complete(prompt_of(91, 92, extra=1), rank=1)
        await until(lambda: replica.subscriber.counts.other_rank > 0)
        assert not mirror.hbm
        assert any("--dp-rank" in problem.fix for problem in replica.problems()), replica.problems()
