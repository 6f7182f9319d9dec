"""A gateway and agents in front of real vLLM servers, as the processes that a user starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
from cluster_support import READY_S
from loopback_ports import free_ports
from vllm_server import VllmServer

from gateway.demo.cluster import Cluster, ClusterOptions, Ports

COMMAND = str(Path(sys.executable).with_name("prefix-gateway"))


def beside(servers: Sequence[VllmServer]) -> Cluster:
    """A deployment whose engines these are. They run on their own: start its agents and its gateway."""
    ports = free_ports(2 + len(servers))
    return Cluster(
        ClusterOptions(
            ports=Ports(
                ports[0],
                ports[1],
                engines=[server.port for server in servers],
                agents=ports[2:],
                events=[server.events_port for server in servers],
                replays=[server.replay_port for server in servers],
            ),
            model=str(servers[0].model),
            served_name=servers[0].name,
            kv_tokens=0,
            log_level="info",
        )
    )


@contextlib.asynccontextmanager
async def serving(*flags: str, token: str = "") -> AsyncIterator[tuple[str, str]]:
    """`prefix-gateway serve` with these flags, on free ports; its public and its admin address once it answers. `token`
    is the agents'."""
    port, admin = free_ports(2)
    command = [COMMAND, "serve", *flags, "--port", str(port), "--admin-port", str(admin)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=subprocess.DEVNULL,
        env=os.environ | ({"PREFIX_GATEWAY_AGENT_TOKEN": token} if token else {}),
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                assert process.returncode is None, "it ended"
                assert time.monotonic() < deadline, "it does not serve"
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"{url}/v1/models")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        yield url, f"http://127.0.0.1:{admin}"
    finally:
        process.terminate()
        await process.wait()
