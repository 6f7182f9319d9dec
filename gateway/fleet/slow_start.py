"""Lets a replica that has just come up take load little by little."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST = 0.1
"""Share of its weight that a replica begins with; below that the floors of the bounds decide anyway."""

WARM = 1 / 8
"""A replica that holds this share of its cache has been at work: it was not started, only not heard of."""


class SlowStart:
    """How much of its weight in the load bounds each replica has.

    All that is short of work would send its cold prompts to the one cache with room, and nobody knows yet how fast that
    replica is: engines compile and capture while they serve their first requests. So its weight in the bounds (not on
    the ring: its keys are its own at once) grows from `LEAST` to 1 in `seconds`. One that comes back with its cache, by
    its agent's word, starts where it was. With several gateways each counts for itself.

    Owns when each replica came up; `came_up` and `reported` are the only ones to change that. With 0 seconds all are
    warm always.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since: dict[str, float] = {}

    def came_up(self, replica: str, held_blocks: int, capacity_blocks: int) -> None:
        """Its engine answers, for the first time or again, and so many blocks are reported of it now."""
        if not _is_warm(held_blocks, capacity_blocks):
            self._since[replica] = self._clock()

    def reported(self, replica: str, held_blocks: int, capacity_blocks: int) -> None:
        """The first word of its agent for some time: what it holds it may have held when it came up."""
        if _is_warm(held_blocks, capacity_blocks):
            self._since.pop(replica, None)

    def warmth(self, replica: str) -> float:
        """From `LEAST` to 1."""
        since = self._since.get(replica)
        if since is None or not self._seconds:
            return 1.0
        share = (self._clock() - since) / self._seconds
        if share >= 1:
            del self._since[replica]
            return 1.0
        return max(share, LEAST)

    def check(self) -> None:
        """Asserts that nobody came up later than now."""
        assert all(since <= self._clock() for since in self._since.values())


def _is_warm(held_blocks: int, capacity_blocks: int) -> bool:
    return 0 < capacity_blocks * WARM <= held_blocks
