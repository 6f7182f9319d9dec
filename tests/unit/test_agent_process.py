"""The agent as a process: how it starts, what it says, how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from agent_support import DEADLINE_S, mirroring, serving, until
from loopback_ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@contextlib.asynccontextmanager
async def agent_process(*flags: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "replica_agent",
        *flags,
        env=dict(os.environ) | environ,
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, list[str]]:
    """Exit code and lines of the log."""
    _, log = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    return process.returncode, log.decode().splitlines()


async def answers(url: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly_with_streams_open(number: signal.Signals) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with agent_process("--engine", "http://127.0.0.1:1", "--port", str(port)) as process:
        await until(lambda: answers(url))
        async with mirroring(url) as mirror:
            assert mirror.heartbeat is not None
            process.send_signal(number)
            code, log = await ended(process)
    assert code == 0
    assert len(log) == 1
    assert f"listening on {url}" in log[0]


async def test_a_taken_port_is_one_line_that_names_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with agent_process("--engine", "http://127.0.0.1:1", "--port", str(port)) as process:
            code, log = await ended(process)
    assert code == 2
    assert len(log) == 1
    assert "--port" in log[0]
    assert str(port) in log[0]


async def test_a_bad_setting_is_one_line_that_names_it() -> None:
    async with agent_process(REPLICA_AGENT_ENGINE="http://127.0.0.1:1", REPLICA_AGENT_PORTT="1") as process:
        code, log = await ended(process)
    assert code == 2
    assert len(log) == 1
    assert "REPLICA_AGENT_PORTT" in log[0]


async def test_spans_continue_the_callers_trace() -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    exported: list[bytes] = []

    async def collect(request: Request) -> Response:
        exported.append(await request.body())
        return Response()

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serving(Starlette(routes=[Route("/v1/traces", collect, methods=["POST"])])) as collector:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
        async with agent_process("--engine", "http://127.0.0.1:1", "--port", str(port), **environ) as process:
            await until(lambda: answers(url))
            async with httpx.AsyncClient(trust_env=False) as client:
                headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
                await client.get(f"{url}/v1/hello", headers=headers)
            process.send_signal(signal.SIGTERM)
            code, _ = await ended(process)
    assert code == 0
    assert any(bytes.fromhex(trace_id) in body and b"GET /v1/hello" in body for body in exported)


async def test_a_dead_collector_does_not_hold_up_the_end() -> None:
    port = free_port()
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    async with agent_process("--engine", "http://127.0.0.1:1", "--port", str(port), **environ) as process:
        await until(lambda: answers(f"http://127.0.0.1:{port}"))
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get(f"http://127.0.0.1:{port}/v1/hello")
        process.send_signal(signal.SIGTERM)
        code, _ = await ended(process)
    assert code == 0
