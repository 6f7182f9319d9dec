"""Report streams: what one gateway reads, and what a slow one costs the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agent_support import MODEL, SEED, Mirror, chain_of, tokens_of

from kvstore.cost import LinkEstimate
from kvstore.identity import pack_tokens
from kvstore.messages import (
    SNAPSHOT_PART_BLOCKS,
    FetchOutcome,
    FetchRecord,
    FetchState,
    FrameReader,
    GatewayLoad,
    Heartbeat,
    Report,
    Snapshot,
    Tier,
)
from replica_agent.catalogue import Catalogue
from replica_agent.events.decode import BlockRemoved, BlockStored
from replica_agent.load import EngineMetrics
from replica_agent.reports import EngineState, ReportHub

_NOTHING = {"int": 0, "float": 0.0, "FetchOutcome": FetchOutcome.FETCHED}


class Rig:
    def __init__(self, buffer_bytes: int = 1 << 20) -> None:
        self.catalogue = Catalogue(MODEL, SEED)
        self.kv: dict[str, Any] = {}
        self.loads: list[GatewayLoad] = []
        self.hub = ReportHub(
            self.catalogue,
            lambda: EngineState(True, EngineMetrics(running=3, capacity_blocks=99), **self.kv),
            epoch=1,
            buffer_bytes=buffer_bytes,
            heartbeat_interval_s=60,
            gateways=lambda: self.loads,
        )

    def store(self, *blocks: int) -> None:
        parent = None
        for block in blocks:
            event = BlockStored(
                hashes=[block], parent=parent, tokens=pack_tokens(tokens_of(block)), block_size=16, tier=Tier.HBM
            )
            self.catalogue.apply([event])
            parent = block
        self.hub.changed()

    def remove(self, block: int) -> None:
        self.catalogue.apply([BlockRemoved(hashes=[block], tier=Tier.HBM)])
        self.hub.changed()


class Gateway:
    """Reads a stream frame by frame, at the test's pace."""

    def __init__(self, hub: ReportHub) -> None:
        self._stream: AsyncIterator[bytes] = hub.stream()
        self._reader = FrameReader()
        self.mirror = Mirror()
        self.reports: list[Report] = []

    async def read(self) -> bool:
        """One chunk; False at the end of the stream."""
        try:
            data = await asyncio.wait_for(anext(self._stream), 10)
        except StopAsyncIteration:
            return False
        for report in self._reader.feed(data):
            self.reports.append(report)
            self.mirror.apply(report)
        return True

    async def read_to_heartbeat(self) -> None:
        """Up to and with the next heartbeat."""
        before = self.mirror.verified
        while self.mirror.verified == before:
            assert await self.read()

    async def close(self) -> None:
        await self._stream.aclose()  # type: ignore[attr-defined]


async def test_a_stream_begins_with_a_snapshot_of_every_tier_and_a_heartbeat() -> None:
    rig = Rig()
    rig.store(1, 2)
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    first, second, third = gateway.reports
    assert isinstance(first, Snapshot)
    assert isinstance(second, Snapshot)
    assert isinstance(third, Heartbeat)
    assert (first.tier, second.tier) == (Tier.HBM, Tier.DRAM)
    assert [(part.part, part.parts) for part in (first, second)] == [(0, 1), (0, 1)]
    assert (third.running, third.capacity_blocks, third.blocks) == (3, 99, 2)
    assert gateway.mirror.hbm == set(chain_of([1, 2]))
    await gateway.close()
    assert rig.hub.streams == 0


async def test_changes_of_one_turn_are_one_delta() -> None:
    rig = Rig()
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    rig.store(1, 2)
    rig.store(5)
    rig.remove(5)
    await gateway.read()
    assert (gateway.mirror.seq, gateway.mirror.hbm) == (1, set(chain_of([1, 2])))
    rig.hub.beat()
    await gateway.read_to_heartbeat()
    await gateway.close()


async def test_a_heartbeat_never_overtakes_a_change() -> None:
    rig = Rig()
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    rig.store(1)
    rig.hub.beat()
    await gateway.read_to_heartbeat()
    assert gateway.mirror.hbm == set(chain_of([1]))
    await gateway.close()


async def test_a_fetch_is_told_in_between() -> None:
    rig = Rig()
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    record = FetchRecord(**{name: _NOTHING.get(kind, "") for name, kind in FetchRecord.__annotations__.items()})
    rig.store(1)
    rig.hub.fetched(record)
    rig.hub.beat()
    await gateway.read_to_heartbeat()
    assert gateway.mirror.fetches == [record]
    await gateway.close()


async def test_a_heartbeat_says_what_is_known_of_kv() -> None:
    rig = Rig()
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    first = gateway.mirror.heartbeat
    assert first is not None and (first.fetch, first.prefill_tokens_per_s) == (None, None)
    link = LinkEstimate(0.001, 1e9)
    state = FetchState(namespace="n", acts=True, slots=3, link=link, links={"a": link})
    rig.kv = {"prefill_tokens_per_s": 99.0, "fetch": state}
    rig.hub.beat()
    await gateway.read_to_heartbeat()
    then = gateway.mirror.heartbeat
    assert then is not None and (then.fetch, then.prefill_tokens_per_s) == (state, 99.0)
    await gateway.close()


async def test_changes_of_the_gateways_load_that_come_together_share_a_heartbeat() -> None:
    rig = Rig()
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    for sequences in range(1, 6):
        rig.loads = [GatewayLoad(gateway="a", epoch=1, prefill_tokens=0, sequences=sequences)]
        rig.hub.announce()
    await gateway.read_to_heartbeat()
    assert gateway.mirror.heartbeat is not None and gateway.mirror.heartbeat.gateways == rig.loads
    rig.hub.announce()
    rig.hub.beat()  # takes the place of the one that is due
    await gateway.read_to_heartbeat()
    rig.store(1)
    rig.hub.announce()
    await gateway.read_to_heartbeat()
    assert [type(report).__name__ for report in gateway.reports[2:]] == [
        "Heartbeat",
        "Heartbeat",
        "Heartbeat",
        "Delta",
        "Heartbeat",
    ]
    await gateway.close()


async def test_a_new_epoch_starts_the_stream_over() -> None:
    rig = Rig()
    rig.store(1)
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    rig.store(2)
    rig.hub.new_epoch(MODEL)
    await gateway.read_to_heartbeat()
    assert (gateway.mirror.epochs, gateway.mirror.seq, gateway.mirror.hbm) == ([1, 2], 0, set())
    rig.store(3)
    rig.hub.beat()
    await gateway.read_to_heartbeat()
    assert (gateway.mirror.seq, gateway.mirror.hbm) == (1, set(chain_of([3])))
    await gateway.close()


@pytest.mark.parametrize("interrupt", [False, True])
async def test_a_large_snapshot_comes_in_parts(interrupt: bool) -> None:
    """What happens while the parts go out follows them; a new epoch cuts them short."""
    rig = Rig(buffer_bytes=1 << 26)
    count = SNAPSHOT_PART_BLOCKS + 10
    tokens = pack_tokens(token for block in range(count) for token in (block,) * 16)
    rig.catalogue.apply(
        [BlockStored(hashes=list(range(count)), parent=None, tokens=tokens, block_size=16, tier=Tier.HBM)]
    )
    gateway = Gateway(rig.hub)
    await gateway.read()
    if interrupt:
        rig.hub.new_epoch(MODEL)
        await gateway.read_to_heartbeat()
        assert gateway.mirror.hbm == set()
    else:
        rig.remove(0)
        rig.hub.beat()
        await gateway.read_to_heartbeat()
        snapshots = [report for report in gateway.reports if isinstance(report, Snapshot)]
        assert [(part.tier, part.part, part.parts) for part in snapshots] == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
        while gateway.mirror.seq < rig.hub.seq:
            await gateway.read()
        assert len(gateway.mirror.hbm) == count - 1
    await gateway.close()


async def test_a_slow_gateway_loses_its_stream_alone() -> None:
    rig = Rig(buffer_bytes=5_000)
    slow, quick = Gateway(rig.hub), Gateway(rig.hub)
    await slow.read_to_heartbeat()
    await quick.read_to_heartbeat()
    for block in range(300):
        rig.store(block)
        rig.hub.flush()
        rig.hub.check()
        await quick.read()
    assert (rig.hub.overruns, rig.hub.streams) == (1, 1)
    assert len(quick.mirror.hbm) == 300
    while await slow.read():
        pass
    again = Gateway(rig.hub)
    await again.read_to_heartbeat()
    assert again.mirror.hbm == quick.mirror.hbm
    await again.close()
    await quick.close()


async def test_closing_ends_every_stream() -> None:
    rig = Rig()
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    rig.hub.close()
    assert not await gateway.read()
    assert not await Gateway(rig.hub).read()
