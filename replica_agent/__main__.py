"""`python -m replica_agent`: the sidecar of one engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from replica_agent.app import create_app, warm_up
from replica_agent.errors import PortTaken, SettingsError, SocketTaken
from replica_agent.replica import Replica
from replica_agent.settings import Settings, load_settings
from replica_agent.telemetry import set_up_tracing
from replica_agent.tls import TlsProtocol

_logger = logging.getLogger("replica_agent")

EXIT_UNUSABLE = 2
STREAMS_GRACE_S = 1


class _Server(uvicorn.Server):
    """A server that leaves signals to the agent: uvicorn would raise them again at the end, and exit with an error."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by every connection: the second write of an answer would else wait 40 ms for the reader's delayed ACK,
    # about as long as a peer waits for a lease. asyncio sets it only for sockets whose protocol was named.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise PortTaken(f"--port: cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    return listener


async def serve(settings: Settings, listener: socket.socket) -> None:
    """Runs the agent until SIGTERM or SIGINT. Raises SocketTaken, and what a part raised, as an exception group."""
    replica = Replica(settings)
    replica.listen()
    config = uvicorn.Config(
        create_app(replica),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=STREAMS_GRACE_S,
        http="auto" if settings.tls is None else TlsProtocol,
    )
    if settings.tls is not None:
        config.load()  # or it would, later, and take TLS for a file of its own
        config.ssl = settings.tls.server
    server = _Server(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # A gateway that does not read keeps its response from ending; uvicorn would log its cancellation as an error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        replica.hub.close()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    stop_tracing = set_up_tracing(os.environ, settings.replica_id)
    await warm_up()
    gc.freeze()  # or every full collection looks at all that was imported, for some tens of ms
    try:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(replica.run())
            await server.serve(sockets=[listener])
            following.cancel()
    finally:
        await asyncio.to_thread(stop_tracing)


def main() -> int:
    """Reads the settings and serves. 0 after a clean stop, 2 when settings, port or socket cannot be used."""
    try:
        settings = load_settings(sys.argv[1:], os.environ)
        logging.basicConfig(
            level=settings.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        for noisy in ("httpx", "httpcore", "uvicorn", "asyncio"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        listener = _listen(settings)
    except (SettingsError, PortTaken) as error:
        sys.stderr.write(f"replica_agent: {error}\n")
        return EXIT_UNUSABLE
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls is None else "https"
    _logger.info("%s: engine %s, listening on %s://%s:%d", settings.replica_id, settings.engine, scheme, host, port)
    try:
        uvloop.run(serve(settings, listener))
    except SocketTaken as error:
        sys.stderr.write(f"replica_agent: {error}\n")
        return EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
