"""Runs the gateway as a process: both ports, signals, and a stop that finishes what was begun."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from gateway.app import Gateway
from gateway.errors import SettingsError
from gateway.http_protocol import BoundedProtocol
from gateway.settings import Settings
from gateway.telemetry import start_logging, start_tracing, stop_tracing

log = logging.getLogger(__name__)

BACKLOG = 2048


class _Server(uvicorn.Server):
    """A uvicorn server whose signals are handled by `serve`, for both servers together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket. Raises SettingsError that names the flag when the port is taken or the address is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, ValueError, UnicodeError) as error:
        bound.close()
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"cannot listen on {host}:{port}: {why}; choose another with {flag}") from error
    bound.listen(BACKLOG)
    bound.setblocking(False)
    return bound


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises SettingsError when a port is taken."""
    start_logging(settings.telemetry)
    _raise_file_limit()
    listen = settings.listen
    public = bind(listen.host, listen.port, "--port")
    admin = bind(listen.admin_host, listen.admin_port, "--admin-port")
    start_tracing(settings.telemetry)
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(_serve(settings, public, admin))
    stop_tracing()


def _raise_file_limit() -> None:
    """A connection is a file: use all that the system allows, not the 1,024 of an ordinary shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


async def _serve(settings: Settings, public: socket.socket, admin: socket.socket) -> None:
    gateway = Gateway(settings)
    servers = [_server(app, settings.limits.drain_timeout_s) for app in (gateway.public, gateway.admin)]

    def stop() -> None:
        for server in servers:
            server.force_exit = server.should_exit
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    gc.freeze()  # or every full collection looks at all that was imported, for some tens of ms
    what = "observing only: requests are refused at" if settings.observe_only else "serving"
    log.info("%s %s/v1, admin on %s/admin", what, address(public), address(admin))
    async with gateway.running(on_failure=stop):
        await asyncio.gather(servers[0].serve([public]), servers[1].serve([admin]))


def _server(app: ASGIApp, drain_s: int) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=True,
            timeout_graceful_shutdown=drain_s,
        )
    )


def address(bound: socket.socket) -> str:
    """Where a socket listens, as a client would write it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
