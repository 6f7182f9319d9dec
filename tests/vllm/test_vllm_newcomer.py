"""Two running vLLM servers, and one command that routes to them; then agents beside them, and exact predictions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator

import httpx
import openai
import pytest
from chats import play, read_chats, requests_of, summary
from cluster_support import READY_S
from parity_support import FIXTURES
from vllm_deployment import COMMAND, beside, serving
from vllm_models import model_directory
from vllm_server import BLOCK, VllmServer, start_servers

pytestmark = [pytest.mark.vllm, pytest.mark.vllm_smoke]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[VllmServer]]:
    with contextlib.ExitStack() as stack:
        model = model_directory("tiny")
        # Room for every block of the chats below: what eviction does is other tests' business.
        pair = [stack.enter_context(VllmServer(model, kv_tokens=48 * 1024, core=core)) for core in ("0", "1")]
        start_servers(pair)
        yield pair


async def test_one_command_routes_by_prefix(servers: list[VllmServer]) -> None:
    """No agent, no configuration: a conversation comes back to the server that has it, and others go elsewhere."""
    flags = [word for server in servers for word in ("--engine", server.url)]
    chats = read_chats(FIXTURES / "oasst_10.jsonl", 10)
    homes = []
    async with serving(*flags) as (url, _), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for number, chat in enumerate(chats):
            opening = {"role": "system", "content": f"You are assistant number {number}. " + "Be brief. " * 200}
            turns = [[opening, *messages] for messages in requests_of(chat)]
            went, hits = set(), []
            for messages in turns:
                raw = await client.chat.completions.with_raw_response.create(
                    model="tiny",
                    messages=messages,  # type: ignore[arg-type]
                    max_tokens=4,
                    temperature=0,
                )
                went.add(raw.headers["x-gateway-replica"])
                usage = raw.parse().usage
                assert usage is not None and usage.prompt_tokens_details is not None
                hits.append(usage.prompt_tokens_details.cached_tokens)
            assert len(went) == 1, f"conversation {number} moved"
            assert all(cached and cached >= 2 * BLOCK for cached in hits[1:]), hits
            homes += went
    assert set(homes) == {"replica-0", "replica-1"}


def test_with_agents_predictions_are_exact(servers: list[VllmServer]) -> None:
    chats = read_chats(FIXTURES / "tau_airline_10.jsonl", 4)
    with beside(servers) as cluster:
        for at in range(len(servers)):
            cluster.start_agent(at)
        cluster.start_gateway()
        asyncio.run(cluster.wait_ready(READY_S))
        # What is being computed when its like arrives may be computed by either, so one shared opening is there first.
        turns = asyncio.run(play(cluster, chats[:1]))
        turns += asyncio.run(play(cluster, chats[1:], at_once=2))
        replicas = httpx.get(f"{cluster.admin_url}/admin/replicas", trust_env=False).json()["replicas"]
        assert [replica["reporting"] for replica in replicas] == [True, True]
        where = [word for at in range(2) for word in ("--engine", servers[at].url, "--agent", cluster.agent_url(at))]
        examined = subprocess.run([COMMAND, "doctor", "--json", *where], capture_output=True, text=True, check=False)
        assert examined.returncode == 0, examined
        codes = {finding["code"] for finding in json.loads(examined.stdout)["findings"]}
        assert codes == {"pool_off"}, "events and routing only, and nothing wrong with that"
    assert len(turns) == sum(len(requests_of(chat)) for chat in chats)
    assert {turn.identity for turn in turns} == {"exact"}
    assert all(turn.text for turn in turns)
    misses = [turn for turn in turns if abs(turn.predicted - turn.cached) > BLOCK]
    assert summary("ours", turns, BLOCK)["within_one_block"] >= 0.98, misses
    assert sum(turn.cached for turn in turns) > 0.6 * sum(turn.prompt for turn in turns)
