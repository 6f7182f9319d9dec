"""What tests of the reference engine share: the tiny model, an engine in the test process, a reader of its events."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from replica_agent.reference.prepare import prepare
from replica_agent.reference.runtime import Opened, running
from replica_agent.reference.settings import Settings

DEADLINE_S = 60.0
ANY_PORT = "tcp://127.0.0.1:*"


@functools.cache
def tiny_directory() -> Path:
    """The tiny model, built at most once."""
    return prepare("tiny")


def settings(**changes: Any) -> Settings:
    """A tiny engine on any free port, one thread, with events and debugging."""
    base: dict[str, Any] = {
        "model": "tiny",
        "port": 0,
        "debug": True,
        "kv_tokens": 4096,
        "kv_events_endpoint": ANY_PORT,
        "kv_replay_endpoint": ANY_PORT,
    }
    return Settings(**(base | changes))


@asynccontextmanager
async def client(**changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Opened]]:
    """A running tiny engine and an HTTP client for it."""
    async with (
        running(settings(**changes)) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=DEADLINE_S) as http,
    ):
        yield http, engine


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until `condition` holds; fails after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


async def metric(http: httpx.AsyncClient, name: str) -> float:
    """The sum of a metric's samples."""
    lines = (await http.get("/metrics")).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    assert values, f"no metric {name}"
    return sum(values)


def tokens(seed: int, count: int = 200) -> list[int]:
    """A prompt of its own for each seed."""
    return [(seed * 7919 + index * index * 31 + index) % 251 for index in range(count)]


async def complete(http: httpx.AsyncClient, prompt: list[int], **fields: Any) -> tuple[str, int]:
    """Greedy text, and how much of the prompt was cached."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def saved(http: httpx.AsyncClient, count: int) -> None:
    """Until the engine has saved so many blocks to its agent's pool."""

    async def check() -> bool:
        return await metric(http, "reference_engine:kv_saved_blocks_total") >= count

    await until(check)


def fold(events: Iterable[dict[str, Any]], held: Counter[int] | None = None) -> Counter[int]:
    """Copies held by wire hash, once `events` have been applied in order."""
    held = Counter() if held is None else held
    for event in events:
        match event["type"]:
            case "BlockStored":
                held.update(event["block_hashes"])
            case "BlockRemoved":
                held.subtract(event["block_hashes"])
            case "AllBlocksCleared":
                held.clear()
            case other:
                raise AssertionError(f"unknown event {other}")
        assert min(held.values(), default=0) >= 0, "a block was removed that was not held"
    return +held


async def replay(context: zmq.asyncio.Context, endpoint: str, start: int = 0) -> list[tuple[int, list[Any]]]:
    """Ask for past batches: (number, batch) each."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(endpoint)
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while True:
            empty, topic, number, payload = await asyncio.wait_for(socket.recv_multipart(), DEADLINE_S)
            assert (empty, topic) == (b"", b"")
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
    finally:
        socket.close(linger=0)


async def sse(response: httpx.Response) -> list[str]:
    """Data of all events of a stream, cut at line feeds alone."""
    body = await response.aread()
    return [line[6:].decode() for line in body.split(b"\n") if line.startswith(b"data: ")]
