"""Who may speak to this agent over TLS: its server's contexts, and what each request is told of its connection."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvstore.transfer.tcp import TcpTls

VERIFIED = "client_certificate"
"""Key in a request's state: whether its connection showed a certificate, which then is of the right authority."""


class AgentTls(NamedTuple):
    """TLS of one agent: `server` for its HTTP port, where a client may come without a certificate and is then refused
    by path; `data` for the port of the tcp transport, where nobody may; `client` for other agents, whose certificates
    say `server_name` where that is not "". `required`: `/v1/*` is for clients with a certificate alone."""

    server: ssl.SSLContext
    data: ssl.SSLContext
    client: ssl.SSLContext
    server_name: str
    required: bool

    @property
    def transport(self) -> TcpTls:
        """For the tcp transport."""
        return TcpTls(self.data, self.client, self.server_name)


class TlsProtocol(HttpToolsProtocol):
    """uvicorn's, telling requests whether their client showed a certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Looks once for all requests of the connection."""
        super().connection_made(transport)
        encrypted: Any = transport.get_extra_info("ssl_object")
        shown = encrypted is not None and bool(encrypted.getpeercert())
        self.app_state = {**self.app_state, VERIFIED: shown}
