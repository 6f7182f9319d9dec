"""Which boundary of a prompt decides its place on the ring."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.placement.settings import PlacementSettings


def _boundaries(limit: int) -> tuple[int, ...]:
    steps = [1, 2, 3]
    while steps[-1] < limit:
        steps.append(2 * steps[-2])
    return tuple(steps)


BOUNDARIES = _boundaries(1 << 22)
"""Depths, in units, at which traffic is counted: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... (steps of 1.5 and 1.33 in turn)."""


def boundary_at_most(units: int) -> int:
    """The deepest boundary that is no deeper than `units` (at least 1)."""
    return BOUNDARIES[bisect_right(BOUNDARIES, units) - 1]


class Split(NamedTuple):
    """Where a prompt leaves the crowd. Depths in units.

    `depth` is that of the ring key; 0 for a prompt without a whole unit. `hot` is the deepest boundary above it that
    carries too much traffic for one ring key (0: none) and `hot_replicas` how many replicas that traffic needs.
    """

    depth: int
    hot: int
    hot_replicas: int


class AdaptiveKey:
    """Finds the shallowest boundary of a prompt whose share of recent traffic is below a bound.

    Why: the first block alone sends a whole application with one system prompt to one replica (every request of the
    Mooncake conversation trace shares its first 512 tokens), and a fixed deeper one tears shorter prompts apart.

    The bound: a boundary is too hot when it was seen in at least `share_bound x (total / replicas + share_prior)` of
    the last `total` requests. `share_bound` is a fraction of one replica's mean traffic: 1/2, so that a replica can be
    the home of two such keys and still carry the mean. With reports the figure hardly matters (Mooncake conversation
    trace, 8 replicas, half load: the busiest does 1.05 to 1.06 of the mean work for any from 1/4 to 2, hit rate 0.21),
    that there is one does: keyed by its first unit, the same trace does 1.73, and 1.96 where only the ring is known.

    The prior keeps a conversation whole where only the ring is known: with 8, four requests through a boundary are
    needed before it can be too hot. A lone conversation of 30 turns then moves 8 times (23 with a prior of 1, 3 with
    32), each of 40 side by side never. More costs agreement: after one of two gateways restarts, they agree on 97.4 %
    of the homes with 32, on 99.5 % with 8.

    Owns the boundary keys of the last `window_requests` requests and their counts, nothing else: memory is bounded by
    about 40 keys a request. Only `observe` changes it; a `Split` is valid until the next `observe`.
    """

    def __init__(self, settings: PlacementSettings | None = None) -> None:
        settings = settings or PlacementSettings()
        self._size = settings.window_requests
        self._bound = settings.share_bound
        self._prior = settings.share_prior
        self._window: deque[tuple[int, ...]] = deque()
        self._counts: dict[int, int] = {}

    def split(self, keys: Sequence[int], replicas: int) -> Split:
        """Where a prompt with these unit keys leaves the crowd, in a fleet of `replicas`; changes nothing."""
        units = len(keys)
        if not units:
            return Split(0, 0, 0)
        limit = self._bound * (len(self._window) / replicas + self._prior)
        counts = self._counts
        hot, hot_count = 0, 0
        for boundary in BOUNDARIES:
            if boundary > units:
                break
            count = counts.get(keys[boundary - 1], 0)
            if count < limit:
                return Split(boundary, hot, self._needed(hot_count, limit, replicas))
            hot, hot_count = boundary, count
        return Split(units, hot, self._needed(hot_count, limit, replicas))

    def observe(self, keys: Sequence[int]) -> None:
        """Counts one placed request; the oldest leaves the window."""
        marks = tuple([keys[boundary - 1] for boundary in BOUNDARIES[: bisect_right(BOUNDARIES, len(keys))]])
        counts = self._counts
        for mark in marks:
            counts[mark] = counts.get(mark, 0) + 1
        self._window.append(marks)
        if len(self._window) > self._size:
            for mark in self._window.popleft():
                if counts[mark] == 1:
                    del counts[mark]
                else:
                    counts[mark] -= 1

    def seen(self) -> tuple[Mapping[int, int], int]:
        """How many of the last requests passed through each boundary key, and how many requests those are; valid until
        the next `observe`."""
        return self._counts, len(self._window)

    def check(self) -> None:
        """Asserts that the counts are those of the window."""
        counts: dict[int, int] = {}
        for marks in self._window:
            for mark in marks:
                counts[mark] = counts.get(mark, 0) + 1
        assert counts == self._counts
        assert len(self._window) <= self._size

    @staticmethod
    def _needed(count: int, limit: float, replicas: int) -> int:
        return min(replicas, int(-(-count // limit))) if count else 0
