"""The gateway's token ids are the engine's, on every message list of recorded conversations.

Both sides are real: the files come from the agent, the gateway's worker renders and tokenizes them, and the engine's
`/tokenize` answers with transformers' own ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from conftest import READY_S, free_ports

from gateway.demo.cluster import Cluster, ClusterOptions, Ports
from gateway.identity import parity
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import IdentityMode, PromptRequest
from kvstore.identity import Namespace, token_keys
from kvstore.messages import ModelFiles
from replica_agent.reference.prepare import cache_directory

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
SEED = 11
AT_ONCE = 4

Messages = list[dict[str, Any]]


def message_lists(path: Path) -> Iterator[Messages]:
    """What clients sent: every conversation up to each reply of the assistant, and to its end."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    for line in text.splitlines():
        chat = json.loads(line)["messages"]
        yield from (chat[:at] for at, message in enumerate(chat) if message["role"] == "assistant" and at)
        yield chat


class Sides:
    """One model as the gateway tokenizes it and as its engine does."""

    def __init__(self, http: httpx.AsyncClient, engine: str, identifier: Identifier, model: str) -> None:
        self._http = http
        self._engine = engine
        self._identifier = identifier
        self._model = model

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        """The engine's ids."""
        response = await self._http.post(f"{self._engine}/tokenize", content=msgspec.json.encode(body))
        response.raise_for_status()
        ids: list[int] = response.json()["tokens"]
        return ids

    async def compare(self, messages: Messages) -> None:
        """Asserts that ids and keys of both sides are equal."""
        request = PromptRequest(
            model=self._model, namespace=Namespace(self._model), messages=msgspec.json.encode(messages)
        )
        theirs = await self.tokenize({"model": self._model, "messages": messages, "add_generation_prompt": True})
        identity = await self._identifier.identify(request)
        ours = await self._identifier.token_ids(request)
        assert ours == theirs
        assert (identity.mode, identity.tokens) == (IdentityMode.EXACT, len(theirs)), identity.fallback
        assert identity.keys == token_keys(request.namespace.root(SEED), theirs)

    async def compare_all(self, path: Path) -> int:
        """Compares every message list of a file; the number of them."""
        lists = list(message_lists(path))
        queue = iter(lists)

        async def worker() -> None:
            for messages in queue:
                await self.compare(messages)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        return len(lists)


@contextlib.asynccontextmanager
async def sides(engine: str, agent: str) -> AsyncIterator[Sides]:
    """Learns the model from a running agent as the gateway does: its files, then parity on the probes."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        response = await http.get(f"{agent}/v1/model-files")
        files = msgspec.msgpack.decode(response.raise_for_status().content, type=ModelFiles)
        identifier = Identifier(SEED, deadline_s=60.0)
        await identifier.start()
        try:
            await identifier.load(files)
            made = Sides(http, engine, identifier, files.model)
            report = await parity.check(identifier, files.model, made.tokenize)
            assert report.ok, report
            yield made
        finally:
            await identifier.close()


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
