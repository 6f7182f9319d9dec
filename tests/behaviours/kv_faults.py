"""What the tests of faults between replicas share: agents as processes that can be frozen and killed, behind links that
stall or break; engines of the tiny model; and what must not be left when all is over."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from agent_support import DEADLINE_S, until
from kv_link import HOST, Link
from kv_support import Agent
from loopback_ports import free_port

from kvstore.hint import NAME, Hint
from kvstore.messages import FetchOutcome, FetchRecord
from kvstore.slot import pitch_of
from kvstore.transfer.tcp_owner import LENGTH, Answer
from replica_agent.reference.prepare import prepare
from replica_agent.reference.runtime import Opened, running
from replica_agent.reference.settings import Settings

SIZE = 16
"""Tokens in a block."""

BLOCK_BYTES = 2 * 4 * 2 * SIZE * 32 * 4
"""Of the tiny model in float32: heads, layers, K and V, tokens, dims, bytes."""

PITCH = pitch_of(BLOCK_BYTES)
POOL = {"pool-bytes": str(16 * 1024 * 1024)}
TCP = POOL | {"transports": "tcp"}
AHEAD = len(LENGTH.pack(0)) + len(msgspec.msgpack.encode(Answer()))
"""Bytes that an owner sends over TCP before the first slot."""

SLACK_S = 8.0
"""What a busy host may add to the deadline and to the time that computing takes."""

ENDS_S = 30.0
"""Generous: a request of these tests takes a fraction of a second to compute, and no deadline is longer than this."""


def always_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes its few tokens about as fast as they are fetched, and on a busy machine a decision may take
    longer than an engine waits: here neither decides."""
    for question in ("worth_copying", "worth_fetching"):
        monkeypatch.setattr(f"replica_agent.kv.decision.Estimates.{question}", lambda *_: True)
    monkeypatch.setattr("replica_agent.reference.connector.DECISION_S", DEADLINE_S)
    monkeypatch.setattr("replica_agent.engines.pool_link._LONGEST_RETRY_S", 0.1)


def tokens(seed: int, count: int) -> list[int]:
    """A prompt that has nothing in common with one of another seed."""
    rng = random.Random(seed)
    return [rng.randrange(8, 4096) for _ in range(count)]


# Agents.


class AgentProcess:
    """An agent that can be frozen and killed. `start` may be called again after `kill`: same port, same socket."""

    def __init__(self, directory: Path, name: str, **flags: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.socket = directory / f"{name}.sock"
        self._flags = {
            "engine": f"http://{HOST}:1",
            "port": str(self.port),
            "replica-id": name,
            "kv-socket": str(self.socket),
        } | flags
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        argv = [text for name, value in self._flags.items() for text in (f"--{name}", value)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "replica_agent", *argv, stdout=asyncio.subprocess.DEVNULL, stderr=None
        )
        await until(self._answers, f"{self.name} up")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def hint(self, blocks: int, *, deadline_ms: int = 10_000, url: str = "") -> Hint:
        return Hint(request="r", source=self.name, url=url or self.url, blocks=blocks, deadline_ms=deadline_ms)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
            return await http.get(f"{self.url}{path}")

    async def fetches(self) -> list[dict[str, Any]]:
        """What came of its engine's searches, the oldest first."""
        return list(reversed((await self.get("/v1/fetches")).json()["fetches"]))

    async def ready(self) -> None:
        """An engine is connected, and peers can read what it saves."""

        async def look() -> bool:
            kv = (await self.get("/health")).json()["kv"]
            return bool(kv["engine_connected"] and kv["transports"])

        await until(look, f"{self.name} ready")

    async def quiet(self, within_s: float = DEADLINE_S) -> None:
        """Nothing is held for anybody any more."""

        async def idle() -> bool:
            page = (await self.get("/metrics")).text
            held = [
                _value(page, f'kvstore_pool_slots{{state="{state}"}}')
                for state in ("reserved", "quarantined", "pinned")
            ]
            return not any(held) and not _value(page, "kvstore_leases")

        await until(idle, f"{self.name} quiet", within_s=within_s)

    @contextlib.asynccontextmanager
    async def same_after(self) -> AsyncIterator[None]:
        """When this ends the process has as many descriptors as when it began."""
        before = _descriptors(self.pid)
        yield
        await until(lambda: not _descriptors(self.pid) - before, f"{self.name}: descriptors")

    async def _answers(self) -> bool:
        assert self._process is not None and self._process.returncode is None, f"{self.name} ended"
        try:
            return (await self.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False


@contextlib.asynccontextmanager
async def agent_process(directory: Path, name: str, **flags: str) -> AsyncIterator[AgentProcess]:
    """A running one, which is gone afterwards."""
    process = AgentProcess(directory, name, **flags)
    try:
        await process.start()
        yield process
    finally:
        await process.kill()


@contextlib.asynccontextmanager
async def linked(directory: Path, name: str, **flags: str) -> AsyncIterator[tuple[AgentProcess, Link, Link]]:
    """An agent process that peers reach over two links alone: one for HTTP, one for the bytes of the tcp transport."""
    port = free_port()
    async with Link(port) as data:
        flags = TCP | {"data-port": str(port), "data-advertise": f"{HOST}:{data.port}"} | flags
        async with agent_process(directory, name, **flags) as process, Link(process.port) as http:
            yield process, http, data


# Engines.


class Said(NamedTuple):
    """An answer, and how many tokens of the prompt were not computed for it."""

    text: str
    cached: int


class Engine:
    """A reference engine of the tiny model in this process, as a client sees it."""

    def __init__(self, http: httpx.AsyncClient, opened: Opened) -> None:
        self.http = http
        self.opened = opened

    async def complete(self, prompt: list[int], hint: Hint | None = None, **fields: Any) -> Said:
        """Greedy. Fails unless it ends in time."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
        if hint is not None:
            body["kv_transfer_params"] = {NAME: msgspec.to_builtins(hint)}
        async with asyncio.timeout(ENDS_S):
            response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return Said(answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def computed(self, prompt: list[int]) -> str:
        """What an engine answers that finds nothing anywhere: under a salt of its own the prompt is nobody's."""
        said = await self.complete(prompt, cache_salt=f"alone {os.urandom(8).hex()}")
        assert said.cached == 0
        return said.text

    async def timed(self, prompt: list[int]) -> tuple[str, float]:
        """`computed`, and the seconds that it took."""
        began = time.monotonic()
        return await self.computed(prompt), time.monotonic() - began

    async def teach(self, prompt: list[int]) -> None:
        """Computes a prompt, and sees to it that all its full blocks are in the agent's pool."""
        before = await self.metric("reference_engine:kv_saved_blocks_total")
        assert (await self.complete(prompt, max_tokens=1)).cached == 0
        wanted = before + len(prompt) // self.opened.service.engine.pool.block_size

        async def saved() -> bool:
            return await self.metric("reference_engine:kv_saved_blocks_total") >= wanted

        await until(saved, "saved")

    async def reset(self) -> None:
        """Empties its cache and the agent's pool; until that is sure it seeks nothing there."""
        (await self.http.post("/reset_prefix_cache")).raise_for_status()
        connector = self.opened.service.engine._connector
        saver = connector._saver  # type: ignore[union-attr]
        await until(lambda: saver.cleared == saver.clears, "cleared")

    async def metric(self, name: str) -> float:
        return _value((await self.http.get("/metrics")).text, name)

    @property
    def connected(self) -> bool:
        connector = self.opened.service.engine._connector
        return connector is not None and bool(connector.connected)  # type: ignore[attr-defined]

    async def check(self) -> None:
        """Its scheduler's own invariants."""
        engine = self.opened.service.engine
        await asyncio.wrap_future(engine.call(engine.scheduler.check))


def engine_settings(socket: Path | None, **changes: Any) -> Settings:
    """A tiny float32 engine of 128 blocks that publishes nothing."""
    base: dict[str, Any] = {
        "model": str(tiny()),
        "served_model_name": "tiny",
        "port": 0,
        "kv_tokens": 128 * SIZE,
        "dtype": "float32",
        "kv_events_endpoint": None,
        "kv_replay_endpoint": None,
        "kv_socket": None if socket is None else str(socket),
    }
    return Settings(**(base | changes))


@functools.cache
def tiny() -> Path:
    """The tiny model's directory."""
    return prepare("tiny")


@contextlib.asynccontextmanager
async def engine(beside: Agent | AgentProcess | None = None, **changes: Any) -> AsyncIterator[Engine]:
    """An engine, which is connected to the agent's pool if there is one."""
    socket = None
    if beside is not None:
        socket = beside.socket if isinstance(beside, AgentProcess) else beside.replica.settings.kv_socket
    async with running(engine_settings(socket, **changes)) as opened:
        async with httpx.AsyncClient(base_url=opened.url, timeout=ENDS_S * 2, trust_env=False) as http:
            subject = Engine(http, opened)
            if beside is not None:
                await until(lambda: subject.connected, "connected")
            if isinstance(beside, AgentProcess):
                await beside.ready()
            elif beside is not None:
                await until(lambda: bool(beside.kv.keeper.transports), "transports")
            yield subject
            await subject.check()


# What came of it.


@contextlib.contextmanager
def within(deadline_ms: float, recompute_s: float) -> Iterator[None]:
    """What is in it ends within deadline and recompute time."""
    began = time.monotonic()
    yield
    took, allowed = time.monotonic() - began, deadline_ms / 1e3 + recompute_s + SLACK_S
    assert took <= allowed, f"{took:.1f} s where {allowed:.1f} are allowed"


def told(agent: Agent) -> list[tuple[FetchOutcome, str]]:
    """Outcome and reason of each search of an agent's engine."""
    return [(record.outcome, record.reason) for record in agent.records]


async def recorded(agent: Agent, count: int = 1) -> FetchRecord:
    """The last of so many records, which come after the answer."""
    await until(lambda: len(agent.records) >= count, "recorded")
    assert len(agent.records) == count, agent.records
    return agent.records[-1]


async def counted(url: str, sample: str) -> float:
    """A sample of an agent's metrics page."""
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
        return _value((await http.get(f"{url}/metrics")).text, sample)


@contextlib.asynccontextmanager
async def leaving_nothing() -> AsyncIterator[None]:
    """When this ends there is no descriptor open and no child process that was not there when it began."""
    before, children = _descriptors(os.getpid()), _children()
    yield

    def left() -> list[str]:
        return sorted((_descriptors(os.getpid()) - before).elements()) + sorted(_children() - children)

    deadline = time.monotonic() + DEADLINE_S
    while found := left():
        assert time.monotonic() < deadline, f"left: {found}"
        await asyncio.sleep(0.05)
        gc.collect()


def _descriptors(pid: int) -> Counter[str]:
    """What a process has open, by kind: sockets and pipes have no names. Pools are kept for the life of a process."""
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(descriptor).partition(":[")[0]] += 1
    del found["/memfd:kvstore-pool (deleted)"]
    return found


def _children() -> set[str]:
    """Processes that this one has started. A thread that ends while it is looked at has none left."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update((task / "children").read_text().split())
    return found


def _value(page: str, sample: str) -> float:
    """A sample by its name and labels, or the sum over all labels."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((f"{sample} ", f"{sample}{{")) and not line.startswith("#")
    ]
    assert values, f"no sample {sample}"
    return sum(values)
