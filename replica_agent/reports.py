"""The report streams: every gateway is told what the engine holds, at its own pace or not at all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from kvstore.identity import pack_keys
from kvstore.messages import (
    SNAPSHOT_PART_BLOCKS,
    Delta,
    FetchRecord,
    FetchState,
    GatewayLoad,
    Heartbeat,
    Problem,
    Snapshot,
    Tier,
    encode_frame,
)
from replica_agent.catalogue import TIERS, Catalogue
from replica_agent.load import EngineMetrics

DELTA_BLOCKS = 65_536
"""Blocks in one delta at most, so that no frame comes near the protocol's limit."""

ANNOUNCE_S = 0.005
"""Changes of the gateways' load within this time of a heartbeat share the next one."""


class EngineState(msgspec.Struct, frozen=True):
    """Whether the engine answers, and what it said last; the rest as in `Heartbeat`."""

    up: bool
    metrics: EngineMetrics
    prefill_tokens_per_s: float | None = None
    fetch: FetchState | None = None
    kv_events: bool = False
    problems: list[Problem] = []


class ReportStream:
    """Frames on their way to one gateway.

    Owns its queue. The hub puts, the response takes. A gateway that lags by more than `limit` bytes loses the stream:
    the queue is dropped at once and the response ends as soon as the gateway reads again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()
        self.over = False
        self.overran = False

    def put(self, frame: bytes) -> None:
        """Queues a frame; never waits."""
        if self.over:
            return
        self._frames.append(frame)
        self._bytes += len(frame)
        if self._bytes > self._limit:
            self.overran = True
            self.end()
        self._ready.set()

    def replace(self, frames: list[bytes]) -> None:
        """Drops what is queued, which is worth nothing any more, and queues `frames`."""
        self._frames.clear()
        self._bytes = 0
        for frame in frames:
            self.put(frame)

    def end(self) -> None:
        """No more frames; what is queued is dropped."""
        self.over = True
        self._frames.clear()
        self._bytes = 0
        self._ready.set()

    def check(self) -> None:
        """Asserts that no more is queued than the limit, and nothing after the end."""
        assert self._bytes == sum(map(len, self._frames)) <= self._limit
        assert not (self.over and self._frames)

    async def take(self) -> bytes:
        """Everything queued, as soon as there is something; empty at the end."""
        await self._ready.wait()
        self._ready.clear()
        taken = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        return taken


class ReportHub:
    """All report streams of one agent, and the `(epoch, seq)` they are numbered by.

    Owns the streams and both numbers, and is the only one to take the catalogue's changes. Used from one event loop.
    Nothing here waits for a gateway: frames are encoded once and queued for each.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        engine: Callable[[], EngineState],
        *,
        epoch: int,
        buffer_bytes: int,
        heartbeat_interval_s: float,
        gateways: Callable[[], list[GatewayLoad]] = list,
    ) -> None:
        self._catalogue = catalogue
        self._engine = engine
        self._gateways = gateways
        self._buffer_bytes = buffer_bytes
        self._heartbeat_interval_s = heartbeat_interval_s
        self._streams: set[ReportStream] = set()
        self._flush_due = False
        self._beat_due: asyncio.TimerHandle | None = None
        self._beaten_at = 0.0
        self._closed = False
        self.epoch = epoch
        self.seq = 0
        self.overruns = 0

    @property
    def streams(self) -> int:
        """Open report streams."""
        return len(self._streams)

    def check(self) -> None:
        """Asserts that every open stream is within its limit and none has ended, unless all have."""
        for stream in self._streams:
            stream.check()
            assert self._closed or not stream.over

    async def run(self) -> None:
        """Sends heartbeats until cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            self.beat()

    def changed(self) -> None:
        """The catalogue has changes: they go out together at the end of this turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends the catalogue's changes."""
        self._flush_due = False
        while self._catalogue.has_changes:
            self.seq += 1
            changes = self._catalogue.take_changes(DELTA_BLOCKS)
            self._broadcast(Delta(epoch=self.epoch, seq=self.seq, changes=changes))

    def announce(self) -> None:
        """The gateways' load has changed: a heartbeat follows within `ANNOUNCE_S`, at once if there was none for that
        long. What happens in one turn of the loop shares it."""
        if self._beat_due is None:
            loop = asyncio.get_running_loop()
            self._beat_due = loop.call_at(self._beaten_at + ANNOUNCE_S, self.beat)

    def beat(self) -> None:
        """Sends a heartbeat, behind all changes so far."""
        if self._beat_due is not None:
            self._beat_due.cancel()
            self._beat_due = None
        self._beaten_at = asyncio.get_running_loop().time()
        self.flush()
        self._broadcast(self._heartbeat())

    def fetched(self, record: FetchRecord) -> None:
        """Tells of a fetch, to whoever listens now."""
        self._broadcast(record)

    def new_epoch(self, model: str) -> None:
        """Empties the catalogue and starts every stream over, with `model` in the names of what will be held."""
        self._catalogue.reset(model)
        self.epoch += 1
        self.seq = 0
        frames = [*self._snapshot(), encode_frame(self._heartbeat())]
        for stream in list(self._streams):
            stream.replace(frames)

    def close(self) -> None:
        """Ends every stream, now and later."""
        self._closed = True
        if self._beat_due is not None:
            self._beat_due.cancel()
        for stream in list(self._streams):
            stream.end()

    async def stream(self) -> AsyncIterator[bytes]:
        """Frames for one gateway: a snapshot, then everything that happens, until it lags or the agent stops."""
        if self._closed:
            return
        self.flush()
        stream = ReportStream(self._buffer_bytes)
        epoch = self.epoch
        snapshot = self._snapshot()
        first = next(snapshot)  # takes the copies, so that what is queued from here on is what follows them
        stream.put(encode_frame(self._heartbeat()))
        self._streams.add(stream)
        try:
            yield first
            for part in snapshot:
                if self.epoch != epoch or stream.over:
                    break  # the queue begins with the new epoch's snapshot
                yield part
                await asyncio.sleep(0)
            while not stream.over:
                frames = await stream.take()
                if frames:
                    yield frames
        finally:
            self._streams.discard(stream)

    def _snapshot(self) -> Iterator[bytes]:
        epoch, seq = self.epoch, self.seq
        copies = [(tier, *self._catalogue.held(tier)) for tier in TIERS]
        for tier, keys, parents in copies:
            yield from _parts(epoch, seq, tier, keys, parents)

    def _heartbeat(self) -> Heartbeat:
        engine = self._engine()
        return Heartbeat(
            epoch=self.epoch,
            seq=self.seq,
            engine_up=engine.up,
            running=engine.metrics.running,
            waiting=engine.metrics.waiting,
            queued_prefill_tokens=engine.metrics.queued_prefill_tokens,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            kv_usage=engine.metrics.kv_usage,
            capacity_blocks=engine.metrics.capacity_blocks or 0,
            blocks=self._catalogue.blocks,
            digest=self._catalogue.digest,
            fetch=engine.fetch,
            kv_events=engine.kv_events,
            problems=engine.problems,
            gateways=self._gateways(),
        )

    def _broadcast(self, message: Delta | Heartbeat | FetchRecord) -> None:
        if not self._streams:
            return
        frame = encode_frame(message)
        for stream in list(self._streams):
            stream.put(frame)
            if stream.overran:
                self.overruns += 1
                self._streams.discard(stream)


def _parts(epoch: int, seq: int, tier: Tier, keys: list[int], parents: list[int]) -> Iterator[bytes]:
    parts = max(1, -(-len(keys) // SNAPSHOT_PART_BLOCKS))
    for part in range(parts):
        span = slice(part * SNAPSHOT_PART_BLOCKS, (part + 1) * SNAPSHOT_PART_BLOCKS)
        yield encode_frame(
            Snapshot(
                epoch=epoch,
                seq=seq,
                part=part,
                parts=parts,
                tier=tier,
                keys=pack_keys(keys[span]),
                parents=pack_keys(parents[span]),
            )
        )
