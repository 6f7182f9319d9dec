"""A TCP proxy between replicas, that does what networks do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

HOST = "127.0.0.1"


class Link:
    """A TCP proxy in front of whatever listens at `target`. Everything may be changed while bytes are on their way.

    `open` cleared: not a byte passes, and nobody is told, as in a partition. `stop_at`: so many of the owner's bytes
    pass, then `stopped` is set and the rest waits until `stop_at` is None again. `rate`: its bytes per second.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.open = asyncio.Event()
        self.open.set()
        self.stop_at: int | None = None
        self.stopped = asyncio.Event()
        self.rate = 0.0
        self.passed = 0
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def __aenter__(self) -> Link:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Resets every connection."""
        for writer in self._writers:
            writer.transport.abort()

    def resume(self) -> None:
        """Lets everything pass."""
        self.stop_at = None
        self.open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        mine = {writer}
        try:
            self._writers.add(writer)
            onward, back = await asyncio.open_connection(HOST, self.target)
            self._writers.add(back)
            mine.add(back)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, back, None))
                both.create_task(self._pump(onward, writer, self._throttle))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            for each in mine:
                each.close()
            self._writers -= mine
            self._tasks.discard(task)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        throttle: Callable[[bytes, asyncio.StreamWriter], Awaitable[bytes]] | None,
    ) -> None:
        while data := await source.read(16_384):
            await self.open.wait()
            if throttle is not None:
                data = await throttle(data, target)
            target.write(data)
            await target.drain()
        # Whoever closes one side closes both: no test needs half a connection.
        raise ConnectionResetError

    async def _throttle(self, data: bytes, target: asyncio.StreamWriter) -> bytes:
        if self.stop_at is not None and self.passed + len(data) > self.stop_at:
            head = max(0, self.stop_at - self.passed)
            target.write(data[:head])
            self.passed += head
            data = data[head:]
            self.stopped.set()
            while self.stop_at is not None:
                await asyncio.sleep(0.005)
            await self.open.wait()
        if self.rate:
            await asyncio.sleep(len(data) / self.rate)
        self.passed += len(data)
        return data
