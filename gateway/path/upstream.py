"""The way to the engines: one pooled transport, and the one place where its errors are mapped.

httpx's request and response over httpx-aiohttp's transport, without a client around it: 140 us of CPU a request
against about 1,500 with httpcore's pool. The session is made here because the transport's own keeps aiohttp's limit of
100 connections whatever limits it is given. TLS is a session's, so engines of different TLS settings have sessions of
their own.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from gateway.errors import UpstreamError
from gateway.fleet.replica import Replica

KEEPALIVE_S = 4.0
"""Idle connections are closed before engines do it (uvicorn: 5 s), so that none is closed under a new request."""

MAX_URLS = 1024


class Upstream:
    """Sends requests to engines. Owns the connection pool; `close` ends it."""

    def __init__(self, *, connect_timeout_s: float, first_byte_timeout_s: float) -> None:
        self._transports: dict[ssl.SSLContext | None, AiohttpTransport] = {}
        self._extensions = {"timeout": {"connect": connect_timeout_s, "read": first_byte_timeout_s}}
        self._urls: dict[tuple[httpx.URL, str], httpx.URL] = {}

    async def send(
        self, replica: Replica, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> httpx.Response:
        """The engine's response, its body not yet read; the caller must `aclose` it.

        Raises UpstreamError when there is none, or none for the client: kind connect, timeout, reset, protocol or
        unauthorized.
        """
        access = replica.access
        extensions = {**self._extensions, **access.extensions} if access.extensions else self._extensions
        request = httpx.Request(
            method, self._url(replica.engine, path), headers=headers, content=body, extensions=extensions
        )
        transport = self._transports.get(access.tls)
        if transport is None:
            transport = self._transports[access.tls] = AiohttpTransport(client=functools.partial(_session, access.tls))
        try:
            response = await transport.handle_async_request(request)
        except (httpx.HTTPError, aiohttp.ClientError, OSError, ValueError) as error:
            raise map_error(replica.id, error) from error
        if not 200 <= response.status_code <= 599:
            await response.aclose()
            raise UpstreamError(replica.id, "protocol", f"answered with status {response.status_code}")
        if response.status_code == 401 and access.keyed:  # not the client's key, so not the client's to hear
            await response.aclose()
            raise UpstreamError(replica.id, "unauthorized", "refuses the gateway's API key")
        return response

    def _url(self, engine: httpx.URL, path: str) -> httpx.URL:
        """Parsing a URL costs as much as placing a request; clients use few paths, but may make up any number."""
        url = self._urls.get((engine, path))
        if url is None:
            if len(self._urls) >= MAX_URLS:
                self._urls.clear()
            url = self._urls[engine, path] = engine.copy_with(raw_path=path.encode("ascii"))
        return url

    async def chunks(self, replica: Replica, response: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UpstreamError when it breaks off."""
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            async for chunk in response.stream:
                yield chunk
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            raise map_error(replica.id, error) from error

    async def close(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            await transport.aclose()


def _session(tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=10, ssl=tls or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def map_error(replica: str, error: Exception) -> UpstreamError:
    """The transport reports several kinds under one name (a closed connection as ConnectTimeout): look at the cause."""
    cause = error.__cause__ or error
    text = str(cause) or type(cause).__name__
    if isinstance(cause, aiohttp.ClientConnectorError | httpx.ConnectError):
        return UpstreamError(replica, "connect", f"cannot connect: {text}")
    if isinstance(cause, aiohttp.ServerTimeoutError | httpx.TimeoutException | TimeoutError):
        kind = "connect" if isinstance(cause, aiohttp.ConnectionTimeoutError) else "timeout"
        return UpstreamError(replica, kind, f"no answer in time: {text}")
    if isinstance(cause, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError | OSError | httpx.NetworkError):
        return UpstreamError(replica, "reset", f"connection lost: {text}")
    return UpstreamError(replica, "protocol", text)
