"""Report streams: what one gateway reads, and what a slow one costs the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agent_support import MODEL, SEED, Mirror, chain_of, tokens_of

from kvstore.cost import LinkEstimate
from kvstore.identity import pack_tokens
from kvstore.messages import (
    MAX_PROBLEMS,
    Cleared,
    Delta,
    FetchOutcome,
    FetchRecord,
    FetchState,
    FrameReader,
    GatewayLoad,
    Heartbeat,
    Problem,
    Report,
    Snapshot,
    Stored,
    Tier,
)
from replica_agent import catalogue, reports
from replica_agent.catalogue import TIERS, Catalogue
from replica_agent.errors import TooManyReports
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored
from replica_agent.load import EngineMetrics
from replica_agent.reports import PART_BLOCKS, EngineState, ReportHub

_NOTHING = {"Count": 0, "Seconds": 0.0, "FetchOutcome": FetchOutcome.FETCHED}


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
        self._stream: AsyncIterator[bytes] = hub.open()
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


async def test_a_stream_begins_with_a_snapshot_and_a_heartbeat() -> None:
    rig = Rig()
    rig.store(1, 2)
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    first, second = gateway.reports
    assert isinstance(first, Snapshot)
    assert isinstance(second, Heartbeat)
    assert (first.part, first.last, [each.tier for each in first.stored]) == (0, True, [Tier.HBM])
    assert (second.running, second.capacity_blocks, second.blocks) == (3, 99, 2)
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
    assert [type(report).__name__ for report in gateway.reports if not isinstance(report, Snapshot)] == [
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


def large(rig: Rig, count: int = 3 * PART_BLOCKS) -> None:
    """Blocks enough for a snapshot of several parts."""
    tokens = pack_tokens(token for block in range(count) for token in (block,) * 16)
    hashes = list(range(count))
    rig.catalogue.apply([BlockStored(hashes=hashes, parent=None, tokens=tokens, block_size=16, tier=Tier.HBM)])
    rig.hub.flush()


def parts_of(gateway: Gateway) -> list[Snapshot]:
    return [report for report in gateway.reports if isinstance(report, Snapshot)]


async def test_a_large_snapshot_comes_in_parts_and_changes_fall_in_between() -> None:
    """What is told already changes by deltas, what is not by being told as it is then; a heartbeat tells the load."""
    rig = Rig(buffer_bytes=1 << 26)
    large(rig)
    gateway = Gateway(rig.hub)
    await gateway.read()
    assert gateway.mirror.heartbeat is not None and gateway.mirror.verified == 0, "the load is known at once"
    told = len(gateway.mirror.hbm)
    assert 0 < told < rig.catalogue.blocks
    for block in range(0, rig.catalogue.blocks, 7):
        rig.remove(block)
    rig.store(100_001, 100_002)
    rig.hub.beat()
    await gateway.read_to_heartbeat()
    assert gateway.mirror.hbm == set(rig.catalogue.held(Tier.HBM)[0])
    assert [part.part for part in parts_of(gateway)] == list(range(len(parts_of(gateway))))
    assert len(parts_of(gateway)) >= 3
    assert gateway.mirror.seq == rig.hub.seq > 1
    changed = sum(
        len(change.keys) // 8 for report in gateway.reports if isinstance(report, Delta) for change in report.changes
    )
    assert changed < told / 3, "no change of what is not told yet"
    await gateway.close()


async def test_a_new_epoch_cuts_a_snapshot_short() -> None:
    rig = Rig(buffer_bytes=1 << 26)
    large(rig)
    gateway = Gateway(rig.hub)
    await gateway.read()
    rig.hub.new_epoch(MODEL)
    rig.store(1)
    rig.hub.beat()
    await gateway.read_to_heartbeat()
    assert (gateway.mirror.epochs, gateway.mirror.hbm) == ([1, 2], set(chain_of([1])))
    await gateway.close()


async def test_what_is_cleared_is_told_in_a_word_and_freed_in_pieces() -> None:
    rig = Rig(buffer_bytes=1 << 26)
    large(rig)
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    rig.catalogue.apply([AllCleared()])
    rig.store(5)
    rig.hub.beat()
    await gateway.read_to_heartbeat()
    assert gateway.mirror.hbm == set(chain_of([5]))
    (delta,) = (report for report in gateway.reports if isinstance(report, Delta))
    assert [type(change) for change in delta.changes] == [Cleared, Stored]
    pieces = 0
    while rig.catalogue.sweep(1_000):
        pieces += 1
    assert pieces >= 3 * PART_BLOCKS // 1_000
    rig.catalogue.check()
    await gateway.close()


async def test_a_part_that_is_too_large_for_one_message_is_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a client has made keys of one shard."""
    for module in (reports, catalogue):
        monkeypatch.setattr(module, "MAX_CHANGED_BLOCKS", 100)
    rig = Rig(buffer_bytes=1 << 26)
    large(rig, 1_000)
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    sizes = [sum(len(each.keys) // 8 for each in part.stored) for part in parts_of(gateway)]
    assert (sizes, len(gateway.mirror.hbm)) == ([100] * 10, 1_000)
    await gateway.close()


async def test_there_are_only_so_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_STREAMS", 1)
    rig = Rig()
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    with pytest.raises(TooManyReports, match="1 gateways"):
        rig.hub.open()
    await gateway.close()
    monkeypatch.setattr(reports, "MAX_REPLICA_BLOCKS", 1)
    rig.store(1, 2)
    with pytest.raises(TooManyReports, match="2 blocks are held"):
        rig.hub.open()


async def test_what_an_engine_says_at_length_is_cut() -> None:
    """A reader would refuse the whole heartbeat."""
    rig = Rig()
    rig.kv = {"problems": [Problem(code="x", message="m" * 9_000, fix="f")] * 100}
    gateway = Gateway(rig.hub)
    await gateway.read_to_heartbeat()
    beat = gateway.mirror.heartbeat
    assert beat is not None and len(beat.problems) == MAX_PROBLEMS
    assert beat.problems[0].message.endswith("m...")
    await gateway.close()


@pytest.mark.parametrize("seed", range(10))
async def test_any_pace_of_reading_ends_with_what_is_held(seed: int) -> None:
    """Readers of any pace, changes, clears and new epochs in any order: each ends with what the catalogue has."""
    rng = random.Random(seed)
    rig = Rig(buffer_bytes=rng.choice((1 << 16, 1 << 26)))
    monkey = rng.choice((3, 50, 8_192))
    readers: list[Gateway] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "PART_BLOCKS", monkey)
        for _ in range(300):
            action = rng.random()
            if action < 0.45:
                rig.store(*(rng.randrange(6) for _ in range(rng.randrange(1, 40))))
            elif action < 0.6:
                rig.remove(rng.randrange(6))
            elif action < 0.62:
                rig.catalogue.apply([AllCleared()])
                rig.hub.changed()
            elif action < 0.64:
                rig.hub.new_epoch(MODEL)
            elif action < 0.7 and len(readers) < 4:
                readers.append(Gateway(rig.hub))
            elif action < 0.75:
                rig.hub.beat()
            elif action < 0.8:
                rig.catalogue.sweep(rng.randrange(1, 20))
            elif readers:
                reader = rng.choice(readers)
                rig.hub.beat()  # so that there is something to read
                if not await reader.read():
                    readers.remove(reader)
            rig.hub.check()
        rig.catalogue.check()
        held = {tier: set(rig.catalogue.held(tier)[0]) for tier in TIERS}
        for reader in readers:
            rig.hub.beat()
            verified = reader.mirror.verified
            while (
                reader.mirror.seq != rig.hub.seq
                or reader.mirror.epoch != rig.hub.epoch
                or reader.mirror.verified == verified
            ):
                rig.hub.beat()
                if not await reader.read():
                    break
            else:
                assert {tier: set(reader.mirror.held[tier]) for tier in TIERS} == held
            await reader.close()


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
