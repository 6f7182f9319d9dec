"""How many copies of a prefix its traffic needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gateway.placement.column import Keys
from gateway.placement.settings import PlacementSettings

Shares = npt.NDArray[np.float64]
Holders = Sequence[tuple[int, Keys]]
"""Words of holder sets: a word's number, and that word of every block."""
Links = npt.NDArray[np.int64]
"""For every block the index of the one before it, -1 where that is not among them."""


class Demand(Protocol):
    """What share of the traffic passes through each block of a forest: of all blocks that `least` replicas hold."""

    least: int

    def shares(self, keys: Keys, above: Links, holders: Holders) -> Shares:
        """One for each of `keys`, which these replicas hold."""


class Traffic:
    """By the gateway's own last requests, which it counts at some depths of their prompts (`AdaptiveKey`).

    A block between two of those depths has the share of the one above it, so of two answers the one that needs more.
    """

    least = 2

    def __init__(self, counts: Mapping[int, int], requests: int) -> None:
        """Copies `counts`, of `requests`."""
        self._marks = np.fromiter(counts.keys(), np.uint64, len(counts))
        self._counts = np.fromiter(counts.values(), np.float64, len(counts))
        self._requests = requests

    def shares(self, keys: Keys, above: Links, holders: Holders) -> Shares:
        """See `Demand`."""
        marks, counts = self._marks, self._counts
        order = np.argsort(marks)
        found = np.append(np.zeros(keys.size), 0.0)
        if marks.size:
            places = order.take(np.searchsorted(marks, keys, sorter=order), mode="clip")
            marked = marks.take(places) == keys
            found[:-1] = np.where(marked, counts.take(places), 0.0)
            above = np.append(np.where(marked, np.arange(keys.size), above), -1)
            for _ in range(keys.size.bit_length()):  # each step looks twice as far up
                above = above.take(above)
        else:
            above = np.full(keys.size + 1, -1)
        shares: Shares = found.take(above[:-1]) / max(1, self._requests)
        return shares


class Held:
    """By what the fleet holds: the ends of prompts at and below each block, as a share of all ends.

    A prompt ends at a block whose replica holds none that follows it. What caches hold are the prompts that were last
    worked on, so where no request is seen this tells through which prefixes they came. One that was asked for again and
    again, and nothing else after it, counts once.
    """

    least = 1

    def shares(self, keys: Keys, above: Links, holders: Holders) -> Shares:
        """See `Demand`."""
        ends = np.zeros(keys.size, np.float64)
        followed = (above >= 0).nonzero()[0]
        for _, masks in holders:
            following = np.zeros(keys.size, np.uint64)
            np.bitwise_or.at(following, above.take(followed), masks.take(followed))
            ends += np.bitwise_count(masks & ~following)
        sums = ends
        for _ in range(keys.size.bit_length()):  # each step adds what is twice as far below
            there = (above >= 0).nonzero()[0]
            if not there.size:
                break
            sums = sums + np.bincount(above.take(there), sums.take(there), keys.size)
            above = np.append(above, -1).take(above)
        shares: Shares = sums / max(1.0, ends.sum())
        return shares


class Load:
    """Requests at the engines, running and waiting, of late. Owns a moving average; `observe` it at a steady pace.

    `weight` is the share of a new observation; the first ones are averaged, until there are as many as it stands for.
    """

    def __init__(self, settings: PlacementSettings | None = None, weight: float = 0.05) -> None:
        self._settings = settings or PlacementSettings()
        self._weight = weight
        self._observed = 0
        self.sequences = 0.0

    def observe(self, sequences: int) -> None:
        """So many are there now."""
        self._observed += 1
        self.sequences += max(self._weight, 1 / self._observed) * (sequences - self.sequences)

    def check(self) -> None:
        """Asserts that an average of counts is no less than 0."""
        assert self.sequences >= 0

    def needed(self, shares: Shares, replicas: int) -> Links:
        """Copies that prefixes with these shares of the traffic need: as many as replicas are filled by it up to the
        bound of placement, (1 + epsilon) x mean + floor, at least 1. An idle fleet needs no second copy of anything."""
        total = self.sequences
        most = (1 + self._settings.eps) * total / max(1, replicas) + self._settings.floor_sequences
        # A share that comes out as a whole number of replicas is not to be rounded up by its last bit.
        needed: Links = np.ceil(shares * total / most - 1e-9).astype(np.int64)
        return np.clip(needed, 1, max(1, replicas))
