"""A gateway that only looks: it takes no request, and tells from the reports alone what routing would have saved."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from agent_support import MODEL, until
from claimed_cluster import BLOCK, BLOCK_BYTES, Claimed, claimed_cluster, prompt

SHARED = 12
"""Blocks of the document that every request begins with."""


async def _direct(cluster: Claimed, at: int, tokens: list[int]) -> None:
    """A client asks an engine itself, as before."""
    url = cluster.engines[at].url
    answer = await cluster.http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": tokens, "max_tokens": 1})
    assert answer.status_code == 200


def _question(number: int) -> list[int]:
    """The document, and then something of four blocks that nobody else asks."""
    return prompt(1, SHARED)[:-1] + prompt(100 + number, 4)


@pytest.fixture
async def observed() -> AsyncIterator[Claimed]:
    async with claimed_cluster(4, observe_only=True) as cluster:
        yield cluster


async def test_traffic_is_refused_in_words_that_clients_understand(observed: Claimed) -> None:
    url = observed.running.url
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", http_client=httpx.AsyncClient()) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model=MODEL, prompt="x")
        with pytest.raises(openai.InternalServerError):
            await client.models.list()
    assert (refused.value.status_code, refused.value.code) == (503, "observe_only")
    assert "send requests to the engines" in str(refused.value)
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert refused.value.request_id
    for method, path in (("POST", "/v1/embeddings"), ("GET", "/v1/models/m"), ("DELETE", "/v1/files/1")):
        answer = await observed.http.request(method, url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "observe_only"), path
    assert (await observed.http.get(f"{url}/health")).status_code == 200
    assert (await observed.http.get(f"{url}/ready")).json() == {"status": "ready"}
    assert observed.gateway._identifier.worker_pids == []


async def test_reports_alone_tell_what_routing_would_save(observed: Claimed) -> None:
    """Sixteen questions about one document, spread over four engines by somebody else, nobody waiting.

    Three copies of the document are more than one needs, and three times its prefill was another's already.
    """
    for number in range(16):
        await _direct(observed, number % 4, _question(number))
    await until(lambda: len(observed.gateway.fleet._index) == SHARED + 16 * 4, "not all is reported")
    report = (await observed.http.get(f"{observed.running.admin_url}/admin/duplication")).json()
    assert report["demand"] == "held"
    (prefix,) = report["prefixes"]
    assert (prefix["copies"], prefix["needed"], prefix["tokens"]) == (4, 1, SHARED * BLOCK)
    wasted = 3 * SHARED * BLOCK_BYTES
    assert (report["excess_bytes"], report["useful_bytes"], report["wasted_bytes"]) == (wasted, 0, wasted)
    assert prefix["wasted_bytes"] == wasted
    stored = (4 * SHARED + 16 * 4) * BLOCK
    assert report["recomputed"] == [
        {"model": MODEL, "stored_tokens": stored, "recomputed_tokens": 3 * SHARED * BLOCK},
    ]
    lines = await observed.metrics()
    assert f'prefix_gateway_recomputed_tokens_total{{model="{MODEL}"}} {3 * SHARED * BLOCK}.0' in lines


async def test_copies_that_the_load_needs_are_no_waste(observed: Claimed) -> None:
    """The same, while every engine has twelve requests: one may take 26 of all 48, so two copies are needed."""
    for engine in observed.engines:
        engine.running, engine.waiting = 10, 2
    for number in range(16):
        await _direct(observed, number % 4, _question(number))
    await until(lambda: len(observed.gateway.fleet._index) == SHARED + 16 * 4, "not all is reported")
    await until(lambda: observed.gateway.fleet.sequences() == 48, "the load is not reported")
    observed.gateway._load._observed = 0  # what was before does not count
    await until(lambda: observed.gateway._load.sequences == 48, "the load is not seen")
    report = (await observed.http.get(f"{observed.running.admin_url}/admin/duplication")).json()
    (prefix,) = report["prefixes"]
    assert (prefix["copies"], prefix["needed"]) == (4, 2)
    assert (report["useful_bytes"], report["wasted_bytes"]) == (prefix["useful_bytes"], prefix["wasted_bytes"])
    assert 2 * report["useful_bytes"] == report["wasted_bytes"] > 0


async def test_what_came_with_a_snapshot_was_not_seen_being_computed(observed: Claimed) -> None:
    for at in (0, 1):
        await _direct(observed, at, prompt(1))
    await observed.reported(1, 20)
    await observed.reported(0, 20)
    before = observed.gateway._recompute.totals()
    assert [each.recomputed_tokens for each in before] == [20 * BLOCK]
    observed.gateway.fleet.resync("replica-1", "asked for by a test")
    await observed.taken_anew(1, 1)
    await observed.reported(1, 20)
    assert observed.gateway._recompute.totals() == before


async def test_the_pages_of_the_report(observed: Claimed) -> None:
    for at in (0, 1, 2):
        await _direct(observed, at, prompt(1))
    await _direct(observed, 0, prompt(2))
    await observed.reported(0, 40)
    await observed.reported(1, 20)
    await observed.reported(2, 20)
    observed.gateway._history.sample()
    admin = f"{observed.running.admin_url}/admin/duplication"
    whole = (await observed.http.get(admin)).json()
    prefixes = (await observed.http.get(f"{admin}/prefixes", params={"top": 5})).json()
    assert prefixes == {name: whole[name] for name in ("useful_bytes", "wasted_bytes", "demand", "prefixes")}
    assert len(prefixes["prefixes"]) == 1
    replicas = (await observed.http.get(f"{admin}/replicas")).json()
    assert replicas == {"replicas": whole["replicas"], "pairs": whole["pairs"]}
    assert [each["held_bytes"] for each in replicas["replicas"]] == [40 * BLOCK_BYTES, *[20 * BLOCK_BYTES] * 2]
    assert [each["shared_bytes"] for each in replicas["pairs"]] == [20 * BLOCK_BYTES] * 3
    samples = (await observed.http.get(f"{admin}/history")).json()["samples"]
    assert samples[-1]["excess_bytes"] == samples[-1]["peak_bytes"] == whole["excess_bytes"] == 40 * BLOCK_BYTES
    assert [each["ago_s"] for each in samples] == sorted((each["ago_s"] for each in samples), reverse=True)
    assert samples[-1]["ago_s"] < 60
