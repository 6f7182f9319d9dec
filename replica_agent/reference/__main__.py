"""`python -m replica_agent.reference`: run one engine until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from replica_agent.reference.errors import StartError
from replica_agent.reference.runtime import Opened, opened, serve
from replica_agent.reference.settings import Settings, parse_settings

_log = logging.getLogger("replica_agent.reference")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run. Returns the exit code: 0 after a signal, 2 when it cannot start."""
    settings = parse_settings(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    _log.setLevel(logging.INFO)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        with opened(settings) as engine:
            asyncio.run(_until_signal(engine, settings))
    except StartError as error:
        _log.error("%s", error)
        return 2
    return 0


async def _until_signal(engine: Opened, settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _log.info("%s", engine.describe())
    await serve(engine, stop, settings.verbose)


def _leave(number: int, frame: FrameType | None) -> None:
    # Before the event loop runs: unwinds, so that sockets, threads and half-written models are cleaned up.
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
