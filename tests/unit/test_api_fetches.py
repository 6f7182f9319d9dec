"""What the operator's API tells of fetches: records beside predictions, totals, receipts, pools, and explain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from fetch_support import record
from path_support import HELLO, Parts, exchange, identity

from gateway.api.admin import AdminApp
from gateway.api.explain import Explain
from gateway.duplication.history import History
from gateway.duplication.ledger import Ledger
from gateway.duplication.report import Reporter
from gateway.identity.identifier import Identifier
from gateway.path.identify import Identify
from gateway.path.usage import PromptTokensDetails, Usage
from kvstore.messages import FetchOutcome, Problem, Tier

PROMPT = identity(range(640))


class Admin:
    """A gateway's admin application over a fleet of three that a test says things about."""

    def __init__(self) -> None:
        self.parts = parts = Parts()
        identify, ledger = Identify(Identifier(seed=0), parts.fleet), Ledger(parts.index)
        app = AdminApp(
            parts.fleet,
            parts.index,
            identify,
            Reporter(ledger),
            History(ledger),
            parts.receipts,
            parts.fetches,
            Explain(identify, parts.placer, parts.fleet),
            parts.metrics.registry,
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")

    async def get(self, path: str) -> Any:
        response = await self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    made = Admin()
    yield made
    await made.http.aclose()
    await made.parts.client.aclose()


async def test_an_agent_without_events_is_told_apart_while_there_are_no_reports(admin: Admin) -> None:
    replica = admin.parts.fleet.replicas["replica-0"]
    replica.reporting, replica.agent_error = False, "receiving a snapshot"
    for connected, words in ((True, "unknown"), (False, "not connected when it said hello")):
        replica.hello = msgspec.structs.replace(HELLO, kv_events=connected)
        (told, *_) = (await admin.get("/admin/replicas"))["replicas"]
        assert told["kv_events"] == f"{words}: no reports: receiving a snapshot"
        assert (told["reporting"], told["routed_by"], told["agent_error"]) == (False, "learned", "receiving a snapshot")


async def test_records_newest_first_with_totals(admin: Admin) -> None:
    assert await admin.get("/admin/fetches") == {"fetches": [], "totals": {"by_outcome": {}, "by_link": []}}
    first = record(gateway_request="a")
    second = record(gateway_request="b", outcome=FetchOutcome.LATE, moved=2, total_s=0.3, source="replica-2")
    admin.parts.fetches.add(first)
    admin.parts.fetches.add(second)
    told = await admin.get("/admin/fetches")
    assert [each["gateway_request"] for each in told["fetches"]] == ["b", "a"]
    assert told["fetches"][1] == msgspec.to_builtins(first) | {"bytes": 1000, "regret_s": 0.0}
    assert (told["fetches"][0]["bytes"], told["fetches"][0]["regret_s"]) == (200, 0.3)
    fetched = {
        "count": 1,
        "bytes": 1000,
        "predicted_s": 0.04,
        "measured_s": 0.05,
        "regrets": 1,
        "regret_s": 0.0,
        "predicted_over_measured": pytest.approx(0.8),
    }
    late = {
        "count": 1,
        "bytes": 200,
        "predicted_s": 0.0,
        "measured_s": 0.0,
        "regrets": 1,
        "regret_s": 0.3,
        "predicted_over_measured": None,
    }
    assert told["totals"] == {
        "by_outcome": {"fetched": fetched, "late": late},
        "by_link": [
            {"source": "replica-0", "replica": "replica-1"} | fetched,
            {"source": "replica-2", "replica": "replica-1"} | late,
        ],
    }
    assert len((await admin.get("/admin/fetches?limit=1"))["fetches"]) == 1
    assert (await admin.get("/admin/fetches?limit=-1"))["fetches"] == []
    parts = admin.parts
    assert parts.count("prefix_gateway_fetches_total", outcome="fetched") == 1
    assert parts.count("prefix_gateway_fetches_total", outcome="late") == 1
    assert parts.count("prefix_gateway_fetch_bytes_total") == 1200
    assert parts.count("prefix_gateway_fetch_seconds_count") == 2


async def test_a_receipt_has_what_was_planned_and_what_came_of_it(admin: Admin) -> None:
    parts = admin.parts
    for name in parts.fleet.replicas:
        parts.pool(name)
    parts.hold("replica-0", PROMPT.keys, Tier.HBM, Tier.DRAM)
    parts.fleet.replicas["replica-0"].load.admit(5_000)
    made = exchange(PROMPT)
    parts.place.place(made)
    made.status, made.outcome = 200, "ok"
    made.usage = Usage(prompt_tokens=640, prompt_tokens_details=PromptTokensDetails(cached_tokens=624))
    parts.account.close(made)
    receipt = await admin.get("/admin/receipts/id-1")
    assert (receipt["fetch"]["source"], receipt["fetch"]["tokens"], receipt["fetch"]["counted"]) == (
        "replica-0",
        624,
        True,
    )
    assert 0 < receipt["fetch"]["seconds"] < receipt["fetch"]["deadline_s"]
    assert (receipt["predicted_cached_tokens"], receipt["cached_tokens"], receipt["fetched"]) == (624, 624, None)
    parts.fetches.add(record(gateway_request="id-1", outcome=FetchOutcome.PARTIAL, failed=9))
    receipt = await admin.get("/admin/receipts/id-1")
    assert receipt["cached_tokens"] == 624 - 9 * 16, "the engine had counted them before they failed"
    assert (receipt["fetched"]["outcome"], receipt["fetched"]["failed"]) == ("partial", 9)


async def test_replicas_say_in_words_what_their_pools_do(admin: Admin) -> None:
    parts = admin.parts
    parts.pool("replica-0")
    parts.pool("replica-1", acts=False)
    parts.pool("replica-2", namespace="other")
    parts.hold("replica-0", PROMPT.keys[:7], Tier.DRAM)

    async def states() -> list[str]:
        return [each["fetch"]["state"] for each in (await admin.get("/admin/replicas"))["replicas"]]

    assert await states() == [
        "fetches from its peers",
        "serves its peers, but only keeps records of what it would fetch",
        "nothing to fetch from: no other pool has KV of its namespace",
    ]
    told = (await admin.get("/admin/replicas"))["replicas"][0]
    assert (told["pool_blocks"], told["held_blocks"], told["fetch"]["slots"], told["fetch"]["acts"]) == (
        7,
        0,
        100,
        True,
    )
    assert told["fetch"]["link"] == {"latency_s": 0.001, "bytes_per_s": 1e8}
    policy = Problem(code="load_policy", message="loads are off", fix="a flag")
    parts.tell("replica-0", problems=[policy])
    parts.fleet.replicas["replica-1"].reporting = False
    parts.fleet.replicas["replica-1"].agent_error = "silent"
    gone = Problem(code="pool_unconnected", message="events and routing only: nobody is connected", fix="a flag")
    parts.tell("replica-2", fetch=None, problems=[gone])
    assert await states() == [
        "serves its peers, but fetches nothing: loads are off",
        "no fetches: no reports: silent",
        "events and routing only: nobody is connected",
    ]
    parts.tell("replica-2", problems=[])
    parts.fleet.replicas["replica-0"].agent = None
    parts.fleet.replicas["replica-0"].heartbeat = None
    assert (await states())[::2] == [
        "routing by hash only: no agent",
        "events and routing only: its agent does not say why",
    ]


async def test_replicas_say_whether_their_events_are_heard(admin: Admin) -> None:
    parts = admin.parts
    for name in parts.fleet.replicas:
        parts.pool(name)

    async def told() -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = (await admin.get("/admin/replicas"))["replicas"]
        return replicas

    off = Problem(code="events_off", message="the engine publishes none", fix="vLLM's --kv-events-config")
    parts.tell("replica-0", kv_events=True)
    parts.tell("replica-1", kv_events=False, problems=[off])
    parts.fleet.replicas["replica-2"].agent = None
    assert [each["kv_events"] for each in await told()] == [
        "connected",
        "not connected: the engine publishes none",
        "no agent",
    ]
    assert [each["problems"] for each in await told()] == [[], [msgspec.to_builtins(off)], []]
    assert "problems" not in (await told())[1]["engine_load"]
    parts.fleet.replicas["replica-1"].reporting = False
    parts.fleet.replicas["replica-1"].agent_error = "gap"
    assert ((await told())[1]["kv_events"], (await told())[1]["problems"]) == ("unknown: no reports: gap", [])


async def test_explain_shows_every_candidates_fetch(admin: Admin) -> None:
    """Token ids are not at hand here, so the placer is asked for what explain passes on as it is."""
    parts = admin.parts
    for name in parts.fleet.replicas:
        parts.pool(name)
    parts.hold("replica-0", PROMPT.keys, Tier.HBM, Tier.DRAM)
    placement = parts.placer.place(PROMPT, parts.fleet.views("m", PROMPT.mode))
    told = msgspec.to_builtins(placement)
    assert told["fetch"] is None
    assert {each["replica"]: (each["fetch_source"], each["fetch_tokens"]) for each in told["candidates"]} == {
        "replica-0": ("", 0),
        "replica-1": ("replica-0", 624),
        "replica-2": ("replica-0", 624),
    }
    assert HELLO.geometry is not None
    assert parts.fleet.views("m", PROMPT.mode)[0].block_bytes == HELLO.geometry.block_bytes(16) == 16_384
