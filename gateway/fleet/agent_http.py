"""The client by which a gateway follows its agents."""

from __future__ import annotations

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport


def agent_client() -> httpx.AsyncClient:
    """Without a limit on connections: every agent's report stream holds one of its own.

    On aiohttp's transport a frame of a report stream costs some 200 us of CPU until it has been read, with httpcore's
    330, and a bare socket 180 (`benchmarks/README.md`, load exchange); agents send up to 200 of them a second.
    """
    return httpx.AsyncClient(trust_env=False, transport=AiohttpTransport(client=_session))


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=10), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    )
