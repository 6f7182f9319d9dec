"""A progress bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_EVERY_S = 0.1


class Progress:
    """Shows how far one piece of work of `total` steps is, on one line that is wiped at the end.

    Silent where `stream` is no terminal. Calls cost next to nothing: the clock is read once in a hundred.
    """

    def __init__(
        self, stream: TextIO, name: str, total: int, clock: Callable[[], float] = time.monotonic, *, step: int = 100
    ) -> None:
        self._stream = stream
        self._name = name
        self._total = total
        self._clock = clock
        self._step = step if stream.isatty() else total + 1
        self._began = self._shown = clock()

    def __call__(self, done: int) -> None:
        """`done` steps are done."""
        if done % self._step:
            return
        now = self._clock()
        if now - self._shown < _EVERY_S:
            return
        self._shown = now
        share = done / self._total
        bar = "█" * round(_WIDTH * share)
        left_s = (now - self._began) * (1 - share) / share
        self._stream.write(f"\r{self._name:<22} {bar:·<{_WIDTH}} {share:4.0%}  {left_s:.0f} s left \x1b[K")
        self._stream.flush()

    def close(self) -> None:
        """Wipes the line, if there is one."""
        if self._shown > self._began:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
