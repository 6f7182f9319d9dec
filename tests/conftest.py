"""Which tests run, and the deployment of real processes that many of them share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import net_lab
import pytest
import vllm_env
from cluster_support import READY_S, tiny_cluster

from gateway.demo.cluster import Cluster


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run long property and soak tests too")
    parser.addoption("--vllm", action="store_true", help="run everything that needs real vLLM servers")
    parser.addoption("--net", action="store_true", help="run what cuts a network of namespaces apart; takes root")
    parser.addoption("--net-log", metavar="FILE", help="where to write what happened in it, as Markdown")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="only with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)
    net = [item for item in items if item.get_closest_marker("net")]
    if net and (reason := net_lab.why_not() if config.getoption("--net") else "only with --net"):
        for item in net:
            item.add_marker(pytest.mark.skip(reason=reason))
    for item in items:
        if item.get_closest_marker("vllm"):
            if not vllm_env.is_ready():
                item.add_marker(pytest.mark.skip(reason="no environment of vLLM: `make vllm` makes it"))
            elif not (config.getoption("--vllm") or item.get_closest_marker("vllm_smoke")):
                item.add_marker(pytest.mark.skip(reason="only with --vllm"))


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> int:
    """How much more a property test looks at than in an ordinary run: ten times with `--slow`."""
    return 10 if request.config.getoption("--slow") else 1


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
