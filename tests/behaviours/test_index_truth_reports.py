"""What a gateway credits is the fold of what an agent reports, however the two of them take turns.

The agent's own catalogue and streams on one side, the gateway's own stream and index on the other, and between them the
bytes, cut and delayed as a test wants. No sockets: tests/unit/test_fleet_report_stream.py has those.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import httpx
import pytest
from agent_support import MODEL, SEED, Mirror, tokens_of
from path_support import Parts, exchange, identity

from gateway.fleet.replica import Replica
from gateway.fleet.report_stream import ReportStream, StreamLost
from gateway.placement.index import PrefixIndex
from gateway.settings import ReplicaSettings
from kvstore.identity import pack_tokens
from kvstore.messages import FrameReader, Snapshot, Tier
from replica_agent import reports
from replica_agent.catalogue import TIERS, Catalogue
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored
from replica_agent.load import EngineMetrics
from replica_agent.reports import EngineState, ReportHub

URL = httpx.URL("http://127.0.0.1:1")


class Told:
    """An agent without its engine: what a test says is held."""

    def __init__(self, *, seed: int = SEED, buffer_bytes: int = 1 << 26) -> None:
        self.catalogue = Catalogue(MODEL, seed)
        self.hub = ReportHub(
            self.catalogue,
            lambda: EngineState(True, EngineMetrics(running=5, capacity_blocks=10**6)),
            epoch=1,
            buffer_bytes=buffer_bytes,
            heartbeat_interval_s=60,
        )

    def store(self, first: int, tokens: list[int], tier: Tier = Tier.HBM, parent: int | None = None) -> None:
        """A run of blocks, numbered from `first` on."""
        hashes = list(range(first, first + len(tokens) // 16))
        self.catalogue.apply(
            [BlockStored(hashes=hashes, parent=parent, tokens=pack_tokens(tokens), block_size=16, tier=tier)]
        )
        self.hub.changed()

    def held(self) -> dict[Tier, set[int]]:
        """By tier, after looking at every block."""
        self.catalogue.check()
        return {tier: set(self.catalogue.held(tier)[0]) for tier in TIERS}


async def nothing(*_: object) -> None:
    """Takes the model's files."""


def following(index: PrefixIndex, replica: Replica, client: httpx.AsyncClient) -> ReportStream:
    return ReportStream(
        replica,
        URL,
        index,
        client,
        token="",
        route_seed=SEED,
        on_hello=lambda *_: None,
        on_model_files=nothing,
        on_fetch=lambda _: None,
    )


async def test_a_large_snapshot_is_routed_by_hash_until_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are placed at once and while it arrives, by the ring; and exactly as soon as it is confirmed."""
    monkeypatch.setattr(reports, "PART_BLOCKS", 64)
    parts = Parts()
    holder = parts.fleet.replicas["replica-1"]
    prompt = range(64 * 16)
    told = Told(seed=0)
    told.store(0, list(prompt))
    told.store(1_000, list(range(10**6, 10**6 + 2_000 * 16)))
    stream, reader, counting = following(parts.index, holder, parts.client), FrameReader(), FrameReader()
    home = None
    received = 0
    async for data in told.hub.open():
        received += sum(isinstance(report, Snapshot) for report in counting.feed(data))
        await stream.take(reader, data)
        if not holder.reporting:
            request = exchange(identity(prompt))
            parts.place.place(request)
            assert request.placement is not None
            assert request.placement.predicted_cached_tokens == 0, "nothing is credited before it is confirmed"
            home = home or request.placement.replica
            assert request.placement.replica == home, "the ring says where"
            parts.place.unplace(request, answered=False)
            if received:
                assert holder.agent_error == "receiving a snapshot"
                assert holder.heartbeat is None or holder.heartbeat.running == 5
        else:
            break
    assert received >= 2_064 / 64 / 4
    request = exchange(identity(prompt))
    parts.place.place(request)
    assert request.placement is not None
    assert (request.placement.replica, request.placement.predicted_cached_tokens) == ("replica-1", len(prompt) - 16)
    assert home is not None
    parts.index.check()
    await parts.client.aclose()


class Schedule:
    """One order in which an engine, its agent, a network and a gateway take their turns, drawn from a seed."""

    def __init__(self, seed: int, index: PrefixIndex, client: httpx.AsyncClient) -> None:
        self.rng = rng = random.Random(seed)
        self.told = Told(buffer_bytes=rng.choice((1 << 12, 1 << 26)))
        self.index = index
        self.replica = Replica(ReplicaSettings(id="r", engine=str(URL), agent=str(URL)))
        self.stream = following(index, self.replica, client)
        self.frames: AsyncIterator[bytes] | None = None
        self.readers = FrameReader(), FrameReader()
        self.mirror = Mirror()
        self.pipe = b""
        self.confirmed = 0

    async def turn(self) -> None:
        """Something happens."""
        rng, told = self.rng, self.told
        action = rng.random()
        block, tier = rng.randrange(60), rng.choice(TIERS)
        if action < 0.35:
            # Block b follows b // 3, or is the first of a prompt: chains of any shape come about.
            told.store(block, tokens_of(block), tier, parent=block // 3 or None)
        elif action < 0.45:
            told.catalogue.apply([BlockRemoved(hashes=[block, block // 2], tier=tier)])
            told.hub.changed()
        elif action < 0.47:
            told.catalogue.apply([AllCleared(tier=rng.choice((None, tier)))])
            told.hub.changed()
        elif action < 0.49:
            told.hub.new_epoch(MODEL)
        elif action < 0.51:
            await self.lose("cut")
        elif action < 0.55:
            told.hub.beat()
        else:
            await self.pass_on()

    async def lose(self, why: str) -> None:
        """The connection breaks, and whatever is on its way with it."""
        if self.frames is not None:
            await self.frames.aclose()  # type: ignore[attr-defined]
            await self.stream._lost(why, "reports")
            assert not any(set(self.index.keys_of("r", tier)) for tier in Tier)
            assert not self.replica.reporting
        self.frames, self.readers, self.mirror, self.pipe = None, (FrameReader(), FrameReader()), Mirror(), b""
        self.stream._epoch, self.stream._next_part = -1, 0  # as a new session begins

    async def pass_on(self) -> None:
        """The network brings some bytes."""
        if self.frames is None:
            self.frames = self.told.hub.open()
        if not self.pipe:
            self.told.hub.beat()  # so that there is something to read
            try:
                self.pipe = await anext(self.frames)
            except StopAsyncIteration:
                await self.lose("dropped")
                return
        size = self.rng.randrange(1, len(self.pipe) + 1)
        data, self.pipe = self.pipe[:size], self.pipe[size:]
        for report in self.readers[0].feed(data):
            self.mirror.apply(report)
        await self.stream.take(self.readers[1], data)
        if self.replica.reporting:
            self.confirmed += 1
            credited = {tier: set(self.index.keys_of("r", tier)) for tier in TIERS}
            assert credited == {tier: set(self.mirror.held[tier]) for tier in TIERS}, "the fold, and nothing else"

    async def settle(self) -> None:
        """Until everything that happened has been told."""
        self.told.hub.flush()
        for _ in range(10_000):
            hub, mirror = self.told.hub, self.mirror
            if self.replica.reporting and (mirror.epoch, mirror.seq) == (hub.epoch, hub.seq) and not self.pipe:
                break
            await self.pass_on()
        else:
            raise AssertionError("never at peace")
        assert {tier: set(self.index.keys_of("r", tier)) for tier in TIERS} == self.told.held()
        await self.lose("the end")


async def test_any_interleaving_of_reports_is_the_fold(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    index = PrefixIndex(16 << 20)
    index.add_replica("r")
    confirmed = 0
    async with httpx.AsyncClient() as client:
        for seed in range(500 * times):
            monkeypatch.setattr(reports, "PART_BLOCKS", random.Random(seed).choice((2, 15, 8_192)))
            schedule = Schedule(seed, index, client)
            try:
                for _ in range(80):
                    await schedule.turn()
                await schedule.settle()
            except (AssertionError, StreamLost) as error:
                raise AssertionError(f"schedule {seed}") from error
            confirmed += schedule.confirmed
    index.check()
    assert confirmed > 1_200 * times
