"""Follows one replica's agent: its model files, then its report stream into the index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import httpx
import msgspec
import numpy as np
from opentelemetry import propagate, trace

from gateway.fleet.replica import Replica
from gateway.fleet.turns import Turns
from gateway.placement.blocks import PIECE_BLOCKS
from gateway.placement.column import Keys
from gateway.placement.index import PrefixIndex
from kvstore.errors import KvStoreError, ProtocolError
from kvstore.identity import Namespace
from kvstore.messages import (
    MAX_CHANGED_BLOCKS,
    MAX_REPLICA_BLOCKS,
    PROTOCOL_VERSION,
    Change,
    Cleared,
    Delta,
    FetchRecord,
    FrameReader,
    Heartbeat,
    Hello,
    ModelFiles,
    Removed,
    Report,
    Snapshot,
    Stored,
    Tier,
    decode_hello,
)

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)

SILENCE_S = 2.0
"""A stream on which so long was waited for a heartbeat is lost, whatever else came: they come every 250 ms."""

UNVOUCHED_S = 10.0
"""As is one on which none came for so long although there was always something to read: without them nothing that was
reported is vouched for, or judged."""

GREETING_S = 10.0
FILES_S = 60.0
"""For all of an answer, however little by little it comes; the head of a report stream has as long as a greeting."""

MAX_HELLO_BYTES = 1 << 20
MAX_FILES_BYTES = 80 << 20
"""Agents send at most 64 MiB of files, and a little around them."""

MERGED_BYTES = 8 * PIECE_BLOCKS
"""Keys of changes that are applied together; more would be copied together for nothing."""

BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class StreamLost(Exception):
    """The reports can be followed no further; the message says why, `kind` in a word fit for a metric."""

    def __init__(self, message: str, kind: str = "reports") -> None:
        super().__init__(message)
        self.kind = kind


class ReportStream:
    """Keeps the index equal to what one agent reports.

    Owns the replica's share of the index and its `hello`, `heartbeat`, `reporting` and `agent_error`. The replica is
    `reporting` from the first heartbeat on that confirms a whole snapshot by its digest, until the stream is lost or
    another snapshot begins: nothing is credited that nobody vouches for, and its share is emptied. All that is done in
    turns (`gateway.fleet.turns`), between which requests are placed and other streams are followed. What a peer can
    make this side keep is one frame and one share of the index, which has a bound of its own.
    """

    def __init__(
        self,
        replica: Replica,
        agent: httpx.URL,
        index: PrefixIndex,
        client: httpx.AsyncClient,
        *,
        token: str,
        route_seed: int,
        on_hello: Callable[[Replica, Hello], None],
        on_model_files: Callable[[Replica, ModelFiles], Awaitable[None]] | None,
        on_fetch: Callable[[FetchRecord], None],
        on_heartbeat: Callable[[str], None] = lambda replica: None,
        turns: Turns | None = None,
        on_reporting: Callable[[Replica], None] = lambda replica: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_heartbeat` is told the replica's id when a heartbeat has shown that the index is what the agent has;
        before the first such since its reports were last believed `on_reporting` is told of the replica. Without
        `on_model_files` they are not asked for."""
        self.replica_id = replica.id
        self._replica = replica
        self._agent = agent
        self._index = index
        self._client = client
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._seed_check = Namespace("").root(route_seed)
        self._on_hello = on_hello
        self._on_model_files = on_model_files
        self._on_fetch = on_fetch
        self._on_heartbeat = on_heartbeat
        self._turns = turns or Turns()
        self._on_reporting = on_reporting
        self._clock = clock
        self._heard_at = self._silent_s = 0.0
        """When the last heartbeat was read, and how much of the time since was spent waiting for another."""
        self._changes: list[Stored | Removed] = []
        self._disbelieved = ""
        self._taken_up = 0
        self._epoch = self._seq = -1
        self._next_part: int | None = 0
        """Of the snapshot that is being received; None once it is whole."""
        self._verified = False
        self.snapshots = 0
        self.losses: dict[str, int] = {}

    def resync(self, why: str) -> None:
        """Give up the stream at its next report, and begin again with a snapshot."""
        self._disbelieved = why

    async def follow(self) -> None:
        """Connect, follow, and connect again, until cancelled."""
        attempt = 0
        while True:
            try:
                await self._session()
            except StreamLost as lost:
                await self._lost(str(lost), lost.kind)
            except httpx.HTTPError as error:
                await self._lost(f"{type(error).__name__}: {error}", "connection")
            except (KvStoreError, msgspec.MsgspecError, RecursionError) as error:
                await self._lost(str(error), "protocol")
            except Exception:  # a watch that has died silently is worse than any one report
                log.exception("following the reports of %s failed", self._replica.id)
                await self._lost("internal error, see the log", "internal")
            # A snapshot alone does not reset it: one that never agrees with its digest would be asked for at once.
            attempt = 0 if self._verified else attempt + 1
            self._verified = False
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])

    async def _session(self) -> None:
        replica = self._replica
        with tracer.start_as_current_span("gateway.connect_agent", attributes={"replica": replica.id}):
            hello = decode_hello(await self._get("/v1/hello", MAX_HELLO_BYTES, GREETING_S))
            if hello.replica_id != replica.id:
                raise StreamLost(f"the agent at {self._agent} says it is {hello.replica_id!r}, expected {replica.id!r}")
            if hello.route_seed_check != self._seed_check:
                raise StreamLost(
                    "agent and gateway have different route seeds: set --route-seed and placement.route_seed alike"
                )
            if replica.dp_rank is not None and hello.dp_rank != replica.dp_rank:
                raise StreamLost(
                    f"the agent speaks for data-parallel rank {hello.dp_rank}, the replica is rank {replica.dp_rank}: "
                    "set --dp-rank and dp_rank alike"
                )
            replica.hello = hello
            self._on_hello(replica, hello)
            if self._on_model_files is not None and "exact" in hello.identity_modes:
                files = await self._get("/v1/model-files", MAX_FILES_BYTES, FILES_S)
                await self._on_model_files(replica, msgspec.msgpack.decode(files, type=ModelFiles))
            headers = self._traced()
        url = self._agent.join(f"/v1/reports?protocol={PROTOCOL_VERSION}")
        self._epoch, self._next_part, self._silent_s = -1, 0, 0.0
        timeout = httpx.Timeout(SILENCE_S)
        async with _within(GREETING_S, url.path) as limit, self._answer(url, headers, timeout) as response:
            limit.reschedule(None)
            reader = FrameReader()
            asked = self._heard_at = self._clock()
            async for data in response.aiter_raw():
                self._silent_s += self._clock() - asked
                await self.take(reader, data)
                asked = self._clock()
                if self._silent_s > SILENCE_S or asked - self._heard_at > UNVOUCHED_S:
                    raise StreamLost(f"no heartbeat for {asked - self._heard_at:.1f} s", "connection")
        raise StreamLost("agent closed the report stream")

    async def take(self, reader: FrameReader, data: bytes) -> None:
        """Applies what has arrived. Raises ProtocolError, and StreamLost where it cannot be followed."""
        self._turns.begin()
        try:
            for report in reader.feed(data):
                await self._apply(report)
                await self._turns.pass_on()
            await self._flush()
        finally:
            self._turns.end()

    async def _get(self, path: str, limit: int, seconds: float) -> bytes:
        url, timeout = self._agent.join(path), httpx.Timeout(10.0)
        async with _within(seconds, path), self._answer(url, self._traced(), timeout) as response:
            return await self._read(response, limit)

    @contextlib.asynccontextmanager
    async def _answer(
        self, url: httpx.URL, headers: dict[str, str], timeout: httpx.Timeout
    ) -> AsyncIterator[httpx.Response]:
        """A 200. Raises StreamLost for anything else."""
        async with self._client.stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.status_code != 200:
                text = (await self._read(response, MAX_HELLO_BYTES))[:200].decode(errors="replace")
                raise StreamLost(f"{url.path} answered {response.status_code}: {text}", "status")
            yield response

    async def _read(self, response: httpx.Response, limit: int) -> bytes:
        """The body as it travels. Raises StreamLost when it is longer than `limit`."""
        body = bytearray()
        async for chunk in response.aiter_raw():
            self._turns.begin()
            body += chunk
            await self._turns.pass_on()
            self._turns.end()
            if len(body) > limit:
                raise StreamLost(f"{response.url.path} answered more than {limit} bytes", "protocol")
        return bytes(body)

    def _traced(self) -> dict[str, str]:
        headers = {"accept-encoding": "identity", **self._headers}
        propagate.inject(headers)
        return headers

    async def _apply(self, report: Report) -> None:
        if self._disbelieved:
            raise StreamLost(f"taken anew: {self._disbelieved}", "disbelieved")
        if isinstance(report, FetchRecord):  # says nothing about what is held
            if report.replica != self._replica.id:
                raise ProtocolError(f"a fetch of replica {report.replica!r} in the reports of {self._replica.id!r}")
            self._on_fetch(report)
            return
        if isinstance(report, Snapshot):
            await self._apply_part(report)
        elif self._epoch < 0:
            raise StreamLost("the stream does not begin with a snapshot")
        elif isinstance(report, Delta):
            await self._apply_delta(report)
        else:
            await self._apply_heartbeat(report)

    async def _apply_part(self, part: Snapshot) -> None:
        if part.part == 0:
            await self._begin_snapshot(part)
        if (part.epoch, part.seq, part.part) != (self._epoch, self._seq, self._next_part):
            raise StreamLost(
                f"gap: expected part {self._next_part} of the snapshot {self._epoch}/{self._seq}, "
                f"got {part.part} of {part.epoch}/{part.seq}"
            )
        await self._take_up(part.stored)
        self._next_part = part.part + 1
        if part.last:
            await self._flush()
            self._next_part = None
            self.snapshots += 1

    async def _begin_snapshot(self, first: Snapshot) -> None:
        """What was held is worth nothing from here on."""
        self._changes, self._taken_up = [], 0
        self._set_reporting(False, "receiving a snapshot")
        self._epoch, self._seq, self._next_part = first.epoch, first.seq, 0
        await self._empty()

    async def _apply_delta(self, delta: Delta) -> None:
        if (delta.epoch, delta.seq) != (self._epoch, self._seq + 1):
            raise StreamLost(f"gap: expected {self._epoch}/{self._seq + 1}, got {delta.epoch}/{delta.seq}")
        await self._take_up(delta.changes)
        self._seq = delta.seq

    async def _apply_heartbeat(self, beat: Heartbeat) -> None:
        self._replica.heartbeat = beat
        self._silent_s, self._heard_at = 0.0, self._clock()
        self._replica.others.told(beat, self._replica.load)
        if (beat.epoch, beat.seq) != (self._epoch, self._seq):
            raise StreamLost(f"gap: heartbeat is at {beat.epoch}/{beat.seq}, index at {self._epoch}/{self._seq}")
        if self._next_part is not None:
            return  # of a catalogue that has not all been told
        await self._flush()
        if beat.digest != self._index.digest(self._replica.id):
            raise StreamLost("digest differs from the agent's: the index has drifted")
        self._verified = True
        if not self._replica.reporting:
            self._set_reporting(True, "")
            self._on_reporting(self._replica)
        self._on_heartbeat(self._replica.id)

    async def _take_up(self, changes: Sequence[Change]) -> None:
        """The changes of one message, in order. Raises ProtocolError for more blocks than a message may have."""
        size = sum(0 if isinstance(change, Cleared) else len(change.keys) // 8 for change in changes)
        if size > MAX_CHANGED_BLOCKS:
            raise ProtocolError(f"{size} blocks in one message; the limit is {MAX_CHANGED_BLOCKS}")
        for change in changes:
            if isinstance(change, Cleared):
                await self._flush()
                await self._empty([change.tier])
            else:
                await self._change(change)

    async def _change(self, change: Stored | Removed) -> None:
        """Takes up a change. Changes of one kind that arrive together are applied together: the busier an agent is, the
        less each block of it costs."""
        _check(change)
        if self._changes and (type(change), change.tier) != (type(self._changes[0]), self._changes[0].tier):
            await self._flush()
        self._changes.append(change)
        self._taken_up += len(change.keys)
        if self._taken_up > MERGED_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        """Applies what was taken up, a few milliseconds' worth at a time, with others' turns in between. Raises
        ProtocolError when the replica has more blocks than it may have."""
        changes, self._changes, self._taken_up = self._changes, [], 0
        if not changes:
            return
        tier = changes[0].tier
        keys = _unpack([change.keys for change in changes])
        parents = _unpack([change.parents for change in changes if isinstance(change, Stored)])
        for begin in range(0, len(keys), PIECE_BLOCKS):
            end = begin + PIECE_BLOCKS
            if isinstance(changes[0], Stored):
                told, before = keys[begin:end], parents[begin:end]
                self._index.store(self._replica.id, tier, told, before, snapshot=self._next_part is not None)
            else:
                self._index.remove(self._replica.id, tier, keys[begin:end])
            await self._turns.pass_on()
        reported = sum(self._index.reported_blocks(self._replica.id, tier) for tier in Tier)
        if reported > MAX_REPLICA_BLOCKS:
            raise ProtocolError(f"{reported} blocks reported; the limit is {MAX_REPLICA_BLOCKS}")

    async def _empty(self, tiers: Sequence[Tier] = tuple(Tier)) -> None:
        for _ in self._index.clearing(self._replica.id, tiers):
            await self._turns.pass_on()

    def _set_reporting(self, reporting: bool, why: str) -> None:
        self._replica.reporting = reporting
        self._replica.agent_error = why

    async def _lost(self, why: str, kind: str) -> None:
        if self._replica.reporting or self._replica.agent_error != why:
            log.warning("reports of %s lost: %s", self._replica.id, why)
        self.losses[kind] = self.losses.get(kind, 0) + 1
        self._changes, self._taken_up, self._disbelieved = [], 0, ""
        self._set_reporting(False, why)
        self._turns.begin()
        await self._empty()
        self._turns.end()


def _check(change: Stored | Removed) -> None:
    """Raises ProtocolError for keys that are cut, or have no parents."""
    if len(change.keys) % 8:
        raise ProtocolError(f"packed keys must be a multiple of 8 bytes, got {len(change.keys)}")
    if isinstance(change, Stored) and len(change.keys) != len(change.parents):
        raise ProtocolError(f"{len(change.keys) / 8:g} keys but {len(change.parents) / 8:g} parents")


def _unpack(packed: list[bytes]) -> Keys:
    return np.frombuffer(b"".join(packed), "<u8").astype(np.uint64, copy=False)


@contextlib.asynccontextmanager
async def _within(seconds: float, path: str) -> AsyncIterator[asyncio.Timeout]:
    """Raises StreamLost for what has not ended by then."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError as error:
        raise StreamLost(f"{path}: no whole answer within {seconds:.0f} s", "connection") from error
