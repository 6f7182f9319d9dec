"""What the gateway itself asks engines: whether they are there, what they serve, how they tokenize."""

from __future__ import annotations

import ssl

import httpx

from gateway.fleet.replica import Replica
from kvstore.http_transport import HttpTransport


class EngineHttp:
    """Asks engines with the API key and over the TLS that each of them wants.

    Owns one client, with its connections, for each TLS context; `close` ends them. Not the way of clients' requests:
    that is `path.upstream`.
    """

    def __init__(self) -> None:
        self._clients: dict[ssl.SSLContext | None, httpx.AsyncClient] = {}

    async def get(self, replica: Replica, path: str, *, timeout_s: float) -> httpx.Response:
        """Its answer, whatever the status. Raises httpx.HTTPError."""
        return await self._ask("GET", replica, path, None, timeout_s)

    async def post(self, replica: Replica, path: str, body: bytes, *, timeout_s: float) -> httpx.Response:
        """Its answer to a JSON body, whatever the status. Raises httpx.HTTPError."""
        return await self._ask("POST", replica, path, body, timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    async def _ask(
        self, method: str, replica: Replica, path: str, body: bytes | None, timeout_s: float
    ) -> httpx.Response:
        access = replica.access
        client = self._clients.get(access.tls)
        if client is None:
            verify = True if access.tls is None else access.tls
            limits = httpx.Limits(max_connections=None)
            transport = HttpTransport(verify=verify, trust_env=False, limits=limits)
            client = self._clients[access.tls] = httpx.AsyncClient(transport=transport, trust_env=False)
        headers = [*access.headers, (b"content-type", b"application/json")] if body is not None else access.headers
        return await client.request(
            method,
            replica.engine.join(path),
            content=body,
            headers=headers,
            extensions=dict(access.extensions),
            timeout=timeout_s,
        )
