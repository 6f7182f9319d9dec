"""How agents are reached: TLS where their URLs say so, and one client for all of them."""

from __future__ import annotations

import ssl
from typing import NamedTuple

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from gateway.errors import SettingsError
from gateway.settings import Settings
from kvstore.client_tls import client_context
from kvstore.errors import TlsFileUnusable


class AgentAccess(NamedTuple):
    """TLS to the agents whose URLs are https; `server_name` is the name in their certificates where it is not ""."""

    tls: ssl.SSLContext
    server_name: str


def agent_access(settings: Settings) -> AgentAccess:
    """Reads the certificates, now. Raises SettingsError naming the key."""
    tls = settings.tls
    agents = [httpx.URL(replica.agent) for replica in settings.replicas if replica.agent]
    if any((tls.ca_file, tls.cert_file, tls.key_file)) and agents and not any(url.scheme == "https" for url in agents):
        raise SettingsError(f"tls: the agents' URLs are {agents[0]} and the like; TLS needs https")
    try:
        context = client_context(tls.ca_file, tls.cert_file, tls.key_file)
    except TlsFileUnusable as error:
        raise SettingsError(f"tls.{error}") from error
    return AgentAccess(context, tls.server_name)


def agent_client(access: AgentAccess) -> httpx.AsyncClient:
    """A client for every agent of a deployment.

    Every report stream holds a connection of its own, so no limit of a pool applies. On aiohttp's transport a frame of
    a report stream costs some 200 us of CPU until it has been read, with httpcore's 330, and a bare socket 180
    (`benchmarks/README.md`, load exchange); agents send up to 200 of them a second.
    """

    def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=10, ssl=access.tls),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def expect(request: httpx.Request) -> None:
        request.extensions = {**request.extensions, "sni_hostname": access.server_name}

    hooks = {"request": [expect]} if access.server_name else {}
    return httpx.AsyncClient(trust_env=False, transport=AiohttpTransport(client=session), event_hooks=hooks)
