"""Probing real servers: one refuses, one is slow, some talk nonsense, one is good."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from agent_support import serving, until
from loopback_ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.fleet import engine_health
from gateway.fleet.engine_health import EngineHealth
from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.replica import Replica
from gateway.settings import ReplicaSettings


class Engine:
    """Answers `/v1/models` with whatever it holds."""

    def __init__(self) -> None:
        self.answer: Response = JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})
        self.hold = asyncio.Event()
        self.hold.set()
        self.app = Starlette(routes=[Route("/v1/models", self._models)])

    async def _models(self, request: Request) -> Response:
        await self.hold.wait()
        return self.answer


class Prober:
    """A prober over replicas at given URLs, and what it said of their ends."""

    def __init__(self, engines: EngineHttp) -> None:
        self.down: list[str] = []
        self.up: list[str] = []
        self.health = EngineHealth(engines, self.down.append)
        self.health.on_up = lambda replica: self.up.append(replica.id)

    @staticmethod
    def replica(url: str, name: str = "r") -> Replica:
        return Replica(ReplicaSettings(id=name, engine=url))


@pytest.fixture
async def prober() -> AsyncIterator[Prober]:
    engines = EngineHttp()
    yield Prober(engines)
    await engines.close()


async def test_a_good_engine_is_up_with_its_models(prober: Prober) -> None:
    engine = Engine()
    async with serving(engine.app) as url:
        replica = prober.replica(url)
        assert not replica.engine_up
        assert replica.engine_error
        await prober.health.probe(replica)
        assert (replica.engine_up, replica.engine_error, list(replica.models)) == (True, "", ["m"])
        engine.answer = JSONResponse({"data": [{"id": "m"}, {"id": "adapter"}, {"object": "nameless"}]})
        await prober.health.probe(replica)
        assert list(replica.models) == ["m", "adapter"]
        assert (prober.up, prober.down) == (["r"], [])
        prober.health.failed(replica, "refused")
        await prober.health.probe(replica)
        assert (prober.up, prober.down) == (["r", "r"], ["r"])


async def test_a_refused_engine_is_down_and_told_once(prober: Prober) -> None:
    replica = prober.replica(f"http://127.0.0.1:{free_port()}")
    await prober.health.probe(replica)
    assert not replica.engine_up
    assert replica.engine_error.startswith("ConnectError")
    assert prober.down == [], "it was never up"
    async with serving(Engine().app) as url:
        replica.engine = httpx.URL(url)
        await prober.health.probe(replica)
    await prober.health.probe(replica)
    await prober.health.probe(replica)
    assert prober.down == ["r"]
    assert list(replica.models) == ["m"], "what it served is remembered: its clients get a 503 and not a 404"


async def test_a_silent_engine_is_down_at_the_deadline(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "PROBE_TIMEOUT_S", 0.2)
    engine = Engine()
    async with serving(engine.app) as url:
        replica = prober.replica(url)
        await prober.health.probe(replica)
        assert replica.engine_up
        engine.hold.clear()
        await prober.health.probe(replica)
        assert replica.engine_error.startswith("ReadTimeout")
        assert prober.down == ["r"]
        engine.hold.set()
        await prober.health.probe(replica)
        assert (replica.engine_up, replica.engine_error) == (True, "")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Response("{", media_type="application/json"), "DecodeError"),
        (Response(b'{"data": [{"id": "\xff"}]}'), "DecodeError"),
        (Response(b'{"data": [{"id": ' + b"[" * 100_000), "RecursionError"),
        (JSONResponse({"data": "m"}), "ValidationError"),
        (JSONResponse({"data": []}), "names no model"),
        (JSONResponse({"error": "loading"}, 503), "503"),
        (Response(status_code=302, headers={"location": "/elsewhere"}), "302"),
        (Response(b"not gzip", headers={"content-encoding": "gzip"}), "DecodingError"),
    ],
    ids=["json", "utf-8", "deep", "shape", "empty", "503", "redirect", "encoding"],
)
async def test_nonsense_is_down_and_says_why(prober: Prober, answer: Response, why: str) -> None:
    engine = Engine()
    async with serving(engine.app) as url:
        replica = prober.replica(url)
        await prober.health.probe(replica)
        engine.answer = answer
        await prober.health.probe(replica)
        assert not replica.engine_up
        assert why in replica.engine_error
        assert prober.down == ["r"]


async def test_one_bad_engine_holds_up_no_other(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are watched at once: refused and slow ones stay down while the good one comes up, goes, and comes back."""
    monkeypatch.setattr(engine_health, "PROBE_EVERY_S", 0.05)
    slow = Engine()
    slow.hold.clear()
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        slow_url = await stack.enter_async_context(serving(slow.app))
        good = prober.replica(f"http://127.0.0.1:{port}", "good")
        refused = prober.replica(f"http://127.0.0.1:{free_port()}", "refused")
        silent = prober.replica(slow_url, "silent")
        watching = asyncio.create_task(prober.health.watch([refused, silent, good]))
        stack.callback(watching.cancel)
        for _ in range(2):
            async with serving(Engine().app, port):
                await until(lambda: good.engine_up)
            await until(lambda: not good.engine_up)
        assert not refused.engine_up
        assert not silent.engine_up
        assert prober.down == ["good", "good"]
        assert not watching.done()
        slow.hold.set()
        await until(lambda: silent.engine_up)


async def test_the_request_path_takes_a_dead_engine_out_at_once(prober: Prober) -> None:
    async with serving(Engine().app) as url:
        replica = prober.replica(url)
        await prober.health.probe(replica)
        prober.health.failed(replica, "cannot connect")
        prober.health.failed(replica, "cannot connect")
        assert (replica.engine_up, replica.engine_error, prober.down) == (False, "cannot connect", ["r"])
        await prober.health.probe(replica)
        assert replica.engine_up
