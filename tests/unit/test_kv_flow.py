"""Two agents and their engines: blocks are saved on one, fetched by the other, and are the same bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest
from agent_support import (
    SEED,
    EngineStandIn,
    Publisher,
    chain_of,
    mirroring,
    removed,
    serving,
    stored,
    tokens_of,
    until,
)
from kv_support import BLOCK_BYTES, agent, key_of, keys_of, pair
from loopback_ports import free_port

from kvstore.engine_messages import Accepted, Nothing, Pending
from kvstore.identity import wire_block_hash
from kvstore.messages import FetchOutcome, Tier
from kvstore.transfer.base import Arrived, Plan, Result
from kvstore.transfer.loopback import Loopback, Network
from replica_agent.kv.fetch import Fetch


async def test_an_engine_loads_what_it_saved(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        keys = keys_of(*range(8))
        assert await engine.save(keys) == 8
        assert await engine.ask(engine.client.lookup, "r", [*keys, key_of(99)]) == 8
        answer = await engine.prepare("r", [*keys, key_of(99)])
        assert isinstance(answer, Accepted)
        assert (answer.blocks, answer.deadline_s > 1) == (8, True)
        assert await engine.load("r", [*keys, key_of(99)]) == 8
        (record,) = subject.records
        assert (record.outcome, record.own, record.moved, record.loaded) == (FetchOutcome.LOCAL, 8, 0, 8)
        await subject.quiet()


@pytest.mark.parametrize("transports", ["", "shm", "tcp"])
async def test_blocks_come_from_the_peer(tmp_path: Path, transports: str) -> None:
    network = None if transports else Network()
    flags = {"transports": transports} if transports else {}
    async with agent(tmp_path, network, **flags) as source, agent(tmp_path, network, **flags) as reader:
        await source.connect()
        await reader.connect()
        keys = keys_of(*range(20))
        await source.engine.save(keys)
        assert isinstance(await reader.engine.prepare("r", keys, source.hint(20)), Pending)
        assert await reader.engine.load("r", keys, source.hint(20)) == 20
        (record,) = reader.records
        assert (record.outcome, record.reason) == (FetchOutcome.FETCHED, "complete")
        assert (record.asked, record.own, record.moved, record.loaded, record.failed) == (20, 0, 20, 20, 0)
        assert (record.source, record.transport) == (
            source.replica.settings.replica_id,
            transports or "loopback",
        )
        steps = (record.decide_s, record.lease_s, record.move_s, record.verify_s, record.confirm_s, record.copy_s)
        assert min(steps) > 0
        assert record.total_s >= sum(steps[1:5])
        assert record.predicted_recompute_s > record.predicted_fetch_s + record.predicted_rest_s
        assert reader.kv.log.bytes_moved == 20 * BLOCK_BYTES
        # The next request finds them in its own agent's pool.
        assert await reader.engine.load("s", keys) == 20
        assert reader.records[-1].outcome is FetchOutcome.LOCAL
        await source.quiet()
        await reader.quiet()


async def test_an_engine_hears_where_its_blocks_come_before_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is waited for no longer than `SHOW_S`, where it does not ask."""
    events = []
    show, move = Fetch.show, Loopback.fetch

    def shown(self: Fetch) -> list[int]:
        events.append("shown")
        return show(self)

    async def moved(self: Loopback, plan: Plan, arrived: Arrived) -> Result:
        events.append("moved")
        return await move(self, plan, arrived)

    monkeypatch.setattr(Fetch, "show", shown)
    monkeypatch.setattr(Loopback, "fetch", moved)
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(keys_of(*range(8)))
        await reader.engine.prepare("unasked", keys_of(*range(4)), source.hint(4))
        await until(lambda: reader.pool.lookup(keys_of(*range(4))) == 4)
        assert events == ["moved"]
        monkeypatch.setattr("replica_agent.kv.fetch.SHOW_S", 60.0)
        assert await reader.engine.load("r", keys_of(*range(8)), source.hint(8)) == 8
        assert events[:3] == ["moved", "shown", "moved"]


async def test_a_request_with_a_long_id_is_fetched_like_any_other(tmp_path: Path) -> None:
    """A client may choose it; what a lease request has room for is cut."""
    async with pair(tmp_path, Network()) as (source, reader):
        keys = keys_of(*range(4))
        await source.engine.save(keys)
        hint = msgspec.structs.replace(source.hint(4), request="r" * 1_024)
        assert await reader.engine.load("r", keys, hint) == 4
        (record,) = reader.records
        assert (record.outcome, len(record.gateway_request)) == (FetchOutcome.FETCHED, 512)


async def test_what_the_reader_has_is_not_fetched(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        keys = keys_of(*range(10))
        await source.engine.save(keys)
        await reader.engine.save(keys[2:5], keys[1])
        # The engine itself holds the first two blocks; its pool the next three.
        assert await reader.engine.load("r", keys[2:], source.hint(10), cached=2) == 8
        (record,) = reader.records
        assert (record.asked, record.own, record.moved) == (8, 3, 5)
        await source.quiet()
        await reader.quiet()


async def test_everybody_who_wants_a_block_waits_for_one_fetch(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        keys = keys_of(*range(10))
        await source.engine.save(keys)
        engine = reader.engine
        network.faults.hold = asyncio.Event()
        for request in ("r", "s"):
            await engine.prepare(request, keys, source.hint(10))
        await engine.prepare("t", keys[4:6], cached=4)
        assert len(reader.kv.fetches) == 1
        # The one who began it goes; the others still want it.
        await engine.ask(engine.client.cancel, "r")
        network.faults.hold.set()
        assert await engine.load("s", keys, source.hint(10)) == 10
        assert await engine.load("t", keys[4:6], cached=4) == 2
        outcomes = [(record.outcome, record.reason) for record in reader.records]
        assert outcomes == [
            (FetchOutcome.CANCELLED, "cancelled"),
            (FetchOutcome.LOCAL, "joined"),
            (FetchOutcome.LOCAL, "joined"),
        ]
        assert reader.kv.log.bytes_moved == 10 * BLOCK_BYTES
        await source.quiet()
        await reader.quiet()


async def test_nothing_is_said_of_a_prompt_that_nobody_holds(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        assert await engine.prepare("r", keys_of(1)) == Nothing(reason="not_held")
        assert await engine.prepare("r", []) == Nothing(reason="no_blocks")
        assert await engine.poll("r") == Nothing(reason="unknown")
        assert subject.records == []


async def test_gateways_are_told_what_the_pool_holds_and_what_was_fetched(tmp_path: Path) -> None:
    page, events, network = EngineStandIn(), free_port(), Network()
    publisher = Publisher(events, None)
    try:
        async with serving(page.app) as engine_url:
            flags = {"engine": engine_url, "kv-events": f"tcp://127.0.0.1:{events}", "route-seed": str(SEED)}
            async with agent(tmp_path, network) as source, agent(tmp_path, network, **flags) as reader:
                await source.connect()
                await reader.connect()
                await until(lambda: reader.replica.subscriber.connected)
                keys = keys_of(*range(4))
                await source.engine.save(keys)
                async with mirroring(reader.url) as mirror:
                    assert await reader.engine.load("r", keys, source.hint(4)) == 4
                    await until(lambda: len(mirror.fetches) == 1)
                    assert mirror.fetches == reader.records
                    assert mirror.held[Tier.DRAM] == {}
                    # Now that it has loaded them, the engine says what they are.
                    names = [wire_block_hash(key) for key in keys]
                    publisher.publish(stored(names, [token for block in range(4) for token in tokens_of(block)]))
                    chain = set(chain_of(range(4)))
                    await until(lambda: set(mirror.held[Tier.DRAM]) == chain and mirror.hbm == chain)
                    publisher.publish(removed(*names))
                    await until(lambda: mirror.hbm == set())
                    assert set(mirror.held[Tier.DRAM]) == chain
                    await reader.engine.ask(reader.engine.client.clear)
                    await until(lambda: mirror.held[Tier.DRAM] == {})
                    await until(lambda: mirror.heartbeat is not None and mirror.heartbeat.fetch is not None)
    finally:
        publisher.close()


async def test_the_pages_show_it(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        keys = keys_of(*range(3))
        await source.engine.save(keys)
        await reader.engine.load("r", keys, source.hint(3))
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"{reader.url}/v1/fetches")).json()
            assert [record["outcome"] for record in page["fetches"]] == ["fetched"]
            assert page["totals"]["bytes_moved"] == 3 * BLOCK_BYTES
            kv = (await client.get(f"{reader.url}/health")).json()["kv"]
            assert (kv["engine_connected"], kv["transports"], kv["unavailable"]) == (True, ["loopback"], {})
            assert kv["pool"]["held"] == 3
            metrics = (await client.get(f"{reader.url}/metrics")).text
        assert 'replica_agent_fetches_total{outcome="fetched"} 1.0' in metrics
        assert f"replica_agent_fetch_bytes_total {3 * BLOCK_BYTES}.0" in metrics
        assert 'replica_agent_fetch_seconds_bucket{le="+Inf"} 1.0' in metrics
        assert 'kvstore_pool_slots{state="held"} 3.0' in metrics
        state = reader.kv.fetch_state
        assert state is not None
        assert (state.acts, state.slots, list(state.links)) == (True, 64, [source.replica.settings.replica_id])
        await reader.engine.close()
        await until(lambda: reader.kv.fetch_state is None)
        assert not reader.kv.engine_connected
