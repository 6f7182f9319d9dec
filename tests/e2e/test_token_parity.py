"""The gateway's token ids are the engine's, on every message list of recorded conversations.

Both sides are real: the files come from the agent, the gateway's worker renders and tokenizes them, and the engine's
`/tokenize` answers with transformers' own ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
from cluster_support import READY_S
from loopback_ports import free_ports
from parity_support import FIXTURES, TRACES, sides

from gateway.demo.cluster import Cluster, ClusterOptions, Ports
from replica_agent.reference.prepare import cache_directory


@pytest.mark.parametrize(("name", "lists"), [("tau_airline_10.jsonl", 120), ("oasst_10.jsonl", 29)])
async def test_tokens_match_the_engine(cluster: Cluster, name: str, lists: int) -> None:
    async with sides(cluster.engine_url(0), cluster.agent_url(0)) as both:
        assert await both.compare_all(FIXTURES / name) == lists


@pytest.mark.parametrize("name", ["tau_airline_chat_a.jsonl.gz", "oasst_chat_a.jsonl.gz"])
async def test_tokens_match_the_engine_on_whole_traces(cluster: Cluster, name: str) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not beside the checkout")
    async with sides(cluster.engine_url(0), cluster.agent_url(0)) as both:
        assert await both.compare_all(TRACES / name) > 300


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Cluster]:
    """An engine and an agent of the larger model, where it has been prepared before."""
    if not list(cache_directory().glob("smollm2-*/config.json")):
        pytest.skip("smollm2 is not in the model cache: `prefix-gateway demo` puts it there")
    ports = free_ports(6)
    options = ClusterOptions(
        ports=Ports(ports[0], ports[1], *([port] for port in ports[2:])),
        model="smollm2",
        served_name="smollm2",
        kv_tokens=1_024,
        engine_flags=("--threads", "1"),
    )
    with Cluster(options) as running:
        running.start_engine(0)
        running.start_agent(0)
        deadline = time.monotonic() + READY_S
        while not _offers_files(running):
            running.check_alive()
            assert time.monotonic() < deadline, running.log("agent-0")
            time.sleep(0.1)
        yield running


def _offers_files(cluster: Cluster) -> bool:
    try:
        return httpx.get(f"{cluster.agent_url(0)}/v1/model-files", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(("name", "lists"), [("tau_airline_10.jsonl", 120), ("oasst_10.jsonl", 29)])
async def test_tokens_match_the_engine_with_smollm2(smollm2: Cluster, name: str, lists: int) -> None:
    async with sides(smollm2.engine_url(0), smollm2.agent_url(0)) as both:
        assert await both.compare_all(FIXTURES / name) == lists


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tau_airline_chat_a.jsonl.gz", "oasst_chat_a.jsonl.gz"])
async def test_tokens_match_the_engine_with_smollm2_on_whole_traces(smollm2: Cluster, name: str) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not beside the checkout")
    async with sides(smollm2.engine_url(0), smollm2.agent_url(0)) as both:
        assert await both.compare_all(TRACES / name) > 300
