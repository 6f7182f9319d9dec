"""A full pool: what cannot be saved is not, and nobody who reads notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_support import until
from kv_faults import PITCH, POOL, SIZE, always_fetch, engine, leaving_nothing, tokens
from kv_support import agent, keys_of

from kvstore.engine_messages import Accepted, Ready
from kvstore.slot import verify
from kvstore.transfer.loopback import Network

SLOTS = 32
FULL = {"pool-bytes": str(SLOTS * 8_192)}
"""Of the small blocks that `kv_support` writes."""


@pytest.fixture(autouse=True)
async def _surroundings(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    always_fetch(monkeypatch)
    async with leaving_nothing():
        yield


async def test_full_tier_sheds_stores_and_evicts_nothing_that_is_read(tmp_path: Path) -> None:
    """Eight blocks are being read by the engine and eight by a peer: sixteen can be saved, whatever is offered."""
    network = Network()
    async with agent(tmp_path, network, **FULL) as subject, agent(tmp_path, network, **FULL) as peer:
        engine = await subject.connect()
        await peer.connect()
        mine, lent = keys_of(*range(8)), keys_of(*range(8, 16))
        await engine.save(mine)
        await engine.save(lent)
        assert isinstance(await engine.prepare("mine", mine), Accepted)
        assert isinstance(await engine.poll("mine"), Ready)
        network.faults.hold = asyncio.Event()
        await peer.engine.prepare("lent", lent, subject.hint(8))
        await until(lambda: subject.pool.counts.pinned == 16, "lent")
        for start in range(100, 400, 30):
            assert await engine.save(keys_of(*range(start, start + 30))) == SLOTS - 16
            assert subject.pool.counts.held == SLOTS
            assert (subject.pool.lookup(mine), subject.pool.lookup(lent)) == (8, 8)
        for key in (*mine, *lent):
            (held,) = subject.pool.pin([key])
            verify(subject.pool.view(held.slot), subject.pool.block_bytes, key, held.generation)
            subject.pool.unpin([held])
        network.faults.hold.set()
        assert await peer.engine.load("lent", lent, subject.hint(8)) == 8
        assert await engine.load("mine", mine) == 8
        await subject.quiet()
        await peer.quiet()


async def test_full_tier_sheds_stores_before_a_load_waits(tmp_path: Path) -> None:
    """Every slot is reserved or read: a load of what is there is answered at once, and a store with "no"."""
    async with agent(tmp_path, Network(), **FULL) as subject:
        engine = await subject.connect()
        mine = keys_of(*range(10))
        await engine.save(mine)
        await engine.prepare("first", mine)
        reserved = await engine.ask(engine.client.reserve, keys_of(*range(50, 72)), b"")
        assert None not in reserved
        assert subject.pool.counts.free == 0
        assert await engine.ask(engine.client.reserve, keys_of(99), b"") == [None]
        # No word of "pending" or "loading" in between.
        assert isinstance(await engine.prepare("second", mine), Accepted)
        answer = await engine.poll("second")
        assert isinstance(answer, Ready) and len(answer.slots) == 10
        for request in ("first", "second"):
            await engine.ask(engine.client.cancel, request)
        pairs = [(key, place) for key, place in zip(keys_of(*range(50, 72)), reserved, strict=True) if place]
        await engine.commit(pairs, written=False)
        await subject.quiet()


async def test_full_tier_evicts_tails_before_heads(tmp_path: Path) -> None:
    """Of two prompts the older one loses its last blocks, one for each that is saved, and its first one last."""
    async with agent(tmp_path, Network(), **FULL) as subject:
        engine = await subject.connect()
        old, young = keys_of(*range(20)), keys_of(*range(20, 32))
        await engine.save(old)
        await engine.save(young)
        for saved, number in enumerate(range(100, 120), 1):
            assert await engine.save(keys_of(number)) == 1
            assert subject.pool.lookup(old) == 20 - saved
            assert subject.pool.lookup(young) == 12
        await subject.quiet()


async def test_full_tier_sheds_stores_of_real_engines(tmp_path: Path) -> None:
    """Pools of 40 blocks between engines of 80: most is evicted or shed, what is fetched is right, nobody waits."""
    flags = POOL | {"transports": "shm", "pool-bytes": str(40 * PITCH)}
    async with agent(tmp_path, **flags) as source, agent(tmp_path, **flags) as reader:
        async with engine(source) as one, engine(reader, kv_tokens=80 * SIZE) as two, engine() as alone:
            prompts = [tokens(70 + seed, 30 * SIZE + 3) for seed in range(6)]
            for turn in range(2):
                for group in (prompts[:3], prompts[3:]):
                    await asyncio.gather(*(one.complete(prompt, max_tokens=1) for prompt in group))
                    said = await asyncio.gather(*(two.complete(prompt, source.hint(30)) for prompt in group))
                    for prompt, each in zip(group, said, strict=True):
                        assert each.text == (await alone.complete(prompt)).text, turn
            loaded = await two.metric("reference_engine:kv_loaded_blocks_total")
            assert loaded == sum(record.loaded for record in reader.records) > 0
            assert not sum(reader.kv.wrong_bytes.values())
            # Evicted at the source, no room to lend or to take, or evicted in the engine while it was under way.
            reasons = {record.reason for record in reader.records}
            assert reasons <= {"complete", "not_held", "busy", "no_room", "joined", "not_copied"}
            await until(lambda: source.pool.counts.free == 0, "full")
            await source.quiet()
            await reader.quiet()
