"""Three agents and their engines, doing anything in any order while anything goes wrong between them.

The twin is the simplest there is: a block of a name has the bytes of that name. Whatever an engine is given, and
whatever a pool says that it holds, at any time, must be that; and once all is over nothing may be held for anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import pytest
from agent_support import until
from kv_support import BLOCK_BYTES, Agent, Engine, agent, key_of, payload_of

from kvstore.engine_messages import Nothing, Ready
from kvstore.slot import verify
from kvstore.transfer.loopback import Network
from replica_agent.engines.pool_client import Reserved

CHAINS = [[key_of(100 * chain + block) for block in range(12)] for chain in range(6)]
STEPS = 400


class Actor:
    """One replica, and everything its engine has under way. Owned by the stress test alone."""

    def __init__(self, subject: Agent, rng: random.Random) -> None:
        self.subject = subject
        self._rng = rng
        self._lives = 1
        self._names = 0
        self._asked: dict[str, list[bytes]] = {}
        self._writing: list[tuple[list[bytes], list[Reserved | None]]] = []

    @property
    def engine(self) -> Engine:
        return self.subject.engine

    async def save(self) -> None:
        chain = self._rng.choice(CHAINS)
        start = self._rng.choice([0, 0, 4])
        keys = chain[start : start + self._rng.randint(4, 12)]
        reserved = await self.engine.ask(self.engine.client.reserve, keys, chain[start - 1] if start else b"")
        self._writing.append((keys, reserved))

    async def finish_a_save(self) -> None:
        if not self._writing:
            return
        keys, reserved = self._writing.pop(self._rng.randrange(len(self._writing)))
        wanted = [(key, place) for key, place in zip(keys, reserved, strict=True) if place is not None]
        written = self._rng.random() < 0.9
        for key, place in wanted:
            self.engine.client.slot(place.slot)[:] = payload_of(key) if written else bytes(BLOCK_BYTES)
        await self.engine.commit(wanted, written)

    async def prepare(self, source: Actor) -> None:
        chain = self._rng.choice(CHAINS)
        cached = self._rng.choice([0, 0, 0, 2])
        keys = chain[cached : self._rng.randint(6, len(chain))]
        hint = None
        if source is not self and self._rng.random() < 0.8:
            blocks, deadline = self._rng.randint(6, len(chain)), self._rng.choice([60, 5_000])
            hint = source.subject.hint(blocks, deadline_ms=deadline)
        self._names += 1
        request = f"{self._lives}-{self._names}"
        self._asked[request] = keys
        await self.engine.prepare(request, keys, hint, cached=cached)

    async def poll(self) -> None:
        for request, keys in list(self._asked.items()):
            answer = await self.engine.poll(request)
            if isinstance(answer, Nothing):
                del self._asked[request]
            elif isinstance(answer, Ready):
                for key, slot in zip(keys, answer.slots, strict=False):
                    assert bytes(self.engine.client.slot(slot)) == payload_of(key), "other bytes"
                if self._rng.random() < 0.8:
                    del self._asked[request]
                    await self.engine.ask(self.engine.client.release, request, len(answer.slots), 0.001)

    async def cancel(self) -> None:
        if self._asked:
            request = self._rng.choice(list(self._asked))
            del self._asked[request]
            await self.engine.ask(self.engine.client.cancel, request)

    async def clear(self) -> None:
        await self.engine.ask(self.engine.client.clear)

    async def reconnect(self) -> None:
        """The engine is killed, or its connection lost, whatever it was doing."""
        if self._rng.random() < 0.7:
            await self.engine.close()
        self._lives += self._rng.randint(0, 1)
        self._asked.clear()
        self._writing.clear()
        await self.subject.connect(engine_id=f"life-{self._lives}")

    def check(self) -> None:
        self.subject.kv.check()
        pool = self.subject.pool
        for key in (key for chain in CHAINS for key in chain):
            for held in pool.pin([key]):
                verify(pool.view(held.slot), BLOCK_BYTES, key, held.generation)
                pool.unpin([held])

    async def end(self) -> None:
        await self.poll()
        for request in self._asked:
            await self.engine.ask(self.engine.client.cancel, request)
        for engine in self.subject.engines:
            await engine.close()


def disturb(network: Network, rng: random.Random) -> None:
    faults = network.faults
    match rng.randrange(6):
        case 0:
            faults.stop_after = rng.choice([None, None, None, 0, 3])
        case 1:
            faults.corrupt = frozenset(rng.sample(range(12), 1)) if rng.random() < 0.3 else frozenset()
        case 2:
            faults.hold, faults.hold_at = asyncio.Event(), rng.randrange(8)
        case 3 | 4:
            if faults.hold is not None:
                faults.hold.set()
            faults.hold = None
        case 5:
            faults.late = not faults.late
            network.land()


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_only_right_bytes_are_seen_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    network = Network()
    ahead = [0.0]
    more = {"hold_s": 60.0, "clock": lambda: time.monotonic() + ahead[0]}
    flags = {"pool-bytes": str(80 * 8_192)}
    async with contextlib.AsyncExitStack() as stack:
        actors = []
        for _ in range(3):
            subject = await stack.enter_async_context(agent(tmp_path, network, **more, **flags))  # type: ignore[arg-type]
            actors.append(Actor(subject, rng))
            await subject.connect()
            for _ in range(30):  # an engine so slow that every fetch is worth trying
                subject.kv.estimates.prefilled(16, 136, 10.0)
        for _ in range(STEPS):
            actor = rng.choice(actors)
            what = rng.random()
            if what < 0.15:
                await actor.save()
            elif what < 0.3:
                await actor.finish_a_save()
            elif what < 0.65:
                await actor.prepare(rng.choice(actors))
            elif what < 0.85:
                await actor.poll()
            elif what < 0.88:
                await actor.cancel()
            elif what < 0.885:
                await actor.clear()
            elif what < 0.9:
                await actor.reconnect()
            else:
                disturb(network, rng)
            for each in actors:
                each.check()
        network.faults.late = False
        if network.faults.hold is not None:
            network.faults.hold.set()
        for actor in actors:
            await actor.end()
        kvs = [actor.subject.kv for actor in actors]
        await until(lambda: not any(len(kv.searches) or kv.engine_connected or not kv.fetches.idle for kv in kvs))
        network.land()
        for actor in actors:
            actor.check()
        # Held on to is what might still be read or written, and no longer than that.
        ahead[0] = 1_000.0
        for actor in actors:
            await actor.subject.quiet()
        outcomes = {record.outcome for actor in actors for record in actor.subject.records}
        assert len(outcomes) >= 5, outcomes
