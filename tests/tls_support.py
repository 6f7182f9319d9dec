"""An authority of the tests' own, certificates that it signed, and TLS servers that show them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import trustme
import uvicorn
from agent_support import until
from starlette.types import ASGIApp

ENGINE_NAME = "engine.test"
"""What the engines' certificates say, and no URL of a test does."""


class Pki:
    """Files under `directory`: an authority, a certificate for ENGINE_NAME, one for a client; another authority, and
    a client's certificate of that."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.ca_file = str(directory / "ca.pem")
        authority.cert_pem.write_to_path(self.ca_file)
        self.engine = self._issue(authority, directory / "engine.pem", ENGINE_NAME)
        self.loopback = self._issue(authority, directory / "loopback.pem", "127.0.0.1")
        self.client = self._issue(authority, directory / "client.pem", "gateway.test")
        other = trustme.CA()
        self.other_ca_file = str(directory / "other-ca.pem")
        other.cert_pem.write_to_path(self.other_ca_file)
        self.stranger = self._issue(other, directory / "stranger.pem", "gateway.test")

    @staticmethod
    def _issue(authority: trustme.CA, path: Path, name: str) -> tuple[str, str]:
        """Certificate file and key file."""
        issued = authority.issue_cert(name)
        certificate, key = str(path), str(path.with_suffix(".key"))
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        return certificate, key


@contextlib.asynccontextmanager
async def serving_tls(
    app: ASGIApp, certificate: tuple[str, str], *, client_ca: str | None = None
) -> AsyncIterator[str]:
    """The app behind TLS on a free port of 127.0.0.1; gives its URL. With `client_ca`, clients must show a
    certificate of it."""
    config = uvicorn.Config(
        app,
        port=0,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        ssl_certfile=certificate[0],
        ssl_keyfile=certificate[1],
        ssl_ca_certs=client_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if client_ca else ssl.CERT_NONE,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started, "server start")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"https://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
