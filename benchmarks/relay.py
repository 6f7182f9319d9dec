"""A TCP relay that lets so many bytes a second through: a slow network between two processes of one host."""

from __future__ import annotations

import asyncio
import contextlib
import time

HOST = "127.0.0.1"
_PIECE = 64 * 1024
_AHEAD_S = 0.002
"""Bytes that are early by less are passed on: a timer is no more exact."""


class Relay:
    """Owns a listening port, and what is connected through it to `target`. `rate`, in bytes/s of what the target sends,
    may be changed at any time; 0 is no limit."""

    def __init__(self, port: int, target: int) -> None:
        self.rate = 0.0
        self._port = port
        self._target = target
        self._free_at = 0.0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, HOST, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        onward, back = await asyncio.open_connection(HOST, self._target)
        try:
            with contextlib.suppress(OSError, ExceptionGroup, asyncio.CancelledError):
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(reader, back, limited=False))
                    both.create_task(self._pump(onward, writer, limited=True))
        finally:
            writer.close()
            back.close()
            self._tasks.discard(task)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, limited: bool) -> None:
        while data := await source.read(_PIECE):
            if limited and self.rate:
                # All connections share the link.
                self._free_at = max(self._free_at, time.monotonic()) + len(data) / self.rate
                if (early := self._free_at - time.monotonic()) > _AHEAD_S:
                    await asyncio.sleep(early)
            target.write(data)
            await target.drain()
        raise ConnectionResetError
