"""The report streams: every gateway is told what the engine holds, at its own pace or not at all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from kvstore.bounds import MAX_TEXT, clipped
from kvstore.messages import (
    MAX_CHANGED_BLOCKS,
    MAX_PROBLEMS,
    MAX_REPLICA_BLOCKS,
    SHARDS,
    Change,
    Cleared,
    Delta,
    FetchRecord,
    FetchState,
    GatewayLoad,
    Heartbeat,
    Problem,
    Removed,
    Snapshot,
    Stored,
    encode_frame,
)
from replica_agent.catalogue import Catalogue
from replica_agent.errors import TooManyReports
from replica_agent.load import EngineMetrics

PART_BLOCKS = 8_192
"""Blocks at a time: in a part of a snapshot, in a delta, freed after a reset. A millisecond or two
(`benchmarks/reports.py`)."""

MAX_STREAMS = 256
"""Gateways that may read at a time, each with a buffer of its own."""

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
    """Frames on their way to one gateway, and how much of a snapshot it has been told.

    Owns its queue. The hub puts, the response takes. A gateway that lags by more than `limit` bytes loses the stream:
    the queue is dropped at once and the response ends as soon as the gateway reads again. Shards before `told` are the
    gateway's own; nothing else may be told of the others' changes, since their part is still to come.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()
        self.told = self.parts = 0
        self.over = False
        self.overran = False

    @property
    def whole(self) -> bool:
        """Whether the gateway has all of a snapshot."""
        return self.told == SHARDS

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

    def start_over(self) -> None:
        """Drops what is queued, which is worth nothing any more: another snapshot is due."""
        self._frames.clear()
        self._bytes = self.told = self.parts = 0
        self._ready.set()

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
        assert 0 <= self.told <= SHARDS

    def drain(self) -> bytes:
        """Everything queued."""
        taken = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        return taken

    async def take(self) -> bytes:
        """Everything queued, as soon as there is something; empty at the end, or when another snapshot is due."""
        await self._ready.wait()
        self._ready.clear()
        return self.drain()


class ReportHub:
    """All report streams of one agent, and the `(epoch, seq)` they are numbered by.

    Owns the streams and both numbers, and is the only one to take the catalogue's changes. Used from one event loop.
    Nothing here waits for a gateway: frames are encoded once and queued for each. A snapshot is told a part at a time,
    of what is held by then, when a gateway has taken all before it (`kvstore.messages`): no copy is made of the
    catalogue, and no part of it is told before it is wanted.
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
        return sum(not stream.over for stream in self._streams)

    def check(self) -> None:
        """Asserts that every stream is within its limit."""
        for stream in self._streams:
            stream.check()

    async def run(self) -> None:
        """Sends heartbeats until cancelled, and frees what a reset left behind."""
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            self.beat()
            left = self._catalogue.sweep(PART_BLOCKS)
            while left:
                await asyncio.sleep(0)
                left = self._catalogue.sweep(PART_BLOCKS)

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
            changes = self._catalogue.take_changes(PART_BLOCKS)
            delta = Delta(epoch=self.epoch, seq=self.seq, changes=changes)
            self._broadcast(delta)
            for stream in list(self._streams):
                if stream.parts and not stream.whole:
                    told = [part for change in changes if (part := _told(change, stream.told)) is not None]
                    self._put(stream, encode_frame(msgspec.structs.replace(delta, changes=told)))

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
        for stream in list(self._streams):
            stream.start_over()

    def close(self) -> None:
        """Ends every stream, now and later."""
        self._closed = True
        if self._beat_due is not None:
            self._beat_due.cancel()
        self.hang_up()

    def hang_up(self) -> None:
        """Ends every stream: who still wants to know greets again first."""
        for stream in list(self._streams):
            stream.end()

    def open(self) -> AsyncIterator[bytes]:
        """Frames for one gateway: a snapshot, then everything that happens, until it lags or the agent stops.

        Raises TooManyReports where there are as many readers as may be, or more blocks than may be told.
        """
        if len(self._streams) >= MAX_STREAMS:
            raise TooManyReports(f"{MAX_STREAMS} gateways read already")
        if self._catalogue.blocks > MAX_REPLICA_BLOCKS:
            raise TooManyReports(f"{self._catalogue.blocks} blocks are held; a gateway takes {MAX_REPLICA_BLOCKS}")
        return self._frames()

    async def _frames(self) -> AsyncIterator[bytes]:
        stream = ReportStream(self._buffer_bytes)
        if self._closed:
            return
        self._streams.add(stream)
        try:
            while not stream.over:
                if stream.whole:
                    frames = await stream.take()
                else:
                    frames = self._next_part(stream)
                if frames:
                    yield frames
                if not stream.whole:
                    await asyncio.sleep(0)
        finally:
            self._streams.discard(stream)

    def _next_part(self, stream: ReportStream) -> bytes:
        """What is queued, and behind it the next part of the snapshot: what is held now in the next shards."""
        self.flush()
        stream.told, stored = self._catalogue.part(stream.told, PART_BLOCKS)
        size = sum(len(each.keys) for each in stored) // 8
        groups = [stored] if size <= MAX_CHANGED_BLOCKS else [[each] for each in stored]
        frames = [stream.drain()]
        for number, group in enumerate(groups, 1):
            last = stream.whole and number == len(groups)
            part = Snapshot(epoch=self.epoch, seq=self.seq, part=stream.parts, last=last, stored=group)
            stream.parts += 1
            frames.append(encode_frame(part))
        if stream.whole or stream.parts == len(groups):
            frames.append(encode_frame(self._heartbeat()))
        return b"".join(frames)

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
            kv_usage=min(max(engine.metrics.kv_usage, 0.0), 1.0),
            capacity_blocks=engine.metrics.capacity_blocks or 0,
            blocks=self._catalogue.blocks,
            digest=self._catalogue.digest,
            fetch=engine.fetch,
            kv_events=engine.kv_events,
            problems=[
                Problem(
                    code=problem.code,
                    message=clipped(problem.message, MAX_TEXT),
                    fix=clipped(problem.fix, MAX_TEXT),
                    note=problem.note,
                )
                for problem in engine.problems[:MAX_PROBLEMS]
            ],
            gateways=self._gateways(),
        )

    def _broadcast(self, message: Delta | Heartbeat | FetchRecord) -> None:
        """To everybody whom it says something: a delta to those who have all shards, a heartbeat to who has any."""
        streams = [
            stream
            for stream in self._streams
            if stream.whole or isinstance(message, FetchRecord) or (stream.parts and isinstance(message, Heartbeat))
        ]
        if streams:
            frame = encode_frame(message)
            for stream in streams:
                self._put(stream, frame)

    def _put(self, stream: ReportStream, frame: bytes) -> None:
        stream.put(frame)
        if stream.overran:
            self.overruns += 1
            self._streams.discard(stream)


def _told(change: Change, end: int) -> Change | None:
    """What a change says of the shards before `end`; None when that is nothing."""
    if isinstance(change, Cleared):
        return change
    shards = change.keys[7::8]  # the highest byte of each key
    if isinstance(change, Removed):
        keys = b"".join(change.keys[8 * at : 8 * at + 8] for at, shard in enumerate(shards) if shard < end)
        return Removed(tier=change.tier, keys=keys) if keys else None
    at = [8 * at for at, shard in enumerate(shards) if shard < end]
    if not at:
        return None
    keys, parents = (b"".join(packed[each : each + 8] for each in at) for packed in (change.keys, change.parents))
    return Stored(tier=change.tier, keys=keys, parents=parents)
