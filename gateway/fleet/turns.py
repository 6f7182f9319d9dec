"""How much of the event loop one report stream may take: at a time, and in the long run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_S = 0.001
"""After so long others have their turn: a piece of changes takes about that (`gateway.placement.blocks`)."""

SHARE = 0.2
"""Of the time, for a stream on which there is always something to apply. An honest agent needs a fifth of that: it
takes at most 210,000 blocks a second out of its engine's events, and a gateway applies five millions
(`benchmarks/README.md`, report streams and the index)."""

AHEAD_S = 2.0
"""CPU seconds that a stream may be ahead of its share: six snapshots of a million blocks one after the other."""


class Turns:
    """One stream's use of the event loop.

    Whoever takes what a peer sends calls `begin` before the work, `end` where it waits for more, and `pass_on` as often
    as it can in between, waiting for nothing else there: it gives others their turn once this one has lasted for
    `TURN_S`. A stream that is `AHEAD_S` ahead of `SHARE` of the time rests as well. It then reads no more, so that the
    peer is held up in turn: what it has not been able to send is its own to keep. Of many streams that never end each
    has its turn, one after the other.

    Owns the stream's account. Work is the CPU time of the thread, for what other processes take is no fault of the
    peer's, and nor is the time during which a machine is suspended. One user, on the event loop.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._working = False
        self._seen = self._resumed = clock()
        self._work_began = 0.0
        self._turn_s = 0.0
        self._ahead_s = 0.0

    def begin(self) -> None:
        """Work begins."""
        self._working = True
        self._resumed, self._work_began = self._clock(), self._cpu()

    def end(self) -> None:
        """It is over for now; but what has arrived meanwhile is read without waiting, so the turn goes on with it."""
        self._settle()
        self._turn_s += self._clock() - self._resumed
        self._working = False

    async def pass_on(self) -> None:
        """Others have their turn, if this one has lasted long enough; the work goes on after it."""
        if self._turn_s + self._clock() - self._resumed < TURN_S:
            return
        self._settle()
        await asyncio.sleep(max(0.0, self._ahead_s - AHEAD_S) / SHARE)
        self._turn_s = 0.0
        self._resumed, self._work_began = self._clock(), self._cpu()

    def check(self) -> None:
        """Asserts that nobody is behind: time that was not used is not kept."""
        assert self._ahead_s >= 0

    def _settle(self) -> None:
        assert self._working, "begun"
        now, cpu = self._clock(), self._cpu()
        self._ahead_s = max(0.0, self._ahead_s - SHARE * (now - self._seen)) + cpu - self._work_began
        self._seen, self._work_began = now, cpu
