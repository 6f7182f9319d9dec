"""Three tiny engines with an agent each, and one engine without: what a stress run runs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from loopback_ports import free_ports
from stress.processes import Processes
from stress.prompts import BLOCK

HOST = "127.0.0.1"
TOKEN = "stress"
COUNT = 3
KV_BLOCKS = 128
POOL_SLOTS = 160
READY_S = 90.0
TRANSPORTS = ("shm,tcp", "tcp,shm", "shm,tcp")
"""Of each agent: who prefers what decides, and two of them share a host."""

_PITCH = 9 * 4_096
"""A block of the tiny model in float32 with its trailer."""

_UNUSABLE = 2
"""How a process ends that cannot listen: somebody took its port between two of its lives."""


class Broken(Exception):
    """A part ended by itself, or answers with an error of its own."""


class Fleet:
    """Owns which parts are up; starts them, knows their addresses, looks into them. The processes are `processes`'."""

    def __init__(self, processes: Processes, http: httpx.AsyncClient) -> None:
        self.processes = processes
        self._http = http
        self._up: set[str] = set()
        ports = free_ports(1 + 4 * COUNT)
        self._oracle_port = ports[0]
        self._ports = [ports[1 + 4 * at : 5 + 4 * at] for at in range(COUNT)]

    @property
    def oracle_url(self) -> str:
        """The engine that has no agent."""
        return f"http://{HOST}:{self._oracle_port}"

    def engine_url(self, at: int) -> str:
        """Where an engine answers."""
        return f"http://{HOST}:{self._ports[at][0]}"

    def agent_url(self, at: int) -> str:
        """Where its agent does."""
        return f"http://{HOST}:{self._ports[at][1]}"

    def parts(self) -> list[str]:
        """Names of the engines and agents, without the oracle."""
        return [f"{kind}-{at}" for at in range(COUNT) for kind in ("engine", "agent")]

    def life(self, name: str) -> int | None:
        """Which of its lives a part is in, None from its death until it answers again. What fails while it stays the
        same has no excuse."""
        return self.processes.lives[name] if name in self._up else None

    async def start_all(self) -> None:
        """All parts, ready. Raises Broken."""
        engine = _engine_arguments(self._oracle_port, KV_BLOCKS * 8)
        self.processes.start("oracle", [*engine, "--kv-events-endpoint", "none", "--kv-replay-endpoint", "none"])
        for name in self.parts():
            self._start(name)
        await asyncio.gather(*(self._ready(name) for name in ("oracle", *self.parts())))
        await asyncio.gather(*(self._joined(at) for at in range(COUNT)))

    def kill(self, name: str) -> None:
        """Ends the life of a part that is up."""
        self._up.remove(name)
        self.processes.kill(name)

    async def restart(self, name: str) -> None:
        """A killed part's next life, until it answers. Raises Broken."""
        self._start(name)
        await self._ready(name)

    def raise_if_dead(self) -> None:
        """Raises Broken when a part has ended that nobody killed."""
        for name in self._up:
            status = self.processes.reap(name)
            if status is not None:
                raise Broken(f"{name} ended by itself, status {status}:\n{self.processes.log(name)[-4_000:]}")

    async def check(self, name: str) -> Mapping[str, Any] | None:
        """What `/debug/check` of a part counts; None from one that was killed. Raises Broken where a law is."""
        response = await self.ask(name, "GET", "/debug/check")
        found: Mapping[str, Any] | None = None if response is None else response.json()
        return found

    async def ask(self, name: str, method: str, path: str, **more: Any) -> httpx.Response | None:
        """The answer of a part; None from one that is not up, or is killed meanwhile. Raises Broken for any other
        failure, and TimeoutError of the caller's own."""
        life = self.life(name)
        if life is None:
            return None
        try:
            response = await self._http.request(method, self._url(name) + path, **more)
        except httpx.HTTPError as error:
            if life == self.life(name):
                raise Broken(f"{name} fails {method} {path}: {error!r}") from error
            return None
        if response.status_code != 200:
            raise Broken(f"{name} answers {method} {path} with {response.status_code}: {response.text}")
        return response

    async def fetches(self, at: int) -> Sequence[Mapping[str, Any]]:
        """The last records of an agent's life, newest first."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        response = await self.ask(f"agent-{at}", "GET", "/v1/fetches", headers=headers)
        records: Sequence[Mapping[str, Any]] = [] if response is None else response.json()["fetches"]
        return records

    def _start(self, name: str) -> None:
        kind, _, number = name.partition("-")
        at = int(number)
        http, agent, events, replay = self._ports[at]
        shared = self.processes.folder / f"kv-{at}.sock"
        addresses = [f"tcp://{HOST}:{port}" for port in (events, replay)]
        if kind == "engine":
            endpoints = ["--kv-events-endpoint", addresses[0], "--kv-replay-endpoint", addresses[1]]
            self.processes.start(name, [*_engine_arguments(http, KV_BLOCKS), *endpoints, "--kv-socket", str(shared)])
            return
        flags = {
            "--engine": self.engine_url(at),
            "--port": agent,
            "--replica-id": f"replica-{at}",
            "--kv-events": addresses[0],
            "--kv-replay": addresses[1],
            "--kv-socket": shared,
            "--pool-bytes": POOL_SLOTS * _PITCH,
            "--transports": TRANSPORTS[at],
            "--lease-ttl": 1,
            "--debug": "on",
        }
        script = str(Path(__file__).with_name("agent.py"))
        words = [str(word) for flag in flags.items() for word in flag]
        self.processes.start(name, [sys.executable, "-P", script, *words], {"REPLICA_AGENT_TOKEN": TOKEN})

    async def _ready(self, name: str) -> None:
        deadline = time.monotonic() + READY_S
        while not await self._healthy(name):
            status = self.processes.reap(name)
            if status == _UNUSABLE and "cannot listen" in self.processes.log(name)[-500:]:
                self._start(name)
            elif status is not None or time.monotonic() > deadline:
                raise Broken(f"{name} is not ready, status {status}:\n{self.processes.log(name)[-4_000:]}")
            await asyncio.sleep(0.1)
        self._up.add(name)

    def _url(self, name: str) -> str:
        kind, _, number = name.partition("-")
        if kind == "oracle":
            return self.oracle_url
        return self.engine_url(int(number)) if kind == "engine" else self.agent_url(int(number))

    async def _healthy(self, name: str) -> bool:
        try:
            return (await self._http.get(f"{self._url(name)}/health", timeout=5)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _joined(self, at: int) -> None:
        """Until an agent's engine has connected, and its transports are there."""
        deadline = time.monotonic() + READY_S
        kv: Mapping[str, Any] = {}
        while not (kv.get("engine_connected") and len(kv["transports"]) == 2):
            if time.monotonic() > deadline:
                raise Broken(f"agent-{at} has no engine: {kv}")
            kv = (await self._http.get(f"{self.agent_url(at)}/health", timeout=30)).json()["kv"]
            await asyncio.sleep(0.1)


def _engine_arguments(port: int, blocks: int) -> list[str]:
    flags = f"--model tiny --dtype float32 --threads 1 --port {port} --kv-tokens {blocks * BLOCK} --debug"
    return [sys.executable, "-m", "replica_agent.reference", *flags.split()]
