"""A whole fetch as an engine waits for it: from its question to its agent to the last block in the engine's memory.

Three processes, as on a host with two replicas: two agents, and this one in the place of both engines. Every round
saves new blocks at the owner, so that nothing of the round before can serve it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import itertools
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from kvstore.engine_messages import Accepted, EngineHello, Pending
from kvstore.hint import Hint
from kvstore.namespace import SLOT_LAYOUT
from kvstore.region import make_region, populate
from kvstore.slot import pitch_of
from kvstore.transfer.base import Region
from replica_agent.bench.peer import HOST
from replica_agent.bench.report import Whole
from replica_agent.engines.errors import PoolGone
from replica_agent.engines.load import Load
from replica_agent.engines.pool_client import PoolClient

SLOTS = 128
BLOCK_TOKENS = 16
LAYERS, KV_HEADS, HEAD_DIM, DTYPE = 30, 3, 64, "bfloat16"
BLOCK_BYTES = LAYERS * KV_HEADS * HEAD_DIM * 2 * 2 * BLOCK_TOKENS
"""A prompt of 2,048 tokens in blocks of 16, with the KV of SmolLM2-135M in bfloat16: 47 MB."""

_PROMPTS = 4
"""That are saved and then fetched, one after the other, and that a pool has room for: what is fetched pushes out what
was fetched before, as it does in a full one. A memcpy goes through as much memory: no cache has any of it either."""

_START_S = 60.0
_ROUND_S = 10.0
_WAIT_S = 0.002
_PIECE = 16
_STEPS = ("decide", "lease", "move", "verify", "confirm", "copy")


class _Agent(NamedTuple):
    name: str
    url: str
    client: PoolClient


async def whole_fetch(transport: str, rounds: int, seconds: float) -> Whole:
    """Fetches over one transport, at most `rounds` and for about so many `seconds`, each beside a memcpy of as many
    bytes."""
    megabytes = SLOTS * BLOCK_BYTES / 1e6
    try:
        async with _agents(transport) as (owner, reader), httpx.AsyncClient(trust_env=False) as http:
            bench = _Bench(owner, reader)
            told: list[tuple[float, float]] = []
            lost = 0
            end = time.monotonic() + seconds
            # The first ones connect, map the owner's memory and learn what a fetch takes.
            for at in range(-1, max(1, rounds // _PROMPTS)):
                if at > 0 and time.monotonic() >= end:
                    break
                result = await asyncio.to_thread(bench.round)
                came = [(seconds, memcpy) for seconds, memcpy in result if seconds is not None]
                lost = 0 if at < 0 else lost + len(result) - len(came)
                told += came if at >= 0 else []
            if not told:
                raise RuntimeError(f"none of {lost} fetches brought all blocks")
            records = (await http.get(f"{reader.url}/v1/fetches")).json()["fetches"]
            records = [record for record in records if record["outcome"] == "fetched"][: len(told)]
    except (PoolGone, TimeoutError, RuntimeError) as error:
        return Whole(path=transport, slots=SLOTS, megabytes=megabytes, failed=str(error) or type(error).__name__)
    return Whole(
        path=transport,
        slots=SLOTS,
        megabytes=megabytes,
        fetches=len(told),
        lost=lost,
        steps_ms={step: _ms(record[f"{step}_s"] for record in records) for step in _STEPS},
        total_ms=_ms(total for total, _ in told),
        memcpy_ms=_ms(memcpy for _, memcpy in told),
        times_memcpy=round(statistics.median(total / memcpy for total, memcpy in told), 2),
        best_times_memcpy=round(min(total for total, _ in told) / min(memcpy for _, memcpy in told), 2),
    )


def _ms(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


class _Bench:
    """Both engines: their blocks, and what they ask of their agents. Every method waits for what it does."""

    def __init__(self, owner: _Agent, reader: _Agent) -> None:
        self._owner = owner
        self._reader = reader
        self._pitch = pitch_of(BLOCK_BYTES)
        self._blocks = make_region(SLOTS, self._pitch)
        self._near, self._far = (make_region(_PROMPTS * SLOTS, self._pitch) for _ in range(2))
        for region in (self._blocks, self._near, self._far):
            populate(region, lambda: True)
        self._prompts = itertools.count()
        self._requests = itertools.count()

    def round(self) -> list[tuple[float | None, float]]:
        """Seconds of fetches, None for one that did not bring all blocks, and of a memcpy after each. Raises
        RuntimeError for other bytes than were saved."""
        prompts = [
            [hashlib.sha256(b"%d %d" % (next(self._prompts), at)).digest() for at in range(SLOTS)]
            for _ in range(_PROMPTS)
        ]
        for keys in prompts:
            self._save(keys)
        return [(self._fetch(keys), self._memcpy(at * SLOTS)) for at, keys in enumerate(prompts)]

    def _save(self, keys: Sequence[bytes]) -> None:
        client = self._owner.client
        # No more at once than the agent seals within a second.
        for first in range(0, SLOTS, _PIECE):
            piece = keys[first : first + _PIECE]
            reserved = client.reserve(piece, keys[first - 1] if first else b"")
            places = [place for place in reserved if place is not None]
            for at, place in enumerate(places, first):
                client.slot(place.slot)[:32] = keys[at]
            if len(places) < len(piece) or client.commit(piece, places, [True] * len(piece)) < len(piece):
                raise RuntimeError("the owner's pool did not take the blocks")

    def _fetch(self, keys: Sequence[bytes]) -> float | None:
        request, client = str(next(self._requests)), self._reader.client
        tokens = SLOTS * BLOCK_TOKENS + 1
        hint = Hint(
            request=request, source=self._owner.name, url=self._owner.url, blocks=SLOTS, deadline_ms=10_000
        ).signed("")
        began = time.perf_counter()
        answer: object = client.prepare(request, keys, 0, tokens, hint)
        while isinstance(answer, Pending):
            answer = client.poll(request, _WAIT_S)
        if not isinstance(answer, Accepted):
            return None
        load = Load(client, request, self._write, skip=0, count=SLOTS)
        while not load.done and time.perf_counter() < began + _ROUND_S:
            if load.waits:
                load.wait(_WAIT_S)
            load.copy(_PIECE)
        seconds = time.perf_counter() - began
        load.leave()
        if load.loaded < SLOTS:
            return None
        if any(self._blocks.memory[at * self._pitch :][:32] != key for at, key in enumerate(keys)):
            raise RuntimeError("other bytes than were saved")
        return seconds

    def _write(self, number: int, slot: memoryview) -> bool:
        _copy(self._blocks, number, ctypes.addressof(ctypes.c_char.from_buffer(slot)))
        return True

    def _memcpy(self, first: int) -> float:
        began = time.perf_counter()
        for at in range(first, first + SLOTS):
            _copy(self._far, at, self._near.address + at * self._pitch)
        return time.perf_counter() - began


def _copy(region: Region, number: int, address: int) -> None:
    ctypes.memmove(region.address + number * region.pitch, address, BLOCK_BYTES)


@contextlib.asynccontextmanager
async def _agents(transport: str) -> AsyncIterator[tuple[_Agent, _Agent]]:
    """Two agents that can fetch over `transport` alone, connected to. Raises TimeoutError."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield (
            await stack.enter_async_context(_agent("owner", directory, transport)),
            await stack.enter_async_context(_agent("reader", directory, transport)),
        )


@contextlib.asynccontextmanager
async def _agent(name: str, directory: Path, transport: str) -> AsyncIterator[_Agent]:
    port = free_port()
    path = directory / f"{name}.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replica_agent", "--replica-id", name, "--port", str(port), "--kv-socket", str(path)),
        # There is no engine, and its prefill is never measured: fetch, whatever it takes.
        *("--engine", f"http://{HOST}:{free_port()}", "--fetch-margin", "-1000", "--transports", transport),
        *("--pool-bytes", str(_PROMPTS * SLOTS * pitch_of(BLOCK_BYTES)), "--log-level", "error"),
    )
    client = None
    try:
        async with asyncio.timeout(_START_S), httpx.AsyncClient(trust_env=False) as http:
            url = f"http://{HOST}:{port}"
            while client is None:
                with contextlib.suppress(PoolGone):
                    client = await asyncio.to_thread(PoolClient, str(path), _HELLO)
                await asyncio.sleep(0.1)
            while transport not in (kv := await _health(http, url))["transports"]:
                if transport in kv["unavailable"]:
                    raise RuntimeError(kv["unavailable"][transport])
                await asyncio.sleep(0.1)
            # The pool's memory is being taken.
            await asyncio.sleep(1.0)
        yield _Agent(name, url, client)
    finally:
        if client is not None:
            client.close()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _health(http: httpx.AsyncClient, url: str) -> Any:
    with contextlib.suppress(httpx.HTTPError):
        return (await http.get(f"{url}/health")).json()["kv"]
    return {"transports": [], "unavailable": {}}


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


_HELLO = EngineHello(
    engine_id="bench",
    role="both",
    layers=LAYERS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    dtype=DTYPE,
    layout=SLOT_LAYOUT,
    block_size=BLOCK_TOKENS,
    block_bytes=BLOCK_BYTES,
    hash_algorithm="sha256",
    identity={"model": "bench"},
)
