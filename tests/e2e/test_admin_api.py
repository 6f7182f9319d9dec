"""The operator's API of a running gateway: what it tells, and that asking changes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import combinations
from typing import Any

import httpx
import pytest
from identity_support import identifying, model_files
from path_support import Parts
from prometheus_client.parser import text_string_to_metric_families

from gateway.api.explain import Explain
from gateway.demo.cluster import Cluster
from gateway.demo.questions import DOCUMENTS
from gateway.errors import RequestError
from gateway.path.identify import Identify

SETTLE_S = 60.0
NAMES = ["replica-0", "replica-1", "replica-2"]


def chat(document: int, question: str = "What is this?") -> dict[str, Any]:
    content = DOCUMENTS[document].text[:2_400]
    messages = [{"role": "system", "content": content}, {"role": "user", "content": question}]
    return {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        yield client


class Admin:
    """The admin port of the shared deployment."""

    def __init__(self, http: httpx.AsyncClient, cluster: Cluster) -> None:
        self.http = http
        self.cluster = cluster
        self.url = cluster.admin_url

    async def get(self, path: str, **params: Any) -> httpx.Response:
        return await self.http.get(f"{self.url}{path}", params=params)

    async def explain(self, body: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return await self.http.post(f"{self.url}/admin/explain", content=body)
        return await self.http.post(f"{self.url}/admin/explain", json=body)

    async def ask(self, document: int, pin: int) -> httpx.Response:
        headers = {"x-gateway-pin": f"replica-{pin}"}
        answer = await self.http.post(f"{self.cluster.url}/v1/chat/completions", json=chat(document), headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def counters(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every sample of the gateway's own metrics, but for those that go by the clock."""
        text = (await self.get("/metrics")).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("prefix_gateway_")
            and not sample.name.startswith(("prefix_gateway_load_announcements", "prefix_gateway_replica_warmth"))
        }

    async def idle(self) -> dict[str, Any]:
        """The answer of `/admin/replicas` once nothing runs, by the gateway and by the last heartbeat of each agent."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                answer = await self.get("/admin/replicas")
                assert answer.headers["content-type"] == "application/json"
                found: dict[str, Any] = answer.json()
                view = found["replicas"]
                if not any(each["running_sequences"] or each["decoding"]["sequences"] for each in view):
                    return found
                await asyncio.sleep(0.05)

    async def tables(self) -> list[set[str]]:
        """What each engine holds by its own table, once the gateway counts as many blocks."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                found = []
                for at in range(self.cluster.count):
                    table = (await self.http.get(f"{self.cluster.engine_url(at)}/debug/blocks")).json()
                    found.append({block["hash"] for block in table["blocks"]})
                view = (await self.get("/admin/replicas")).json()["replicas"]
                if [each["held_blocks"] for each in view] == list(map(len, found)):
                    return found
                await asyncio.sleep(0.05)


@pytest.fixture
def admin(http: httpx.AsyncClient, cluster: Cluster) -> Admin:
    return Admin(http, cluster)


async def test_replicas(admin: Admin) -> None:
    found = await admin.idle()
    assert [each["id"] for each in found["replicas"]] == NAMES
    for at, each in enumerate(found["replicas"]):
        assert each["engine"] == admin.cluster.engine_url(at)
        assert each["agent"] == admin.cluster.agent_url(at)
        assert (each["engine_up"], each["reporting"], each["routed_by"]) == (True, True, "reports")
        assert (each["engine_error"], each["agent_error"], each["models"]) == ("", "", ["tiny"])
        assert each["block_size"] == 16
        assert each["capacity_blocks"] == admin.cluster.options.kv_tokens // 16
        assert each["held_blocks"] <= each["capacity_blocks"]
        assert each["block_bytes"] > 0
        assert (each["running_sequences"], each["queued_prefill_tokens"]) == (0, 0)
        assert each["engine_load"]["epoch"] == each["epoch"] > 0
        assert (each["kv_events"], each["dp_rank"]) == ("connected", None)
        assert [problem["code"] for problem in each["problems"]] == ["pool_off"]
        assert each["fetch"]["state"].startswith("events and routing only: ")
        assert each["evicted_blocks"] == 0
        assert (each["draining"], each["prefill_tokens_per_s"] > 0) == (False, True)
        assert 0 < each["attention"] <= 1, "the agent has the model's config"
        assert (each["decoding"]["sequences"], each["decoding"]["context"]) == (0, 0.0)
        assert each["decoding"]["share"] == 0.0
        assert 0 < each["warmth"] <= 1
    index = found["index"]
    assert 0 < index["bytes"] < index["limit_bytes"] == 1 << 30
    assert index["blocks"] <= sum(each["held_blocks"] + each["pool_blocks"] for each in found["replicas"])
    assert index["evicted_blocks"] == 0
    identity = found["identity"]["tiny"]
    assert (identity["mode"], identity["why"], identity["off"]) == ("exact", "", [])


async def test_receipts(admin: Admin) -> None:
    answer = await admin.ask(0, pin=1)
    request_id = answer.headers["x-request-id"]
    receipt = (await admin.get(f"/admin/receipts/{request_id}")).json()
    assert (receipt["request_id"], receipt["replica"], receipt["reason"]) == (request_id, "replica-1", "pinned")
    assert (receipt["status"], receipt["outcome"], receipt["identity"]) == (200, "ok", "exact")
    assert (receipt["stream"], receipt["tried"], sorted(receipt["ring"])) == (False, ["replica-1"], NAMES)
    usage = answer.json()["usage"]
    assert receipt["prompt_tokens"] == usage["prompt_tokens"]
    assert receipt["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < receipt["ttft_s"] <= receipt["duration_s"]


async def test_a_refusal_has_a_receipt_too(admin: Admin) -> None:
    answer = await admin.http.post(f"{admin.cluster.url}/v1/chat/completions", content=b"{")
    receipt = (await admin.get(f"/admin/receipts/{answer.headers['x-request-id']}")).json()
    assert (receipt["status"], receipt["outcome"], receipt["replica"]) == (400, "invalid_json", None)


async def test_an_unknown_receipt_is_a_404(admin: Admin) -> None:
    answer = await admin.get("/admin/receipts/never-was")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "not_found"
    assert "never-was" in error["message"]


async def test_explain_gives_every_replicas_terms(admin: Admin) -> None:
    await admin.ask(1, pin=2)
    await admin.tables()
    answer = await admin.explain(chat(1, "Another question?"))
    assert answer.status_code == 200
    found = answer.json()
    assert (found["identity"], found["identity_fallback"]) == ("exact", "")
    assert found["units"] == found["prompt_tokens"] // 16
    placement = found["placement"]
    candidates = {each["replica"]: each for each in placement["candidates"]}
    assert sorted(candidates) == sorted(placement["ring"]) == NAMES
    assert sorted(each["ring_position"] for each in candidates.values()) == [0, 1, 2]
    for each in candidates.values():
        assert each["claims"] == "reports"
        assert each["within_bound"] is True
        assert each["cached_tokens"] % 16 == 0
        assert each["cost_s"] >= each["queue_s"] + each["prefill_s"] > 0
        assert each["eviction_s"] >= 0
    assert candidates["replica-2"]["cached_tokens"] > 500
    assert placement["predicted_cached_tokens"] == candidates[placement["replica"]]["cached_tokens"]


async def test_explain_changes_nothing(admin: Admin) -> None:
    """Not a counter, and not the place of the next such request, however often it is asked."""
    await admin.tables()
    await admin.idle()
    body = chat(2, "Explain this often?")
    first = (await admin.explain(body)).json()
    before = await admin.counters()
    assert any(name == "prefix_gateway_requests_total" for name, _ in before)
    for _ in range(40):
        last = (await admin.explain(body)).json()
    assert last == first
    after = await admin.counters()
    assert after == before
    answer = await admin.http.post(f"{admin.cluster.url}/v1/chat/completions", json=body)
    assert answer.headers["x-gateway-replica"] == first["placement"]["replica"]
    assert int(answer.headers["x-gateway-predicted-cached-tokens"]) == first["placement"]["predicted_cached_tokens"]
    assert await admin.counters() != before


async def test_explain_touches_no_state_of_placement() -> None:
    """The same object in this process: no traffic observed, no claim, nothing in flight."""
    parts = Parts()
    for replica in parts.fleet.replicas.values():
        replica.models = {"tiny": {}}
    async with identifying(model_files("tiny")) as identifier:
        explain = Explain(Identify(identifier, parts.fleet), parts.placer, parts.fleet)
        body = httpx.Request("POST", "http://x", json=chat(0)).content
        first = await explain(body)
        assert first["identity"] == "exact"
        assert all([await explain(body) == first for _ in range(20)])
    assert len(parts.placer.traffic._window) == 0
    assert len(parts.placer.pending) == 0
    assert [parts.placer.learned.held_units(name) for name in NAMES] == [0, 0, 0]
    assert set(parts.loads().values()) == {(0, 0)}
    parts.placer.check()
    for replica in parts.fleet.replicas.values():
        replica.engine_up = False
    with pytest.raises(RequestError) as raised:
        await explain(body)
    assert (raised.value.status, raised.value.code) == (503, "no_replica")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b'{"a":"\xff"', 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        ({}, 404, "model_not_found", "model"),
        ({"model": "absent", "messages": []}, 404, "model_not_found", "model"),
        ({"model": 7}, 400, "invalid_type", "model"),
        ({"model": "tiny"}, 400, "missing_field", "prompt"),
        (b'{"model": "tiny", "mod\\u0065l": "x", "messages": []}', 400, "duplicate_key", "model"),
        ({"model": "tiny", "messages": [], "add_generation_prompt": 1}, 400, "invalid_type", "add_generation_prompt"),
    ],
)
async def test_explain_of_a_bad_body_says_what_is_wrong(
    admin: Admin, body: Any, status: int, code: str, param: str | None
) -> None:
    answer = await admin.explain(body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


async def test_explain_takes_completions_and_odd_prompts(admin: Admin) -> None:
    ids = await admin.explain({"model": "tiny", "prompt": list(range(1, 65))})
    assert (ids.json()["identity"], ids.json()["prompt_tokens"], ids.json()["units"]) == ("exact", 64, 4)
    text = await admin.explain({"model": "tiny", "prompt": "Once upon a time"})
    assert text.json()["identity"] == "exact"
    odd = await admin.explain({"model": "tiny", "messages": {"not": "a list"}})
    assert (odd.status_code, odd.json()["identity"]) == (200, "text")
    assert odd.json()["identity_fallback"]
    assert (await admin.get("/admin/explain")).status_code == 405


async def test_duplication_equals_a_recount(admin: Admin) -> None:
    for document, pins in ((3, (0, 1, 2)), (4, (0, 2)), (5, (1,))):
        for pin in pins:
            await admin.ask(document, pin)
    tables = await admin.tables()
    view = (await admin.get("/admin/replicas")).json()["replicas"]
    size = view[0]["block_bytes"]
    copies = Counter(block for table in tables for block in table)
    found = (await admin.get("/admin/duplication", top=1_000)).json()
    assert found["held_bytes"] == sum(copies.values()) * size
    assert found["distinct_bytes"] == len(copies) * size
    assert found["excess_bytes"] == sum(count - 1 for count in copies.values()) * size > 0
    assert {each["replica"]: each["held_bytes"] for each in found["replicas"]} == {
        name: len(table) * size for name, table in zip(NAMES, tables, strict=True) if table
    }
    assert {tuple(each["replicas"]): each["shared_bytes"] for each in found["pairs"]} == {
        (NAMES[a], NAMES[b]): shared * size
        for a, b in combinations(range(3), 2)
        if (shared := len(tables[a] & tables[b]))
    }
    assert sum(each["excess_bytes"] for each in found["prefixes"]) == found["excess_bytes"]
    assert all(each["copies"] == len(each["holders"]) > 1 for each in found["prefixes"])
    (model,) = found["models"]
    assert (model["model"], model["tier"], model["excess_bytes"]) == ("tiny", "hbm", found["excess_bytes"])
    assert found["window"]["max_bytes"] >= found["excess_bytes"]


async def test_duplication_lists_as_many_as_asked_for(admin: Admin) -> None:
    for pin in (0, 1):
        await admin.ask(3, pin)
    await admin.tables()
    whole = (await admin.get("/admin/duplication", top=10**9)).json()
    assert 1 <= len(whole["prefixes"]) <= 1_000
    for top in (0, 1, -5):
        found = (await admin.get("/admin/duplication", top=top)).json()
        assert found["prefixes"] == whole["prefixes"][: max(0, top)]
        assert found["pairs"] == whole["pairs"][: max(0, top)]
        assert found["excess_bytes"] == whole["excess_bytes"]
    assert (await admin.get("/admin/duplication", top="many")).status_code == 422


async def test_metrics_are_prometheus_text_with_our_names(admin: Admin) -> None:
    await admin.ask(0, pin=0)
    await admin.idle()
    answer = await admin.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.name.startswith(("prefix_gateway_", "process_", "python_")) for family in families)
    assert all(family.documentation for family in families)
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    values = {(sample.name, sample.labels.get("replica")): sample.value for f in families for sample in f.samples}
    for name in NAMES:
        assert values["prefix_gateway_replica_up", name] == values["prefix_gateway_replica_reporting", name] == 1
        assert values["prefix_gateway_replica_running_sequences", name] == 0
    assert values["prefix_gateway_identity_exact", None] == 1
    assert (
        values["prefix_gateway_cached_tokens_total", "replica-0"]
        <= values["prefix_gateway_prompt_tokens_total", "replica-0"]
    )


@pytest.mark.parametrize(
    "path", ["/metrics", "/admin", "/admin/replicas", "/admin/duplication", "/admin/receipts/x", "/admin/explain"]
)
async def test_the_public_port_serves_nothing_of_it(http: httpx.AsyncClient, cluster: Cluster, path: str) -> None:
    for method in ("GET", "POST"):
        answer = await http.request(method, f"{cluster.url}{path}", json=chat(0))
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
