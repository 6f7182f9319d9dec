"""The gateway's token ids are those of a real vLLM, with its own chat rendering and the model's template."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agent_support import agent_running, until
from parity_support import FIXTURES, TRACES, sides
from vllm_engine import agent_settings
from vllm_models import model_directory
from vllm_server import VllmServer

from gateway.identity.chat import Dialect
from kvstore.messages import ModelFiles
from replica_agent.reference.errors import ModelError

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def server(request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    try:
        directory = model_directory(request.param)
    except ModelError as error:
        pytest.skip(str(error))
    with VllmServer(directory, name=request.param, kv_tokens=8192, dtype="bfloat16", events=False) as running:
        running.start()
        running.wait_ready()
        yield running


async def test_tokens_match_vllm(server: VllmServer) -> None:
    """Probes of every kind of request, then every message list of the recorded chats; no event is needed for it."""
    async with agent_running(agent_settings(server)) as (replica, url):
        await until(lambda: isinstance(replica.files, ModelFiles), "the model's files, from the directory vLLM names")
        async with sides(server.url, url) as both:
            assert (both.report.dialect, both.report.off, both.report.mismatches) == (Dialect.VLLM, frozenset(), ())
            assert both.report.refused == 0
            compared = [await both.compare_all(FIXTURES / name) for name in ("tau_airline_10.jsonl", "oasst_10.jsonl")]
            assert compared == [120, 29]
            for name in ("tau_airline_chat_a.jsonl.gz", "oasst_chat_a.jsonl.gz"):
                if (TRACES / name).exists():
                    assert await both.compare_all(TRACES / name) > 300
