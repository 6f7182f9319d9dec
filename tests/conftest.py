"""Shared fixtures: free ports, and one deployment of real processes on the tiny model."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_env

from gateway.demo.cluster import Cluster, ClusterOptions, Ports

READY_S = 120.0
SHARED = Path(__file__).resolve().parents[1].parent / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run long property and soak tests too")
    parser.addoption("--vllm", action="store_true", help="run everything that needs real vLLM servers")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="only with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)
    for item in items:
        if item.get_closest_marker("vllm"):
            if not vllm_env.is_ready():
                item.add_marker(pytest.mark.skip(reason="no environment of vLLM: `make vllm` makes it"))
            elif not (config.getoption("--vllm") or item.get_closest_marker("vllm_smoke")):
                item.add_marker(pytest.mark.skip(reason="only with --vllm"))


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def tiny_cluster(
    *, replicas: int = 3, kv_tokens: int = 16_384, engine_flags: tuple[str, ...] = (), pool_bytes: int = 0
) -> Cluster:
    """A deployment of the tiny model on free ports, not started yet; with `pool_bytes` each agent has a pool of KV."""
    ports = free_ports(2 + 4 * replicas)
    each = [ports[2 + n * replicas : 2 + (n + 1) * replicas] for n in range(4)]
    return Cluster(
        ClusterOptions(
            ports=Ports(ports[0], ports[1], *each),
            model="tiny",
            served_name="tiny",
            kv_tokens=kv_tokens,
            engine_flags=("--threads", "1", "--dtype", "float32", *engine_flags),
            pool_bytes=pool_bytes,
            log_level="info",
        )
    )


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three engines, three agents and a gateway, shared by all tests that leave it as they found it."""
    with tiny_cluster() as running:
        running.start_all()
        asyncio.run(running.wait_ready(READY_S))
        yield running


@pytest.fixture(scope="session")
def gateway_url(cluster: Cluster) -> str:
    """The public address of the shared deployment's gateway, without `/v1`."""
    return cluster.url
