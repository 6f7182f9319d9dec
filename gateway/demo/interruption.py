"""What a signal does to the demo, so that it leaves nothing behind whenever it comes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(Exception):
    """A signal came before there was anything to stop in an orderly way."""


class Interruption:
    """Catches the signals that end a program at a terminal, from `install` to the end of the process.

    `action` says what one does now: raise at first, stop the scenario while it plays, nothing while everything is being
    stopped already.
    """

    def __init__(self) -> None:
        self.action: Callable[[], None] = _raise

    def install(self) -> None:
        """Handle the signals; call it in the main thread."""
        for signum in SIGNALS:
            signal.signal(signum, self._handle)

    def ignore(self) -> None:
        """From now on signals change nothing: what is left to do must be done."""
        self.action = lambda: None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.action()


def _raise() -> None:
    raise Interrupted
