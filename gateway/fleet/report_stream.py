"""Follows one replica's agent: its model files, then its report stream into the index."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import msgspec
from opentelemetry import propagate, trace

from gateway.fleet.replica import Replica
from gateway.placement.index import PrefixIndex
from kvstore.errors import KvStoreError, ProtocolError
from kvstore.identity import Namespace, unpack_keys
from kvstore.messages import (
    PROTOCOL_VERSION,
    Delta,
    FetchRecord,
    FrameReader,
    Heartbeat,
    Hello,
    ModelFiles,
    Report,
    Snapshot,
    Stored,
    Tier,
)

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)

SILENCE_S = 2.0
"""A stream without a frame for this long is lost: heartbeats come every 250 ms."""

MAX_HELLO_BYTES = 1 << 20
MAX_FILES_BYTES = 80 << 20
"""Agents send at most 64 MiB of files, and a little around them."""

BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
Wire = TypeVar("Wire")


class StreamLost(Exception):
    """The reports can be followed no further; the message says why, `kind` in a word fit for a metric."""

    def __init__(self, message: str, kind: str = "reports") -> None:
        super().__init__(message)
        self.kind = kind


class ReportStream:
    """Keeps the index equal to what one agent reports.

    Owns the replica's share of the index and its `hello`, `heartbeat`, `reporting` and `agent_error`. The share is
    emptied the moment the stream is lost, so nothing is credited that nobody vouches for.
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
        on_model_files: Callable[[Replica, ModelFiles], Awaitable[None]],
        on_fetch: Callable[[FetchRecord], None],
    ) -> None:
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
        self._parts: list[Snapshot] = []
        self._epoch = -1
        self._seq = -1
        self._verified = False
        self.snapshots = 0
        self.losses: dict[str, int] = {}

    async def follow(self) -> None:
        """Connect, follow, and connect again, until cancelled."""
        attempt = 0
        while True:
            try:
                await self._session()
            except StreamLost as lost:
                self._lost(str(lost), lost.kind)
            except httpx.HTTPError as error:
                self._lost(f"{type(error).__name__}: {error}", "connection")
            except (KvStoreError, msgspec.MsgspecError, RecursionError) as error:
                self._lost(str(error), "protocol")
            except Exception:  # a watch that has died silently is worse than any one report
                log.exception("following the reports of %s failed", self._replica.id)
                self._lost("internal error, see the log", "internal")
            # A snapshot alone does not reset it: one that never agrees with its digest would be asked for at once.
            attempt = 0 if self._verified else attempt + 1
            self._verified = False
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])

    async def _session(self) -> None:
        replica = self._replica
        with tracer.start_as_current_span("gateway.connect_agent", attributes={"replica": replica.id}):
            hello = await self._get("/v1/hello", msgspec.json.Decoder(Hello), MAX_HELLO_BYTES)
            if hello.protocol != PROTOCOL_VERSION:
                raise StreamLost(f"agent speaks protocol {hello.protocol}, this gateway {PROTOCOL_VERSION}")
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
            if "exact" in hello.identity_modes:
                files = await self._get("/v1/model-files", msgspec.msgpack.Decoder(ModelFiles), MAX_FILES_BYTES)
                await self._on_model_files(replica, files)
            headers = self._traced()
        url = self._agent.join("/v1/reports")
        timeout = httpx.Timeout(SILENCE_S)
        async with self._client.stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.status_code != 200:
                raise await _refused(response)
            reader = FrameReader()
            async for data in response.aiter_raw():
                for report in reader.feed(data):
                    self._apply(report)
        raise StreamLost("agent closed the report stream")

    async def _get(
        self, path: str, decoder: msgspec.json.Decoder[Wire] | msgspec.msgpack.Decoder[Wire], limit: int
    ) -> Wire:
        async with self._client.stream("GET", self._agent.join(path), headers=self._traced(), timeout=10.0) as response:
            if response.status_code != 200:
                raise await _refused(response)
            return decoder.decode(await _read(response, limit))

    def _traced(self) -> dict[str, str]:
        headers = {"accept-encoding": "identity", **self._headers}
        propagate.inject(headers)
        return headers

    def _apply(self, report: Report) -> None:
        if isinstance(report, FetchRecord):  # says nothing about what is held
            if report.replica != self._replica.id:
                raise ProtocolError(f"a fetch of replica {report.replica!r} in the reports of {self._replica.id!r}")
            self._on_fetch(report)
            return
        if isinstance(report, Snapshot):
            self._collect(report)
            return
        if self._parts:
            self._apply_snapshot()
        elif not self._replica.reporting:
            raise StreamLost("the stream does not begin with a snapshot")
        if isinstance(report, Delta):
            self._apply_delta(report)
        else:
            self._apply_heartbeat(report)

    def _collect(self, part: Snapshot) -> None:
        """Parts of a snapshot, of one tier after the other; the first report that is none says that it is whole."""
        if self._parts and part.epoch != self._parts[0].epoch:
            self._parts = []
        if not self._parts:
            self._set_reporting(False, "receiving a snapshot")
        self._parts.append(part)

    def _apply_snapshot(self) -> None:
        parts, self._parts = self._parts, []
        for tier in Tier:
            numbers = [part.part for part in parts if part.tier == tier]
            expected = next((part.parts for part in parts if part.tier == tier), 0)
            if numbers != list(range(expected)):
                raise StreamLost(f"snapshot of {tier.name} has parts {numbers}, expected {expected}")
        self._index.clear(self._replica.id)
        for part in parts:
            self._store(part.tier, part.keys, part.parents)
        self._epoch, self._seq = parts[-1].epoch, parts[-1].seq
        self.snapshots += 1
        self._set_reporting(True, "")

    def _apply_delta(self, delta: Delta) -> None:
        if (delta.epoch, delta.seq) != (self._epoch, self._seq + 1):
            raise StreamLost(f"gap: expected {self._epoch}/{self._seq + 1}, got {delta.epoch}/{delta.seq}")
        for change in delta.changes:
            if isinstance(change, Stored):
                self._store(change.tier, change.keys, change.parents)
            else:
                self._index.remove(self._replica.id, change.tier, unpack_keys(change.keys))
        self._seq = delta.seq

    def _apply_heartbeat(self, beat: Heartbeat) -> None:
        self._replica.heartbeat = beat
        if (beat.epoch, beat.seq) != (self._epoch, self._seq):
            raise StreamLost(f"gap: heartbeat is at {beat.epoch}/{beat.seq}, index at {self._epoch}/{self._seq}")
        if beat.digest != self._index.digest(self._replica.id):
            raise StreamLost("digest differs from the agent's: the index has drifted")
        self._verified = True

    def _store(self, tier: Tier, packed_keys: bytes, packed_parents: bytes) -> None:
        keys: array[int] = unpack_keys(packed_keys)
        parents: array[int] = unpack_keys(packed_parents)
        if len(keys) != len(parents):
            raise ProtocolError(f"{len(keys)} keys but {len(parents)} parents")
        self._index.store(self._replica.id, tier, keys, parents)

    def _set_reporting(self, reporting: bool, why: str) -> None:
        self._replica.reporting = reporting
        self._replica.agent_error = why

    def _lost(self, why: str, kind: str) -> None:
        if self._replica.reporting or self._replica.agent_error != why:
            log.warning("reports of %s lost: %s", self._replica.id, why)
        self.losses[kind] = self.losses.get(kind, 0) + 1
        self._parts = []
        self._index.clear(self._replica.id)
        self._set_reporting(False, why)


async def _read(response: httpx.Response, limit: int) -> bytes:
    """The body as it travels. Raises StreamLost when it is longer than `limit`."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            raise StreamLost(f"{response.url.path} answered more than {limit} bytes", "protocol")
    return bytes(body)


async def _refused(response: httpx.Response) -> StreamLost:
    text = (await _read(response, MAX_HELLO_BYTES))[:200].decode(errors="replace")
    return StreamLost(f"{response.url.path} answered {response.status_code}: {text}", "status")
