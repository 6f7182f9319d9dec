"""Engines that fail in a scripted way, and a gateway in front of them, all real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from gateway.app import Gateway
from gateway.http_protocol import BoundedProtocol
from gateway.settings import LimitSettings, ReplicaSettings, Settings, TelemetrySettings

MODEL = "m"
DEADLINE_S = 20.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Call:
    """One request as an engine got it, and the means to answer it."""

    head: bytes
    body: bytes
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def start(self, kind: bytes = b"text/event-stream") -> None:
        self.writer.write(HEAD % kind)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def reply(self, status: int, body: Any, extra: bytes = b"") -> None:
        data = json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
        self.writer.write(head % (status, len(data), extra) + data)
        await self.writer.drain()

    async def chat(self, text: str = "hi", cached: int = 0) -> None:
        """An ordinary answer, streamed if asked for."""
        usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
        if not self.json.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            reply = {"id": "c", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}
            await self.reply(200, reply)
            return
        await self.start()
        await self.chunk(event(text))
        if (self.json.get("stream_options") or {}).get("include_usage"):
            await self.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await self.chunk(b"data: [DONE]\n\n")
        await self.end()

    def reset(self) -> None:
        """Close with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.writer.transport.abort()


Handler = Callable[[Call], Awaitable[None]]


def event(text: str) -> bytes:
    chunk = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


class FaultEngine:
    """An HTTP/1.1 server whose POSTs are answered by `handler`; GET /v1/models names the model."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.calls: list[Call] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> FaultEngine:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening and cut all connections; a later connection is refused."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            # One that has been closed and has nothing more to send is over; asyncio fails when it is aborted then.
            if not writer.transport.is_closing() or writer.transport.get_write_buffer_size():
                writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                call = Call(head, await reader.readexactly(length), writer)
                if head.startswith(b"GET"):
                    await call.reply(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
                    continue
                self.calls.append(call)
                answering = asyncio.create_task(self._answer(call))
                waiting = asyncio.create_task(reader.read(1) if not reader.at_eof() else asyncio.sleep(0))
                done, _ = await asyncio.wait({answering, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if waiting in done:  # the peer closed while we were answering
                    call.closed.set()
                    answering.cancel()
                    await asyncio.gather(answering, return_exceptions=True)
                    break
                # Keep-alive is not offered: a pending read cannot be given back.
                waiting.cancel()
                break
        writer.close()

    async def _answer(self, call: Call) -> None:
        with contextlib.suppress(OSError):
            await self.handler(call)


@dataclass
class Running:
    """A gateway that serves, and where."""

    gateway: Gateway
    url: str
    admin_url: str

    def loads(self) -> dict[str, tuple[int, int]]:
        """In-flight sequences and tokens of every replica, after checking their law."""
        for replica in self.gateway.fleet.replicas.values():
            replica.load.check()
        return {r.id: (r.load.sequences, r.load.prefill_tokens) for r in self.gateway.fleet.replicas.values()}


@contextlib.asynccontextmanager
async def running_gateway(
    *engines: FaultEngine, allow_pinning: bool = False, telemetry: TelemetrySettings | None = None, **limits: Any
) -> AsyncIterator[Running]:
    """A gateway in this process, in front of the engines, ready."""
    from gateway.settings import PlacementSection

    settings = Settings(
        replicas=[ReplicaSettings(id=f"replica-{at}", engine=engine.url) for at, engine in enumerate(engines)],
        placement=PlacementSection(allow_pinning=allow_pinning),
        limits=LimitSettings(**limits),
        telemetry=telemetry or TelemetrySettings(),
    )
    async with serving_gateway(settings) as running:
        await eventually(lambda: all(r.engine_up for r in running.gateway.fleet.replicas.values()))
        yield running


@contextlib.asynccontextmanager
async def serving_gateway(settings: Settings) -> AsyncIterator[Running]:
    """A gateway of these settings in this process, on free ports; its engines need not be up."""
    gateway = Gateway(settings)
    servers, urls = [], []
    for app in (gateway.public, gateway.admin):
        bound = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, http=BoundedProtocol, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        )
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        servers.append((server, asyncio.create_task(server.serve([bound]))))
        urls.append(f"http://127.0.0.1:{bound.getsockname()[1]}")
    try:
        async with gateway.running():
            yield Running(gateway, *urls)
    finally:
        for server, task in servers:
            server.should_exit = True
            await task


async def eventually(holds: Callable[[], bool], why: str = "") -> None:
    """Until it holds; fails after a generous deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, why or "it did not come to hold"
        await asyncio.sleep(0.01)
