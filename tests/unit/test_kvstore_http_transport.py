"""A server whose process was just killed resets connections before anybody has looked at them."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter

import httpx
import uvloop

from kvstore.http_transport import HttpTransport
from replica_agent.engine_client import EngineClient, EngineWatcher

REQUESTS = 300
RESET = struct.pack("ii", 1, 0)


class Resetting:
    """Accepts connections and resets them at once."""

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()


async def errors_of(transport: httpx.AsyncBaseTransport, url: str) -> Counter[type[Exception]]:
    found: Counter[type[Exception]] = Counter()
    async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
        for _ in range(REQUESTS):
            try:
                await client.get(url)
            except Exception as error:
                found[type(error)] += 1
    return found


def test_every_failure_is_one_of_http() -> None:
    with Resetting() as url:
        errors = uvloop.run(errors_of(HttpTransport(), url))
    assert errors.total() == REQUESTS
    assert all(issubclass(kind, httpx.HTTPError) for kind in errors)


class Nobody:
    """An observer to whom nothing matters."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def test_an_agent_outlives_an_engine_that_resets() -> None:
    async def look(url: str) -> None:
        client = EngineClient(url)
        watcher = EngineWatcher(client, Nobody(), interval_s=0.01)  # type: ignore[arg-type]
        for _ in range(REQUESTS):
            await watcher.look()
        await client.close()

    with Resetting() as url:
        uvloop.run(look(url))
