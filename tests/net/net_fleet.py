"""Three gateways, three agents and three reference engines, each on a node of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx
from net_lab import Lab
from stress.processes import Processes

from gateway.demo.questions import DOCUMENTS

COUNT = 3
TOKEN = "net"
MODEL = "tiny"
READY_S = 120.0
SETTLE_S = 30.0
FIRST_BYTE_S = 5.0
"""A request whose engine is cut off goes elsewhere after this long."""


def prompt(document: int, question: int = 0, length: int = 1_800) -> dict[str, Any]:
    """A question about the head of a document."""
    asked = ("What is this about?", "Who should read this?", "What comes first?")[question]
    messages = [
        {"role": "system", "content": DOCUMENTS[document].text[:length]},
        {"role": "user", "content": asked},
    ]
    return {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class NetFleet:
    """Owns which processes run where; starts them, knows their addresses, reads what they say.

    Engines and agents of a replica share the Unix socket of its pool, everything else goes over the bridge. `http` is
    the client of the test that runs.
    """

    def __init__(self, lab: Lab, processes: Processes) -> None:
        self.lab = lab
        self.processes = processes
        self.http = httpx.AsyncClient()
        for kind in ("gateway", "agent", "engine"):
            for at in range(COUNT):
                lab.add(f"{kind}-{at}")

    def url(self, node: str) -> str:
        """The node's HTTP side: of a gateway the public one."""
        port = {"gateway": 8000, "agent": 8200, "engine": 8100}[node.partition("-")[0]]
        return f"http://{self.lab.address(node)}:{port}"

    def admin_url(self, at: int) -> str:
        """A gateway's admin side."""
        return f"http://{self.lab.address(f'gateway-{at}')}:8001"

    async def start(self) -> None:
        """Everything, until every gateway knows all replicas and both other gateways."""
        for at in range(COUNT):
            self._start_engine(at)
            self._start_agent(at)
            self.start_gateway(at)
        for at in range(COUNT):
            await self.wait(f"gateway-{at} is ready", lambda at=at: self.ready(at), READY_S)

    def start_gateway(self, at: int) -> None:
        """Starts (again) one gateway."""
        node = f"gateway-{at}"
        config = {
            "listen": {"host": "0.0.0.0", "admin_host": "0.0.0.0", "name": node},
            "replicas": [
                {"id": f"replica-{n}", "engine": self.url(f"engine-{n}"), "agent": self.url(f"agent-{n}")}
                for n in range(COUNT)
            ],
            "placement": {"allow_pinning": True},
            "limits": {"first_byte_timeout_s": FIRST_BYTE_S, "connect_timeout_s": 1.0, "retry_budget": 1.0},
        }
        path = self.processes.folder / f"{node}.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(path)]
        self.processes.start(node, self.lab.within(node, command), {"PREFIX_GATEWAY_AGENT_TOKEN": TOKEN})

    def _start_engine(self, at: int) -> None:
        node = f"engine-{at}"
        flags = f"--model tiny --served-model-name {MODEL} --dtype float32 --threads 1 --kv-tokens 16384 --debug"
        ends = (
            "--host 0.0.0.0 --port 8100 --kv-events-endpoint tcp://0.0.0.0:5557 --kv-replay-endpoint tcp://0.0.0.0:5657"
        )
        command = [sys.executable, "-m", "replica_agent.reference", *flags.split(), *ends.split()]
        self.processes.start(node, self.lab.within(node, [*command, "--kv-socket", self._socket(at)]))

    def _start_agent(self, at: int) -> None:
        node, engine = f"agent-{at}", self.lab.address(f"engine-{at}")
        flags = {
            "--engine": self.url(f"engine-{at}"),
            "--host": "0.0.0.0",
            "--port": 8200,
            "--replica-id": f"replica-{at}",
            "--kv-events": f"tcp://{engine}:5557",
            "--kv-replay": f"tcp://{engine}:5657",
            "--kv-socket": self._socket(at),
            "--pool-bytes": 64 << 20,
            "--transports": "tcp",
            "--data-port": 8300,
            "--data-advertise": f"{self.lab.address(node)}:8300",
            # The tiny model computes about as fast as it fetches: here that decides nothing.
            "--fetch-margin": -20,
            "--lease-ttl": 2,
            "--debug": "on",
        }
        words = [str(word) for flag in flags.items() for word in flag]
        command = self.lab.within(node, [sys.executable, "-m", "replica_agent", *words])
        self.processes.start(node, command, {"REPLICA_AGENT_TOKEN": TOKEN})

    def _socket(self, at: int) -> str:
        return str(self.processes.folder / f"kv-{at}.sock")

    # what they say

    async def get(self, url: str) -> Any:
        """JSON, None from a node that does not answer."""
        try:
            response = await self.http.get(url, timeout=3.0)
        except httpx.HTTPError:
            return None
        return response.json() if response.status_code == 200 else None

    async def replicas(self, gateway: int) -> list[dict[str, Any]]:
        """What a gateway says of the replicas; [] where it does not answer."""
        found = await self.get(f"{self.admin_url(gateway)}/admin/replicas")
        return found["replicas"] if found else []

    async def ready(self, gateway: int) -> bool:
        """Whether a gateway knows everything that there is to know."""
        found = await self.get(f"{self.admin_url(gateway)}/admin/replicas")
        return bool(
            found
            and all(mode["mode"] == "exact" for mode in found["identity"].values())
            and found["identity"]
            and all(
                each["engine_up"]
                and each["reporting"]
                and each["pool_blocks"] >= 0
                and "links" in each["fetch"]
                and len(each["others"]["gateways"]) == COUNT - 1
                for each in found["replicas"]
            )
        )

    async def held(self, engine: int) -> int:
        """Blocks that an engine has in its cache."""
        return len((await self.get(f"{self.url(f'engine-{engine}')}/debug/blocks"))["blocks"])

    async def true_everywhere(self, *gateways: int) -> bool:
        """Whether these gateways hold exactly as many blocks for each replica as its engine does."""
        truth = [await self.held(at) for at in range(COUNT)]
        views = [await self.replicas(at) for at in gateways]
        return all([each["held_blocks"] for each in view] == truth for view in views)

    async def explained(self, gateway: int, body: dict[str, Any]) -> dict[str, Any]:
        """A dry run: where the gateway would send it, and why."""
        response = await self.http.post(f"{self.admin_url(gateway)}/admin/explain", json=body, timeout=30)
        response.raise_for_status()
        placement: dict[str, Any] = response.json()["placement"]
        return placement

    async def counters(self, node: str) -> dict[str, float]:
        """The counters of a gateway or an agent that say what happened; {} where it does not answer."""
        url = self.admin_url(int(node[-1])) if node.startswith("gateway") else self.url(node)
        try:
            page = (await self.http.get(f"{url}/metrics", timeout=3.0)).text
        except httpx.HTTPError:
            return {}
        found = {}
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(_TOLD):
                found[_short(name)] = float(value)
        return found

    async def wait(self, what: str, condition: Any, seconds: float = SETTLE_S) -> float:
        """Until the condition holds; returns after how many seconds. Fails with the last words of all that died."""
        begin = time.monotonic()
        while not await condition():
            for name in [f"{kind}-{at}" for kind in ("engine", "agent", "gateway") for at in range(COUNT)]:
                status = self.processes.reap(name)
                assert status is None, f"{name} ended, status {status}:\n{self.processes.log(name)[-3_000:]}"
            if time.monotonic() - begin > seconds:
                logs = "\n".join(self.processes.log(f"gateway-{at}")[-1_500:] for at in range(COUNT))
                raise AssertionError(f"{what}: not within {seconds:g} s\n{logs}")
            await asyncio.sleep(0.1)
        return time.monotonic() - begin


def _short(name: str) -> str:
    """Without what all of them have."""
    for word in ("prefix_gateway_", "replica_agent_"):
        name = name.removeprefix(word)
    return name.replace("_total", "", 1).replace('"', "")


_TOLD = (
    "prefix_gateway_report_losses_total",
    "prefix_gateway_report_snapshots_total",
    "prefix_gateway_load_announcement_failures_total",
    "prefix_gateway_retries_total",
    "replica_agent_gateways_forgotten_total",
    "replica_agent_resyncs_total",
    "replica_agent_gaps_total",
    "replica_agent_replays_total",
    "replica_agent_dropped_streams_total",
    "replica_agent_fetches_total",
)
