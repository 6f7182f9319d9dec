"""A deployment whose network is cut apart and whose processes are frozen and killed: requests go on being answered
with the same words, nothing is credited that is not there, and counters say what happened.

Each test begins and ends with all of it in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import platform
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from net_fleet import COUNT, MODEL, READY_S, NetFleet, prompt
from net_lab import Lab
from net_traffic import Traffic
from stress.processes import Processes

from gateway.demo.questions import DOCUMENTS

pytestmark = pytest.mark.net
ALL = range(COUNT)
FROZEN_S = 20.0
CUT_S = 4.0
"""Longer than a gateway waits for the next heartbeat (`gateway.fleet.report_stream.SILENCE_S`)."""


class Log:
    """What happened, in words and counts, test after test. `grown`: by how much each node's counters grew over the
    last incident, from before until after it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.grown: dict[str, dict[str, float]] = {}

    def begin(self, title: str) -> None:
        self.lines += ["", f"## {title}", ""]

    def say(self, line: str) -> None:
        self.lines.append(f"* {line}")

    def answers(self, traffic: Traffic, when: str) -> None:
        """Asserts that they are right, and notes how many."""
        traffic.check()
        told = []
        for each in traffic.fresh():
            excused = f", {each.excused} failed" if each.excused else ""
            told.append(f"{each.right} right{excused} (slowest {each.slowest_s:.1f} s)")
        self.say(f"{when}, answers by gateway: {'; '.join(told)}")

    def grew(self, node: str, counter: str, label: str = "") -> float:
        """By how much a counter did, all its labels together or those with this one."""
        counts = self.grown[node].items()
        return sum(count for name, count in counts if name.partition("{")[0] == counter and label in name)

    def lost_and_followed(self, gateways: Iterable[int], replicas: Iterable[int]) -> None:
        """Asserts that these gateways counted what an outage of these replicas' agents is: reports lost, announcements
        that did not arrive, and a snapshot afterwards."""
        for at in gateways:
            for counter in ("report_losses", "report_snapshots", "load_announcement_failures"):
                for replica in replicas:
                    grew = self.grew(f"gateway-{at}", counter, f"{{replica=replica-{replica}")
                    assert grew >= 1, (f"gateway-{at}", counter, f"replica-{replica}", self.grown)

    def forgotten(self, agents: Iterable[int], gateways: int) -> None:
        """Asserts that these agents counted so many gateways of which they had heard nothing."""
        for at in agents:
            assert self.grew(f"agent-{at}", "gateways_forgotten") >= gateways, (f"agent-{at}", self.grown)


@pytest.fixture(scope="module")
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    kept = Log()
    yield kept
    if path := request.config.getoption("--net-log"):
        host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, shared"
        head = [
            f"# A network cut apart, {datetime.date.today().isoformat()}",
            "",
            f"    make test-net ARGS='--net-log {path}'",
            "",
            f"{host}, Python {platform.python_version()}. Three gateways, three agents and three tiny float32 engines,",
            "each in a network namespace of its own; one client of each gateway asks without end. Every answer that is",
            "counted had the expected words, and no engine had less in its cache than was promised, but where it was",
            "to be fetched. Counters by how much they grew, from before an incident until after it.",
        ]
        Path(path).write_text("\n".join([*head, *kept.lines, ""]))


@pytest.fixture(scope="module")
def deployment() -> Iterator[NetFleet]:
    with Lab() as lab, Processes() as processes:
        made = NetFleet(lab, processes)

        async def start() -> None:
            async with httpx.AsyncClient(trust_env=False) as http:
                made.http = http
                await made.start()

        asyncio.run(start())
        yield made
        lab.heal(*(f"{kind}-{at}" for kind in ("gateway", "agent", "engine") for at in ALL))
        processes.stop()
        assert not processes.left()
        lab.close()
        assert not lab.left()


@pytest.fixture
async def fleet(deployment: NetFleet) -> AsyncIterator[NetFleet]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, limits=limits) as http:
        deployment.http = http
        yield deployment


@contextlib.asynccontextmanager
async def watched(fleet: NetFleet, log: Log, title: str, seed: int) -> AsyncIterator[Traffic]:
    """Traffic through an incident; what was counted meanwhile goes into the log."""
    log.begin(title)
    nodes = [f"{kind}-{at}" for kind in ("gateway", "agent") for at in ALL]
    async with Traffic(fleet, seed) as traffic:
        await traffic.some(3)
        log.answers(traffic, "before")
        before = {node: await fleet.counters(node) for node in nodes}
        yield traffic
        traffic.excused.clear()
        await traffic.some(3)
        log.answers(traffic, "after")
        await traffic.pause()
        await fleet.wait("every gateway knows what every engine holds", lambda: fleet.true_everywhere(*ALL))
        for node in nodes:
            counted = await fleet.counters(node)
            grown = {name: value - before[node].get(name, 0.0) for name, value in counted.items()}
            log.grown[node] = grown
            if told := [f"`{name}` {count:g}" for name, count in grown.items() if count > 0]:
                log.say(f"{node}: {', '.join(told)}")


def _followed(fleet: NetFleet, replica: int, gateways: Any, expected: bool) -> Any:
    """Whether all these gateways follow a replica's reports, or none does."""

    async def condition() -> bool:
        views = [await fleet.replicas(at) for at in gateways]
        return all(view and view[replica]["reporting"] is expected for view in views)

    return condition


async def _promised(fleet: NetFleet, gateways: Any, replica: int) -> list[tuple[str, int]]:
    """How each gateway knows what a replica holds of the documents, and how much of them it would promise there."""
    found = []
    for at in gateways:
        for document in range(len(DOCUMENTS)):
            candidates = (await fleet.explained(at, prompt(document)))["candidates"]
            mine = next(each for each in candidates if each["replica"] == f"replica-{replica}")
            found.append((mine["claims"], mine["cached_tokens"]))
    return found


async def _reset(fleet: NetFleet, engine: int) -> None:
    """Empties an engine's cache, of which the gateways do not hear now."""
    response = await fleet.http.post(f"{fleet.url(f'engine-{engine}')}/reset_prefix_cache", timeout=10)
    assert response.status_code == 200


async def test_an_agent_is_cut_off(fleet: NetFleet, log: Log) -> None:
    async with watched(fleet, log, "An agent is cut off", 1) as traffic:
        fleet.lab.cut("agent-1")
        lost = await fleet.wait("its reports are lost", _followed(fleet, 1, ALL, False))
        log.say(f"all gateways took its reports for lost within {lost:.1f} s")
        await traffic.pause()
        for view in [await fleet.replicas(at) for at in ALL]:
            assert view[1]["held_blocks"] == 0
            assert view[1]["routed_by"] == "learned"
            assert view[1]["others"]["state"].startswith("not known")
            assert view[1]["engine_up"]
        log.answers(traffic, "until then")
        traffic.resume()
        await traffic.some(10)
        log.answers(traffic, "without its reports")
        await traffic.pause()
        await _reset(fleet, 1)
        assert {claims for claims, _ in await _promised(fleet, ALL, 1)} == {"learned"}
        fleet.lab.heal("agent-1")
        back = await fleet.wait("its reports are followed again", _followed(fleet, 1, ALL, True), READY_S)
        log.say(f"all gateways follow it again {back:.1f} s after it was joined")
        await fleet.wait("what was reset meanwhile is not promised", lambda: fleet.true_everywhere(*ALL))
        traffic.resume()
    log.lost_and_followed(ALL, [1])
    log.forgotten([1], COUNT)


async def test_a_gateway_is_cut_off(fleet: NetFleet, log: Log) -> None:
    def seen(*others: str) -> Any:
        async def condition() -> bool:
            for at in (1, 2):
                expected = sorted(set(others) - {f"gateway-{at}"})
                for each in await fleet.replicas(at) or [{}]:
                    names = sorted(load["gateway"] for load in each["others"]["gateways"]) if each else None
                    if names != expected:
                        return False
            return True

        return condition

    async def held_there() -> int:
        views = await fleet.replicas(1)
        return sum(
            load["sequences"] for each in views for load in each["others"]["gateways"] if load["gateway"] == "gateway-0"
        )

    async with watched(fleet, log, "A gateway is cut off", 2) as traffic:
        # A request that is still being answered when its gateway disappears, and counts until then.
        long = {
            "model": MODEL,
            "prompt": "Tell me everything.",
            "max_tokens": 4_000,
            "stream": True,
            "ignore_eos": True,
        }
        url = f"{fleet.url('gateway-0')}/v1/completions"
        async with fleet.http.stream("POST", url, json=long, timeout=60) as answer:
            assert answer.status_code == 200

            async def counted() -> bool:
                return await held_there() > 0

            await fleet.wait("another gateway counts it", counted)
            traffic.excused.add(0)
            begin = time.monotonic()
            fleet.lab.cut("gateway-0")
            gone = await fleet.wait("it is forgotten", seen("gateway-1", "gateway-2"))
            log.say(f"agents and gateways had forgotten it, and the request that it had placed, within {gone:.1f} s")
            await traffic.some(10, 1, 2)
            traffic.check()
            await asyncio.sleep(max(0.0, begin + CUT_S - time.monotonic()))
            fleet.lab.heal("gateway-0")
            back = await fleet.wait("it is known again", seen("gateway-0", "gateway-1", "gateway-2"), READY_S)
            log.say(f"it was known again {back:.1f} s after it was joined")
        await fleet.wait("it knows everything", lambda: fleet.ready(0), READY_S)
        log.answers(traffic, "meanwhile")
    log.lost_and_followed([0], ALL)
    log.forgotten(ALL, 1)


async def test_an_agent_is_frozen(fleet: NetFleet, log: Log) -> None:
    async with watched(fleet, log, f"An agent is frozen for {FROZEN_S:g} s", 3) as traffic:
        begin = time.monotonic()
        fleet.processes.freeze("agent-2")
        lost = await fleet.wait("its reports are lost", _followed(fleet, 2, ALL, False))
        log.say(f"all gateways took its reports for lost within {lost:.1f} s")
        await traffic.some(8)
        await traffic.pause()
        await _reset(fleet, 2)
        traffic.resume()
        await asyncio.sleep(max(0.0, begin + FROZEN_S - time.monotonic()))
        await traffic.pause()
        log.answers(traffic, "while it was frozen")
        fleet.processes.thaw("agent-2")
        back = await fleet.wait("its reports are followed again", _followed(fleet, 2, ALL, True), READY_S)
        log.say(f"all gateways followed it again {back:.1f} s after it went on")
        await fleet.wait("what was reset meanwhile is not promised", lambda: fleet.true_everywhere(*ALL))
        traffic.resume()
    log.lost_and_followed(ALL, [2])
    log.forgotten([2], COUNT)


async def test_a_gateway_is_killed_and_starts_again(fleet: NetFleet, log: Log) -> None:
    async with watched(fleet, log, "A gateway is killed and starts again", 4) as traffic:
        prompts = [prompt(document, question) for document in range(len(DOCUMENTS)) for question in (0, 1)]
        traffic.excused.add(1)
        fleet.processes.kill("gateway-1")
        await traffic.some(5, 0, 2)
        fleet.start_gateway(1)
        back = await fleet.wait("it knows everything", lambda: fleet.ready(1), READY_S)
        log.say(f"it knew all replicas and both other gateways {back:.1f} s after its start")
        await traffic.pause()
        await fleet.wait("every gateway knows what every engine holds", lambda: fleet.true_everywhere(*ALL))
        homes = [[(await fleet.explained(at, each))["home"] for each in prompts] for at in (0, 1)]
        agreed = sum(old == new for old, new in zip(*homes, strict=True))
        log.say(f"{agreed} of {len(prompts)} homes are those of another gateway")
        assert agreed >= 0.95 * len(prompts)
        log.answers(traffic, "meanwhile")
        counted = await fleet.counters("gateway-1")
        assert all(counted[f"report_snapshots{{replica=replica-{at}}}"] >= 1 for at in ALL), counted
        traffic.resume()
    log.forgotten(ALL, 1)


async def test_a_replica_is_cut_off_with_its_agent(fleet: NetFleet, log: Log) -> None:
    async with watched(fleet, log, "A replica is cut off, engine and agent", 5) as traffic:
        fleet.lab.cut("engine-0", "agent-0")

        async def down() -> bool:
            views = [await fleet.replicas(at) for at in ALL]
            return all(view and not view[0]["engine_up"] for view in views)

        left = await fleet.wait("its engine counts as down", down)
        log.say(f"all gateways had left it within {left:.1f} s")
        await traffic.some(8)
        log.answers(traffic, "without it")
        fleet.lab.heal("engine-0", "agent-0")
        back = sum([await fleet.wait("it is back", lambda at=at: fleet.ready(at), READY_S) for at in ALL])
        log.say(f"it was back, with its reports, {back:.1f} s after it was joined")
    log.lost_and_followed(ALL, [0])
    log.forgotten([0], COUNT)
    assert sum(log.grew(f"gateway-{at}", "retries") for at in ALL) >= 1, log.grown


async def test_the_source_of_a_fetch_is_cut_off(fleet: NetFleet, log: Log) -> None:
    """Half way through a fetch over a slow link its source disappears; the rest is computed."""
    async with watched(fleet, log, "The source of a fetch is cut off half way", 6) as traffic:
        await traffic.pause()

        async def ask(document: int, replica: int) -> tuple[str, dict[str, Any], float]:
            begin = time.monotonic()
            body = prompt(document, length=12_000)
            url, pin = f"{fleet.url('gateway-0')}/v1/chat/completions", {"x-gateway-pin": f"replica-{replica}"}
            response = await fleet.http.post(url, json=body, headers=pin, timeout=60)
            assert response.status_code == 200, response.text
            took_s = time.monotonic() - begin
            receipt: dict[str, Any] = {}

            async def told() -> bool:
                found = await fleet.get(f"{fleet.admin_url(0)}/admin/receipts/{response.headers['x-request-id']}")
                receipt.update(found or {})
                return bool(receipt) and bool(not receipt["fetch"] or receipt["fetched"])

            await fleet.wait("a receipt", told)
            return response.json()["choices"][0]["message"]["content"], receipt, took_s

        async def taught(document: int) -> str:
            """Computed by the first replica, and in its agent's pool."""
            before = (await fleet.replicas(0))[0]["pool_blocks"]
            words, receipt, _ = await ask(document, 0)
            added = (receipt["prompt_tokens"] - receipt["cached_tokens"]) // 16

            async def pooled() -> bool:
                return (await fleet.replicas(0))[0]["pool_blocks"] >= before + added

            await fleet.wait("in the pool", pooled)
            return words

        expected = await taught(0)
        fleet.lab.slow("agent-0", 4)
        sent = fleet.lab.sent_bytes("agent-0")
        asking = asyncio.create_task(ask(0, 2))
        while fleet.lab.sent_bytes("agent-0") < sent + 60_000:
            assert not asking.done(), f"nothing was fetched: {asking.result()}"
            await asyncio.sleep(0.002)
        fleet.lab.cut("agent-0")
        words, receipt, took_s = await asking
        assert words == expected
        record = receipt["fetched"]
        assert (record["source"], record["replica"], record["transport"]) == ("replica-0", "replica-2", "tcp")
        assert record["outcome"] in ("failed", "late", "partial"), record
        used = f"{record['loaded']} of {record['asked']} blocks were used"
        log.say(f"{record['outcome']} ({record['reason']}): {used}, and the same words came after {took_s:.1f} s")
        fleet.lab.slow("agent-0", None)
        fleet.lab.heal("agent-0")
        for at in ALL:
            await fleet.wait("all is known", lambda at=at: fleet.ready(at), READY_S)
        expected = await taught(1)
        words, receipt, took_s = await ask(1, 2)
        assert words == expected
        log.say(f"once it was joined: {receipt['fetched']['outcome']}, {receipt['fetched']['loaded']} blocks")
        assert receipt["fetched"]["outcome"] == "fetched"
        traffic.resume()
    fetched, ended = log.grew("agent-2", "fetches", "outcome=fetched"), log.grew("agent-2", "fetches")
    assert fetched >= 1 and ended - fetched >= 1, log.grown
