"""Agents with pools of KV beside vLLM servers with the connector, and requests that fetch from one to the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from kv_link import Link
from loopback_ports import HOST, free_port
from vllm_engine import prompt_of
from vllm_models import kv_bytes_per_token
from vllm_server import BLOCK, VllmServer, start_servers

from kvstore.slot import pitch_of

READY_S = 60.0
SETTLE_S = 90.0
"""Longer than an agent keeps what might still be written by one that has hung up."""


def connector_flags(socket: Path, *, policy: str = "recompute", **more: Any) -> list[str]:
    """What a user gives vLLM to load the connector."""
    config = {
        "kv_connector": "PrefixGatewayConnector",
        "kv_connector_module_path": "replica_agent.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"socket": str(socket)} | more,
    }
    return ["--kv-transfer-config", json.dumps(config)]


@dataclass(frozen=True)
class Answer:
    """What a request was answered: its tokens, and how many of its prompt's were cached."""

    tokens: list[int]
    cached: int


class PooledEngine:
    """A server with the connector, and the agent process beside it; leaving the context stops both.

    The agent may be killed, frozen and started again, at the same port and socket. `agent` are flags that it gets
    instead of ours, `token` is the deployment's.
    """

    def __init__(
        self,
        model: Path,
        name: str,
        *,
        pool_blocks: int = 256,
        flags: Sequence[str] = (),
        agent: Mapping[str, str] | None = None,
        token: str = "",
        **more: Any,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="prefix-gateway-pool-")
        self.socket = Path(self._directory.name) / "agent.sock"
        self.replica = name
        self.blocks = more["kv_tokens"] // BLOCK
        self._fresh = itertools.count(10**9)
        """Parts of prompts that nobody else uses."""
        self.server = VllmServer(model, flags=[*connector_flags(self.socket), *flags], **more)
        self._port = free_port()
        self.pitch = pitch_of(kv_bytes_per_token(model, 4) * BLOCK)
        self._pool_bytes = pool_blocks * self.pitch
        self._flags = dict(agent or {})
        self._environ = os.environ | ({"REPLICA_AGENT_TOKEN": token} if token else {})
        self._agent: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(trust_env=False, timeout=60)
        self._access = {"authorization": f"Bearer {token}"} if token else {}

    @property
    def agent_url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def __enter__(self) -> PooledEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self.kill_agent()
        self.server.__exit__(kind, error, trace)
        self._directory.cleanup()

    def start_agent(self, **more: str) -> None:
        """Start it, and wait until it answers. `more` flags are for this life alone."""
        assert self._agent is None
        flags = {
            "engine": self.server.url,
            "kv-events": self.server.events(),
            "kv-replay": self.server.replay(),
            "port": str(self._port),
            "replica-id": self.replica,
            "kv-socket": str(self.socket),
            "pool-bytes": str(self._pool_bytes),
            # Whether it pays is not the question here.
            "fetch-margin": "-1000",
            "transports": "shm,tcp",
            "debug": "on",
            "log-level": "warning",
            **self._flags,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
        command = [sys.executable, "-m", "replica_agent"]
        command += [word for name, value in flags.items() for word in (f"--{name}", value)]
        self._agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=self._environ)
        self._until(lambda: self._ask("/health") is not None, READY_S)

    def kill_agent(self) -> None:
        """kill -9."""
        if self._agent is not None:
            self._agent.kill()
            self._agent.wait()
            self._agent = None

    def signal_agent(self, number: signal.Signals) -> None:
        """SIGSTOP freezes it, SIGCONT lets it go on."""
        assert self._agent is not None
        os.kill(self._agent.pid, number)

    def wait_connected(self) -> None:
        """Until every process of the engine has found the agent: something is saved."""
        self._until(lambda: self._kv().get("transports"), READY_S)

        def saved() -> bool:
            if not self.held:
                self.complete(prompt_of(next(self._fresh), extra=1), tokens=1)
            return self.held > 0

        self._until(saved, READY_S)

    @property
    def held(self) -> int:
        """Blocks in the pool."""
        return int((self._kv().get("pool") or {}).get("held", 0))

    def wait_saved(self, blocks: int) -> None:
        """Until the pool holds so many blocks."""
        self._until(lambda: self.held >= blocks, READY_S)

    def fetches(self) -> list[dict[str, Any]]:
        """What came of the engine's searches in this life of the agent, the oldest first."""
        told = self._ask("/v1/fetches")
        assert told is not None
        return list(reversed(told["fetches"]))

    def wait_quiet(self, *, for_good: bool = False) -> None:
        """Until nothing is held for anybody any more, by the agent's own check; `for_good`: not even what only time
        gives back, after somebody has hung up."""
        passing = {"held"} if for_good else {"held", "quarantined", "pinned"}

        def quiet() -> bool:
            told = self._ask("/debug/check")
            assert told is not None
            return not any(count for name, count in told["kv"].items() if name not in passing)

        self._until(quiet, SETTLE_S)

    def hint(self, prompt: Sequence[int], *, request: str = "r", deadline_ms: int = 10_000) -> dict[str, Any]:
        """That this engine holds a prompt, as the gateway says it."""
        told = {
            "request": request,
            "source": self.replica,
            "url": self.agent_url,
            "blocks": max(1, (len(prompt) - 1) // BLOCK),
            "deadline_ms": deadline_ms,
        }
        return {"kv_transfer_params": {"prefix_gateway": told}}

    def complete(self, prompt: Sequence[int], *, tokens: int = 12, timeout: float = 120, **more: Any) -> Answer:
        """A request to the server; anything but an answer fails the test. Raises httpx.TimeoutException."""
        body = {
            "model": self.server.name,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        response = self._http.post(f"{self.server.url}/v1/completions", json=body, timeout=timeout)
        assert response.status_code == 200, response.text
        told = response.json()
        details = told["usage"]["prompt_tokens_details"]
        return Answer(told["choices"][0]["token_ids"], int(details["cached_tokens"]) if details else 0)

    async def completes(self, prompt: Sequence[int], **more: Any) -> Answer:
        """The same, beside others."""
        return await asyncio.to_thread(self.complete, prompt, **more)

    def wait_saving(self) -> None:
        """Until what is computed comes back from the pool after it has been evicted from the engine's own cache."""

        def comes_back() -> bool:
            prompt = prompt_of(*(next(self._fresh) for _ in range(4)), extra=1)
            first = self.complete(prompt)
            # Enough to evict some of it there, and so little that a pool of as many blocks keeps all of both.
            self.complete(prompt_of(*(next(self._fresh) for _ in range(self.blocks - 4))), tokens=1)
            again = self.complete(prompt)
            assert again.tokens == first.tokens
            # What was evicted before it was copied is not there, on a busy machine.
            return again.cached == 4 * BLOCK

        self._until(comes_back, READY_S)

    def metric(self, name: str) -> float:
        """A counter of the server, over all its labels."""
        lines = self._http.get(f"{self.server.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def _kv(self) -> dict[str, Any]:
        told = self._ask("/health") or {}
        return told.get("kv") or {}

    def _ask(self, path: str) -> Any:
        try:
            response = self._http.get(f"{self.agent_url}{path}", headers=self._access, timeout=5)
        except httpx.HTTPError:
            return None
        return response.json()

    def _until(self, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._agent is None or self._agent.poll() is None, "the agent ended"
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {self._ask('/debug/check')}"
            time.sleep(0.05)


@contextlib.asynccontextmanager
async def stoppable(source: PooledEngine, *, pool_blocks: int = 512) -> AsyncIterator[tuple[Link, dict[str, str]]]:
    """Its agent anew, with an empty pool of so many blocks, and the link that all takes which is fetched from it;
    and the flags for another life of that agent. An ordinary agent is there when the context is left."""
    port = free_port()
    async with Link(port) as link:
        flags = {"transports": "tcp", "data_port": str(port), "data_advertise": f"{HOST}:{link.port}"}
        flags["pool_bytes"] = str(pool_blocks * source.pitch)
        source.kill_agent()
        source.start_agent(**flags)
        source.wait_connected()
        try:
            yield link, flags
        finally:
            link.resume()
            source.kill_agent()
            source.start_agent()


@dataclass(frozen=True)
class HalfFetched:
    """A request whose fetch stands still half way, what it asks for, the blocks to fetch, and the right answer."""

    name: str
    prompt: list[int]
    blocks: int
    answer: asyncio.Task[Answer]
    expected: Answer


async def half_fetched(
    source: PooledEngine, reader: PooledEngine, link: Link, seeds: Iterator[int], *, deadline_ms: int, tries: int = 12
) -> HalfFetched:
    """Fails unless one of some fresh prompts gets so far: a busy host may answer too late for a fetch to begin. The
    source's pool has room for all of them."""
    blocks = 10
    for _ in range(tries):
        seed = next(seeds)
        prompt, name = prompt_of(*range(seed, seed + blocks), extra=60), f"half-{seed}"
        held = source.held
        expected = source.complete(prompt)
        source.wait_saved(held + blocks)
        link.stopped.clear()
        link.stop_at = link.passed + blocks * source.pitch // 2
        hint = source.hint(prompt, request=name, deadline_ms=deadline_ms)
        answer = asyncio.create_task(reader.completes(prompt, **hint))
        stopped = asyncio.create_task(link.stopped.wait())
        await asyncio.wait((answer, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if link.stopped.is_set():
            assert not answer.done()
            return HalfFetched(name, prompt, blocks, answer, expected)
        link.resume()
        assert (await answer).tokens == expected.tokens
    raise AssertionError(f"no fetch of {tries} got half way: {reader.fetches()[-tries:]}")


def start_all(engines: Sequence[PooledEngine]) -> None:
    """Servers first, and without agents: they run on their own until there are some."""
    start_servers([engine.server for engine in engines])
    for engine in engines:
        engine.start_agent()
    for engine in engines:
        engine.wait_connected()
