"""A whole deployment on one machine: engines, agents and a gateway as processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from gateway.errors import GatewayError

STOP_S = 10.0
HOST = "127.0.0.1"


class ClusterError(GatewayError):
    """A part of the demo's deployment cannot be started as asked for."""


class PartDied(ClusterError):
    """A part ended or did not get ready; says which and shows its last words."""


@dataclass(frozen=True)
class Ports:
    """Where each part listens. Replica i takes the i-th port of each of the last four."""

    public: int
    admin: int
    engines: Sequence[int]
    agents: Sequence[int]
    events: Sequence[int]
    replays: Sequence[int]

    def named(self) -> list[tuple[str, int]]:
        """Every port with the flag that moves it."""
        several = (
            ("--engine-port", self.engines),
            ("--agent-port", self.agents),
            ("--events-port", self.events),
            ("--replay-port", self.replays),
        )
        return [("--port", self.public), ("--admin-port", self.admin)] + [(f, p) for f, ports in several for p in ports]


@dataclass(frozen=True)
class ClusterOptions:
    """What to start. `engine_flags` go to every engine as they are; with `pool_bytes` each agent keeps so much KV in
    shared memory, which its engine reaches over a Unix socket beside the logs."""

    ports: Ports
    model: str
    served_name: str
    kv_tokens: int
    engine_flags: Sequence[str] = ()
    pool_bytes: int = 0
    allow_pinning: bool = True
    log_level: str = "warning"


class Cluster:
    """The processes of one deployment; leaving the context stops every one of them.

    Owns the processes and the folder of their logs. Each runs in a session of its own, so that a Ctrl-C at the terminal
    reaches only the one that orders the stop.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.count = len(options.ports.engines)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._sessions: set[int] = set()
        self._logs = tempfile.TemporaryDirectory(prefix="prefix-gateway-")

    @property
    def url(self) -> str:
        """The gateway's public address."""
        return f"http://{HOST}:{self.options.ports.public}"

    @property
    def admin_url(self) -> str:
        """The gateway's admin address."""
        return f"http://{HOST}:{self.options.ports.admin}"

    def engine_url(self, at: int) -> str:
        """The address of one engine."""
        return f"http://{HOST}:{self.options.ports.engines[at]}"

    def agent_url(self, at: int) -> str:
        """The address of one agent."""
        return f"http://{HOST}:{self.options.ports.agents[at]}"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check_ports(self) -> None:
        """Raises ClusterError naming the flag of the first port that is taken, out of range, or wanted twice."""
        wanted: dict[int, str] = {}
        for flag, port in self.options.ports.named():
            if port > 65_535:
                raise ClusterError(f"port {port} is too high: choose a lower {flag}")
            if (other := wanted.setdefault(port, flag)) != flag:
                raise ClusterError(f"port {port} is wanted by {other} and by {flag}")
            if not _is_free(port):
                raise ClusterError(f"port {port} is taken: choose another with {flag}")

    def start_engine(self, at: int) -> None:
        """Start (again) one engine."""
        ports, options = self.options.ports, self.options
        self._start(
            f"engine-{at}",
            "replica_agent.reference",
            {
                "--model": options.model,
                "--served-model-name": options.served_name,
                "--host": HOST,
                "--port": ports.engines[at],
                "--kv-tokens": options.kv_tokens,
                "--kv-events-endpoint": f"tcp://{HOST}:{ports.events[at]}",
                "--kv-replay-endpoint": f"tcp://{HOST}:{ports.replays[at]}",
            }
            | self._socket(at),
            "--debug",
            *options.engine_flags,
        )

    def start_agent(self, at: int) -> None:
        """Start (again) one agent."""
        ports = self.options.ports
        self._start(
            f"agent-{at}",
            "replica_agent",
            {
                "--engine": self.engine_url(at),
                "--host": HOST,
                "--port": ports.agents[at],
                "--replica-id": f"replica-{at}",
                "--kv-events": f"tcp://{HOST}:{ports.events[at]}",
                "--kv-replay": f"tcp://{HOST}:{ports.replays[at]}",
            }
            | self._socket(at)
            | ({"--pool-bytes": self.options.pool_bytes} if self.options.pool_bytes else {}),
        )

    def start_gateway(self) -> None:
        """Start (again) the gateway."""
        ports = self.options.ports
        replicas = [
            {"id": f"replica-{at}", "engine": self.engine_url(at), "agent": self.agent_url(at)}
            for at in range(self.count)
        ]
        config = {
            "listen": {"host": HOST, "port": ports.public, "admin_host": HOST, "admin_port": ports.admin},
            "replicas": replicas,
            "placement": {"allow_pinning": self.options.allow_pinning},
            "telemetry": {"log_level": self.options.log_level},
        }
        path = Path(self._logs.name) / "gateway.yaml"
        path.write_text(json.dumps(config))
        self._start("gateway", "gateway", {}, "serve", "--config", str(path))

    def start_all(self) -> None:
        """Start everything; nothing is waited for."""
        for at in range(self.count):
            self.start_engine(at)
            self.start_agent(at)
        self.start_gateway()

    async def wait_ready(self, timeout_s: float) -> None:
        """Until every replica is up, reports, has its pool if any, and is identified exactly. Raises PartDied when one
        dies or it takes longer."""
        deadline = time.monotonic() + timeout_s
        state = "the gateway does not answer"
        async with httpx.AsyncClient(trust_env=False) as client:
            while time.monotonic() < deadline:
                self.check_alive()
                try:
                    response = await client.get(f"{self.admin_url}/admin/replicas", timeout=5.0)
                    found = response.json()
                except httpx.HTTPError:
                    await asyncio.sleep(0.1)
                    continue
                ready = [each for each in found["replicas"] if self._is_ready(each)]
                identity = found["identity"].get(self.options.served_name, {})
                if len(ready) == self.count and identity.get("mode") == "exact":
                    return
                state = f"{len(ready)} of {self.count} replicas ready, identity: {identity}"
                await asyncio.sleep(0.1)
        raise PartDied(f"not ready after {timeout_s:.0f} s: {state}")

    def _is_ready(self, replica: Mapping[str, Any]) -> bool:
        pooled = not self.options.pool_bytes or "namespace" in replica["fetch"]
        return bool(replica["engine_up"] and replica["reporting"] and pooled)

    def check_alive(self) -> None:
        """Raises PartDied with the last words of a process that has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise PartDied(f"{name} ended with status {process.returncode}:\n{self.log(name)}")

    def log(self, name: str, lines: int = 20) -> str:
        """The last lines a process wrote."""
        path = Path(self._logs.name) / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def pid(self, name: str) -> int:
        """The process id of `engine-0`, `agent-0`, `gateway`, ..."""
        return self._running[name].pid

    def kill(self, name: str) -> None:
        """kill -9, and reap."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """SIGTERM to all, the gateway first; SIGKILL to what is left after ten seconds."""
        processes = [self._running.pop(name) for name in sorted(self._running, key=lambda name: name != "gateway")]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._logs.cleanup()

    def leftovers(self) -> list[str]:
        """What is still there of all that was started: processes by their session (Linux), and ports by flag."""
        found = [f"process {pid}" for pid, session in _sessions() if session in self._sessions]
        for flag, port in self.options.ports.named():
            if not _is_free(port):
                found.append(f"port {port} ({flag})")
        return found

    def _socket(self, at: int) -> dict[str, object]:
        return {"--kv-socket": Path(self._logs.name) / f"kv-{at}.sock"} if self.options.pool_bytes else {}

    def _start(self, name: str, module: str, flags: Mapping[str, object], *arguments: str) -> None:
        valued = [word for flag, value in flags.items() for word in (flag, str(value))]
        with (Path(self._logs.name) / f"{name}.log").open("ab") as log:
            process = self._running[name] = subprocess.Popen(
                [sys.executable, "-m", module, *valued, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self._sessions.add(process.pid)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _sessions() -> Iterator[tuple[int, int]]:
    """Every process of this machine with its session, where /proc tells."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if fields[0] != "Z":
            yield int(stat.parent.name), int(fields[3])
