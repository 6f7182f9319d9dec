"""A gateway's announcements, at real agents: what is said when, and what becomes of those that are not taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from agent_support import EngineStandIn, agent_running, serving, settings_for, until
from loopback_ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.fleet import announcer as module
from gateway.fleet.agent_line import AgentLine, LineFailed
from gateway.fleet.announcer import Announcer
from gateway.fleet.others import GatewayId
from gateway.fleet.replica import Replica
from gateway.settings import ReplicaSettings
from kvstore.messages import GatewayLoad

ME = GatewayId("me", 1)
YOU = GatewayLoad(gateway="you", epoch=1, prefill_tokens=0, sequences=0)


class Taker:
    """Stands in for an agent where a test must see every announcement, or refuse it."""

    def __init__(self) -> None:
        self.loads: list[GatewayLoad] = []
        self.headers: list[str | None] = []
        self.answer = Response(status_code=204)
        self.held = asyncio.Event()
        self.held.set()
        self.app = Starlette(routes=[Route("/v1/load", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        self.loads.append(msgspec.json.decode(await request.body(), type=GatewayLoad))
        self.headers.append(request.headers.get("authorization"))
        await self.held.wait()
        return self.answer


@contextlib.asynccontextmanager
async def announcing(url: str, token: str = "") -> AsyncIterator[tuple[Replica, Announcer]]:
    replica = Replica(ReplicaSettings(id="r", engine="http://127.0.0.1:1", agent=url), me=ME)
    announcer = Announcer(replica, httpx.URL(url), ME, token=token)
    task = asyncio.create_task(announcer.run())
    try:
        yield replica, announcer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_placed_is_known_at_the_agent_until_it_ends() -> None:
    engine = EngineStandIn()
    async with serving(engine.app) as url:
        settings = msgspec.structs.replace(settings_for(url, free_port(), None), token="t")
        async with agent_running(settings) as (agent, agent_url), announcing(agent_url, "t") as (replica, announcer):
            await until(lambda: len(agent.gateways) == 1)
            ticket = replica.load.admit(300)
            await until(lambda: [each.sequences for each in agent.gateways.heard()] == [1])
            assert agent.gateways.heard() == [GatewayLoad(gateway="me", epoch=1, prefill_tokens=300, sequences=1)]
            ticket.prefilled()
            await until(lambda: agent.gateways.heard()[0].prefill_tokens == 0)
            ticket.finish()
            await until(lambda: agent.gateways.heard()[0].sequences == 0)
            assert not announcer.failures


async def test_with_another_gateway_every_change_is_told_and_those_of_one_moment_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 3_600.0)
    taker = Taker()
    async with serving(taker.app) as url, announcing(url, "secret") as (replica, announcer):
        await until(lambda: announcer.announcements == 1)
        replica.load.admit(1)
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert len(taker.loads) == 1, "alone: nobody to tell before the next one is due"
        replica.others.gateways = [YOU]
        for number in range(2, 6):
            for _ in range(10):
                replica.load.admit(1)
            await until(lambda n=number: announcer.announcements == n)
        assert [each.sequences for each in taker.loads] == [0, 11, 21, 31, 41]
        assert set(taker.headers) == {"Bearer secret"}
        taker.held.clear()
        replica.load.admit(1)
        await until(lambda: len(taker.loads) == 6)
        for _ in range(5):
            replica.load.admit(1)
            await asyncio.sleep(0.006)
        assert len(taker.loads) == 6, "one at a time, so that none overtakes another"
        taker.held.set()
        await until(lambda: taker.loads[-1].sequences == 47)
        assert len(taker.loads) == 7


async def test_what_has_ended_is_told_with_what_is_placed_next_or_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 3_600.0)
    monkeypatch.setattr(module, "LESS_S", 3_600.0)
    taker = Taker()
    async with serving(taker.app) as url, announcing(url) as (replica, announcer):
        replica.others.gateways = [YOU]
        tickets = [replica.load.admit(10) for _ in range(3)]
        await until(lambda: [each.sequences for each in taker.loads][-1:] == [3])
        count = announcer.announcements
        for ticket in tickets[:2]:
            ticket.finish()
        tickets[2].prefilled()
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert announcer.announcements == count
        replica.load.admit(0)
        replica.load.admit(10)
        replica.load.admit(10)
        await until(lambda: (taker.loads[-1].sequences, taker.loads[-1].prefill_tokens) == (4, 20))
        monkeypatch.setattr(module, "LESS_S", 0.02)
        tickets[2].finish()
        await until(lambda: taker.loads[-1].sequences == 3)


async def test_it_goes_on_when_the_agent_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    port, first, second = free_port(), Taker(), Taker()
    async with announcing(f"http://127.0.0.1:{port}") as (_, announcer):
        await until(lambda: announcer.failures.get("connection", 0) > 0)
        assert "refused" in announcer.error.lower()
        for taker in (first, second):
            async with serving(taker.app, port):
                await until(lambda each=taker: len(each.loads) > 1)
        assert set(announcer.failures) == {"connection"}


async def test_a_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    port, taker = free_port(), Taker()
    line = AgentLine(httpx.URL(f"http://127.0.0.1:{port}/v1/load"))
    for _ in range(2):
        async with serving(taker.app, port):
            await line.post(msgspec.json.encode(YOU))
            await line.post(msgspec.json.encode(YOU))
    assert len(taker.loads) == 4
    line.close()


async def test_a_refusal_is_shown_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    taker = Taker()
    taker.answer = JSONResponse({"error": {"code": "too_many_gateways"}}, 429)
    async with serving(taker.app) as url, announcing(url) as (_, announcer):
        await until(lambda: announcer.failures.get("status", 0) >= 2)
        assert "429" in announcer.error and "too_many_gateways" in announcer.error
        taker.answer = Response(status_code=204)
        await until(lambda: announcer.announcements > 0)
        assert announcer.error == ""


async def test_silence_and_nonsense_are_failures_of_their_own_kind() -> None:
    taker = Taker()
    taker.held.clear()
    async with serving(taker.app) as url:
        with pytest.raises(LineFailed) as caught:
            await AgentLine(httpx.URL(f"{url}/v1/load"), timeout_s=0.05).post(msgspec.json.encode(YOU))
        assert caught.value.kind == "timeout"
        taker.held.set()

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop())
        writer.close()

    answers = [b"x" * 100_000, b"220 smtp ready\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"]
    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/load"
        for _ in range(3):
            with pytest.raises(LineFailed) as caught:
                await AgentLine(httpx.URL(url)).post(b"{}")
            assert caught.value.kind == "protocol"
