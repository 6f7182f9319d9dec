from __future__ import annotations

import asyncio

from agent_support import EngineStandIn, serving, until
from loopback_ports import free_port
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replica_agent.engine_client import SILENT_AFTER_S, EngineClient, EngineIdentity, EngineWatcher
from replica_agent.load import EngineMetrics


class Notes:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.identity: EngineIdentity | None = None
        self.metrics: EngineMetrics | None = None

    async def engine_seen(self, identity: EngineIdentity, metrics: EngineMetrics) -> None:
        self.told.append("seen")
        self.identity = identity

    async def engine_confirmed(self, identity: EngineIdentity) -> None:
        self.told.append("confirmed")

    def engine_measured(self, metrics: EngineMetrics) -> None:
        self.told.append("measured")
        self.metrics = metrics

    def engine_replaced(self) -> None:
        self.told.append("replaced")

    def engine_silent(self) -> None:
        self.told.append("silent")

    def engine_gone(self) -> None:
        self.told.append("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_the_life_of_an_engine() -> None:
    port, notes, engine = free_port(), Notes(), EngineStandIn()
    client = EngineClient(f"http://127.0.0.1:{port}")
    watcher = EngineWatcher(client, notes, interval_s=0.01)
    await watcher.look()
    assert notes.told == ["gone"]
    async with serving(engine.app, port):
        await watcher.look()
        await watcher.look()
        assert notes.told[1:] == ["seen", "measured", "measured"]
        assert notes.identity == EngineIdentity(engine="vllm", version="0.32.0", models=["m"], root=None)
        assert notes.metrics is not None
        assert (notes.metrics.waiting, notes.metrics.capacity_blocks) == (2, 1234)
        engine.start_time += 1
        notes.told.clear()
        await watcher.look()
        assert notes.told == ["replaced", "seen", "measured"]
    notes.told.clear()
    await watcher.look()
    assert notes.told == ["gone"]
    async with serving(engine.app, port):
        notes.told.clear()
        await watcher.look()
        assert notes.told == ["seen", "measured"]
    await client.close()


async def test_an_engine_that_answers_what_nobody_can_read_is_silent() -> None:
    notes, engine, clock, body = Notes(), EngineStandIn(), Clock(), b""

    async def models(request: Request) -> Response:
        return Response(body)

    engine.app.routes.insert(0, Route("/v1/models", models))
    async with serving(engine.app) as url:
        client = EngineClient(url)
        watcher = EngineWatcher(client, notes, interval_s=0.01, clock=clock)
        for body in (b"", b"{", b"[" * 5_000 + b"]" * 5_000, b'{"x": "\xff"}'):
            clock.now += SILENT_AFTER_S
            notes.told.clear()
            await watcher.look()
            assert notes.told == ["silent"], body
        await client.close()


async def test_an_engine_with_errors_is_silent_but_not_gone() -> None:
    notes, engine, clock = Notes(), EngineStandIn(), Clock()
    async with serving(engine.app) as url:
        client = EngineClient(url)
        watcher = EngineWatcher(client, notes, interval_s=0.01, clock=clock)
        await watcher.look()
        engine.status = 500
        notes.told.clear()
        await watcher.look()
        assert notes.told == []
        clock.now += SILENT_AFTER_S
        await watcher.look()
        assert notes.told == ["silent"]
        engine.status = 200
        await watcher.look()
        assert notes.told == ["silent", "measured"]
        await client.close()


async def test_an_engine_that_accepts_and_never_answers_is_silent() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    notes, clock = Notes(), Clock()
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", deadline_s=0.05)
    watcher = EngineWatcher(client, notes, interval_s=0.01, clock=clock)
    clock.now += SILENT_AFTER_S
    await watcher.look()
    assert notes.told == ["silent"]
    await client.close()
    server.close()
    for writer in connections:
        writer.close()


async def test_an_engine_without_metrics_is_up() -> None:
    notes, engine = Notes(), EngineStandIn()
    engine.status = 404
    async with serving(engine.app) as url:
        client = EngineClient(url)
        await EngineWatcher(client, notes, interval_s=0.01).look()
        assert notes.told == ["seen", "measured"]
        assert notes.identity is not None
        assert notes.identity.engine == "unknown"
        await client.close()


async def test_the_base_model_comes_before_its_adapters() -> None:
    notes, engine = Notes(), EngineStandIn()
    engine.models = [{"id": "adapter", "parent": "m"}, {"id": "m", "parent": None}]
    async with serving(engine.app) as url:
        client = EngineClient(url)
        watcher = EngineWatcher(client, notes, interval_s=0.01)
        task = asyncio.create_task(watcher.run())
        await until(lambda: notes.told.count("measured") > 2)
        task.cancel()
        assert notes.identity is not None
        assert notes.identity.models == ["m", "adapter"]
        await client.close()
