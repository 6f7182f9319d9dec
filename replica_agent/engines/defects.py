"""What nobody expected in a thread that an engine relies on: logged, and lived through."""

from __future__ import annotations

import logging


class Defects:
    """Counts what was raised in one thread, and logs the 1st, 2nd, 4th, ... of it: what is broken may be so at every
    step. Used by that thread alone."""

    def __init__(self, log: logging.Logger) -> None:
        self.count = 0
        self._log = log

    def note(self, what: str) -> None:
        """The exception that is being handled; `what` came to nothing by it."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            self._log.exception("%s (%d of the kind so far)", what, self.count)
