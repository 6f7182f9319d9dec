"""Bytes that are not those that were asked for are never served, and what is valid of a fetch is kept."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from agent_support import until
from kv_faults import (
    AHEAD,
    PITCH,
    POOL,
    SIZE,
    TCP,
    Engine,
    Said,
    always_fetch,
    counted,
    engine,
    leaving_nothing,
    recorded,
    tiny,
    tokens,
)
from kv_link import HOST, Link
from kv_support import Agent, agent
from loopback_ports import free_port

from kvstore.messages import FetchOutcome
from kvstore.slot import TRAILER_BYTES, verify
from kvstore.transfer.loopback import Network

BLOCKS = 12
PROMPT = tokens(11, BLOCKS * SIZE + 5)


@pytest.fixture(autouse=True)
async def _surroundings(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    always_fetch(monkeypatch)
    async with leaving_nothing():
        yield


class Pair(NamedTuple):
    """Two replicas: what `one` computes `source` lends, and `two` answers with what `reader` fetched."""

    source: Agent
    one: Engine
    reader: Agent
    two: Engine

    async def quiet(self) -> None:
        await self.source.quiet()
        await self.reader.quiet()

    def keys(self) -> list[bytes]:
        """ContentKeys that the source holds, oldest first."""
        return list(self.source.pool._held)


@asynccontextmanager
async def pair(
    directory: Path,
    network: Network | None = None,
    *,
    flags: dict[str, str] | None = None,
    reading: dict[str, Any] | None = None,
    **two: Any,
) -> AsyncIterator[Pair]:
    """`flags` are the source's, `reading` the reader's; `two` are changes of the second engine's settings."""
    plain = POOL if network else TCP
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(agent(directory, network, **(plain | (flags or {}))))
        reader = await stack.enter_async_context(agent(directory, network, **plain, **(reading or {})))
        one = await stack.enter_async_context(engine(source))
        yield Pair(source, one, reader, await stack.enter_async_context(engine(reader, **two)))


async def test_expired_lease_fails_the_reader(tmp_path: Path) -> None:
    """Every byte has come, and is right; but its owner does not say that it stayed so."""
    flags = {"lease-ttl": "0.5"}
    async with agent(tmp_path, **TCP) as source, agent(tmp_path, **TCP, **flags) as reader:
        async with engine(source) as one, engine(reader) as two:
            await one.teach(PROMPT)
            expected = await one.computed(PROMPT)
            source.gate.shut("/release")
            request = asyncio.create_task(two.complete(PROMPT, source.hint(BLOCKS)))
            leases = source.kv.keeper.leases
            assert leases is not None
            await until(lambda: leases.expired == 1, "expired")
            assert not request.done()
            assert reader.pool.counts.reserved == BLOCKS
            source.gate.open.set()
            assert await request == (expected, 0)
            record = await recorded(reader)
            assert (record.outcome, record.reason, record.moved) == (FetchOutcome.FAILED, "lease_not_held", 0)
            assert await counted(reader.url, 'kvstore_wrong_bytes_total{kind="lease"}') == 1
            assert await counted(source.url, "kvstore_lease_expired_total") == 1
            await source.quiet()
            await reader.quiet()


async def test_late_write_is_quarantined(tmp_path: Path) -> None:
    """Bytes that land long after the deadline, when their slots would have been reused: no engine block and no slot
    in use is hit. The first blocks, which were in time, are used."""
    network = Network()
    ahead = [0.0]
    reading = {"hold_s": 60.0, "clock": lambda: time.monotonic() + ahead[0]}
    async with pair(tmp_path, network, reading=reading) as (source, one, reader, two):
        await one.teach(PROMPT)
        expected = await one.computed(PROMPT)
        network.faults.hold, network.faults.hold_at, network.faults.late = asyncio.Event(), 5, True
        said = await two.complete(PROMPT, source.hint(BLOCKS, deadline_ms=3_000))
        assert said == (expected, 5 * SIZE)
        record = await recorded(reader)
        assert (record.outcome, record.reason, record.loaded) == (FetchOutcome.PARTIAL, "deadline", 5)
        assert reader.pool.counts.quarantined == BLOCKS - 5
        # As many blocks are saved as the pool has room for, and then what was late lands.
        others = [tokens(seed, 100 * SIZE + 1) for seed in range(20, 26)]
        for prompt in others:
            await two.complete(prompt, max_tokens=1)
        assert network.land() == BLOCKS - 5
        for key, slot in reader.pool._held.items():
            verify(reader.pool.view(slot), reader.pool.block_bytes, key, reader.pool._slots[slot].generation)
        # What the engine still holds, and what it loads again, is what was computed.
        cached = 0
        for prompt in (PROMPT, others[-2], others[-1]):
            again = await two.complete(prompt)
            assert again.text == await one.computed(prompt)
            cached += again.cached
        assert cached >= 200 * SIZE
        assert reader.pool.counts.quarantined == BLOCKS - 5
        ahead[0] = 61.0
        await source.quiet()
        await reader.quiet()


def flipped_bit(pair: Pair, key: bytes) -> None:
    pair.source.pool.view(pair.source.slot_of(key))[1_000] ^= 4


def wrong_generation(pair: Pair, key: bytes) -> None:
    """The slot was reused since, for the same block."""
    slot = pair.source.pool.view(pair.source.slot_of(key))
    slot[len(slot) - TRAILER_BYTES + 40] ^= 1


def wrong_key(pair: Pair, key: bytes) -> None:
    """The bytes, whole and sealed, of a block whose RouteKey collides with this one's."""
    slots = pair.source.pool
    slots.view(pair.source.slot_of(key))[:] = slots.view(pair.source.slot_of(pair.keys()[-1]))


def no_trailer(pair: Pair, key: bytes) -> None:
    slot = pair.source.pool.view(pair.source.slot_of(key))
    slot[len(slot) - TRAILER_BYTES :] = bytes(TRAILER_BYTES)


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [(flipped_bit, "checksum"), (wrong_generation, "generation"), (wrong_key, "key"), (no_trailer, "trailer")],
)
async def test_wrong_bytes_are_never_served(tmp_path: Path, spoil: Callable[[Pair, bytes], None], kind: str) -> None:
    async with pair(tmp_path) as both:
        await both.one.teach(PROMPT)
        expected = await both.one.computed(PROMPT)
        await both.one.teach(tokens(12, 3 * SIZE))
        spoil(both, both.keys()[4])
        said = await both.two.complete(PROMPT, both.source.hint(BLOCKS))
        assert said == (expected, 4 * SIZE), "the four blocks before it are used"
        record = await recorded(both.reader)
        assert (record.outcome, record.reason, record.loaded) == (FetchOutcome.PARTIAL, "wrong_bytes", 4)
        assert await counted(both.reader.url, f'kvstore_wrong_bytes_total{{kind="{kind}"}}') == 1
        assert await counted(both.reader.url, "kvstore_wrong_bytes_total") == 1
        await both.quiet()


async def test_wrong_bytes_are_never_served_to_a_prompt_whose_route_keys_collide(tmp_path: Path) -> None:
    """The gateway takes one prompt for another, and says that the source holds it. It holds the other."""
    async with pair(tmp_path) as both:
        await both.one.teach(tokens(13, len(PROMPT)))
        assert await both.two.complete(PROMPT, both.source.hint(BLOCKS)) == (await both.one.computed(PROMPT), 0)
        record = await recorded(both.reader)
        assert (record.outcome, record.reason, record.moved) == (FetchOutcome.MISSED, "not_held", 0)
        assert await counted(both.reader.url, 'replica_agent_fetches_total{outcome="missed"}') == 1
        await both.quiet()


async def test_wrong_bytes_are_never_served_from_another_tenant(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        before = await both.one.metric("reference_engine:kv_saved_blocks_total")
        expected = (await both.one.complete(PROMPT, cache_salt="tenant 1")).text

        async def saved() -> bool:
            return await both.one.metric("reference_engine:kv_saved_blocks_total") >= before + BLOCKS

        await until(saved)
        for fields in ({"cache_salt": "tenant 2"}, {}):
            assert await both.two.complete(PROMPT, both.source.hint(BLOCKS), **fields) == (expected, 0)
        said = await both.two.complete(PROMPT, both.source.hint(BLOCKS), cache_salt="tenant 1")
        assert said == (expected, BLOCKS * SIZE)
        outcomes = [record.outcome for record in both.reader.records]
        assert outcomes == [FetchOutcome.MISSED, FetchOutcome.MISSED, FetchOutcome.FETCHED]
        await both.quiet()


def other_rope(directory: Path) -> dict[str, Any]:
    """The same weights, turned by other angles."""
    model = directory / "other"
    shutil.copytree(tiny(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 500_000.0}))
    return {"model": str(model)}


def other_dtype(directory: Path) -> dict[str, Any]:
    return {"dtype": "bfloat16"}


def other_block(directory: Path) -> dict[str, Any]:
    return {"block_size": 32}


@pytest.mark.parametrize(
    ("other", "named"),
    [(other_rope, "rope: "), (other_dtype, "dtype: 'float32' here, 'bfloat16' there"), (other_block, "block_size: 16")],
)
async def test_wrong_bytes_are_never_served_between_engines_that_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: Callable[[Path], dict[str, Any]], named: str
) -> None:
    """Refused at the lease, naming the field; computed instead, and the peer is not asked again for a while."""
    caplog.set_level("INFO", "replica_agent.kv")
    async with pair(tmp_path, **other(tmp_path)) as both:
        await both.one.teach(PROMPT)
        expected = await both.two.computed(PROMPT)
        for _ in range(2):
            assert await both.two.complete(PROMPT, both.source.hint(BLOCKS), cache_salt=None) == (expected, 0)
            await both.two.reset()
            assert both.reader.pool.counts.held == 0
        assert {(record.outcome, record.reason) for record in both.reader.records} == {
            (FetchOutcome.REFUSED, "namespace")
        }
        assert both.source.gate.seen.count("/v1/leases") == 1
        assert named in caplog.text
        assert await counted(both.reader.url, 'replica_agent_fetches_total{outcome="refused"}') == 2
        await both.quiet()


async def test_partial_fetch_keeps_the_valid_prefix(tmp_path: Path) -> None:
    """The connection breaks in the 41st of 64 blocks: 40 are used, 24 computed."""
    prompt = tokens(14, 64 * SIZE + 5)
    port = free_port()
    async with Link(port) as data:
        flags = {"data-port": str(port), "data-advertise": f"{HOST}:{data.port}"}
        async with pair(tmp_path, flags=flags) as both:
            await both.one.teach(prompt)
            expected = await both.one.computed(prompt)
            data.stop_at = AHEAD + 40 * PITCH + PITCH // 2
            request = asyncio.create_task(both.two.complete(prompt, both.source.hint(64)))
            await asyncio.wait_for(data.stopped.wait(), 15)
            data.cut()
            data.resume()
            assert await request == Said(expected, 40 * SIZE)
            record = await recorded(both.reader)
            assert (record.outcome, record.reason) == (FetchOutcome.PARTIAL, "broken")
            assert (record.asked, record.moved, record.loaded, record.failed) == (64, 40, 40, 0)
            assert await both.two.metric("reference_engine:kv_loaded_blocks_total") == 40
            assert await both.two.metric("vllm:prefix_cache_hits_total") == 40 * SIZE
            await both.quiet()
            # The other 24 can be had from the same source, as soon as they are wanted again.
            await both.two.reset()
            assert both.reader.pool.counts.held == 0
            assert await both.two.complete(prompt, both.source.hint(64)) == Said(expected, 64 * SIZE)
            await both.quiet()
