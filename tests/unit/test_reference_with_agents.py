"""Reference engines beside real agents: what one has computed, the other loads, and answers the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kv_support import Agent, agent
from reference_support import client, complete, metric, saved, tokens, until

from kvstore.messages import FetchOutcome
from replica_agent.reference.runtime import Opened

SIZE = 16
POOL = {"pool-bytes": str(16 * 1024 * 1024), "transports": "shm,tcp"}


@pytest.fixture(autouse=True)
def always_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes its few tokens about as fast as they are fetched."""
    for question in ("worth_copying", "worth_fetching"):
        monkeypatch.setattr(f"replica_agent.kv.decision.Estimates.{question}", lambda *_: True)
    # Four of these share one busy process: how long a decision takes here is nothing to go by.
    monkeypatch.setattr("replica_agent.reference.connector.DECISION_S", 15.0)


def beside(subject: Agent, **changes: Any) -> Any:
    """A float32 engine of 24 blocks beside an agent."""
    socket = str(subject.replica.settings.kv_socket)
    return client(**({"kv_socket": socket, "kv_tokens": 24 * SIZE, "dtype": "float32"} | changes))


async def ready(subject: Agent, opened: Opened) -> None:
    connector = opened.service.engine._connector
    assert connector is not None

    async def check() -> bool:
        return connector.connected and bool(subject.kv.keeper.transports)

    await until(check)


def hint(source: Agent, blocks: int, **more: Any) -> dict[str, Any]:
    told = source.hint(blocks, **more)
    return {"prefix_gateway": {name: getattr(told, name) for name in told.__struct_fields__}}


async def test_an_engine_reloads_from_its_agent_what_it_evicted(tmp_path: Path) -> None:
    async with agent(tmp_path, **POOL) as own, beside(own) as (http, opened):
        await ready(own, opened)
        answers = {}
        for seed in range(4):
            answers[seed] = await complete(http, tokens(seed))
            # The next prompt needs the blocks of this one, and would not wait for the saver.
            await saved(http, 12 * (seed + 1))
        for seed in (0, 3, 1, 0):
            text, cached = await complete(http, tokens(seed))
            assert (text, cached) == (answers[seed][0], 192)
        assert await metric(http, "reference_engine:kv_loaded_blocks_total") >= 24
        assert await metric(http, "reference_engine:kv_failed_load_blocks_total") == 0
        await own.quiet()
        assert {record.outcome for record in own.records} == {FetchOutcome.LOCAL}
        await asyncio.wrap_future(opened.service.engine.call(opened.service.engine.scheduler.check))


async def test_an_engine_fetches_through_the_agents_what_another_computed(tmp_path: Path) -> None:
    async with agent(tmp_path, **POOL) as a, agent(tmp_path, **POOL) as b:
        async with beside(a) as (one, first), beside(b) as (two, second):
            await ready(a, first)
            await ready(b, second)
            text, _ = await complete(one, tokens(1))
            await saved(one, 12)
            prompt = tokens(1) + tokens(5, 40)
            expected, _ = await complete(one, prompt)
            got = await complete(two, prompt, kv_transfer_params=hint(a, 12))
            assert got == (expected, 192), b.records
            # Without a hint: the blocks are the second engine's and its agent's own now.
            assert await complete(two, tokens(1)) == (text, 192)
            await a.quiet()
            await b.quiet()
            record = b.records[0]
            assert (record.outcome, record.moved, record.loaded) == (FetchOutcome.FETCHED, 12, 12)
            assert record.request.endswith("-0")
            assert await metric(two, "vllm:prefix_cache_hits_total") == 192 + 192


async def test_a_reset_empties_the_agents_pool_too(tmp_path: Path) -> None:
    async with agent(tmp_path, **POOL) as own, beside(own) as (http, opened):
        await ready(own, opened)
        await complete(http, tokens(1))
        await saved(http, 12)
        await http.post("/reset_prefix_cache")

        async def emptied() -> bool:
            return own.pool.counts.held == 0

        await until(emptied)
        assert (await complete(http, tokens(1)))[1] == 0


async def test_many_at_once_while_clients_leave_and_the_cache_is_reset(tmp_path: Path) -> None:
    """Everybody who stays is answered as if alone, and nothing is left held anywhere."""
    async with agent(tmp_path, **POOL) as a, agent(tmp_path, **POOL) as b:
        async with beside(a) as (one, first), beside(b, kv_tokens=40 * SIZE) as (two, second):
            await ready(a, first)
            await ready(b, second)
            prompts = [tokens(seed % 4) + tokens(seed, 30) for seed in range(12)]
            expected = [await complete(one, prompt) for prompt in prompts]
            await saved(one, 12)

            async def ask(index: int) -> None:
                fields = {"kv_transfer_params": hint(a, 12, request=f"g{index}")}
                assert (await complete(two, prompts[index], **fields))[0] == expected[index][0]

            for turn in range(3):
                tasks = [asyncio.create_task(ask(index)) for index in range(12)]
                leaving = [tasks.pop(turn * 2), tasks.pop(turn + 4)]
                await asyncio.sleep(0)
                for task in leaving:
                    task.cancel()
                if turn == 1:
                    await two.post("/reset_prefix_cache")
                await asyncio.gather(*tasks)
                await asyncio.gather(*leaving, return_exceptions=True)
            await asyncio.wrap_future(second.service.engine.call(second.service.engine.scheduler.check))
            await a.quiet()
            await b.quiet()
            assert await metric(two, "reference_engine:kv_loaded_blocks_total") > 0
