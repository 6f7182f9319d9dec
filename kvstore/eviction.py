"""Which slot goes next: what a peer holds too before what only we hold, then least recently used."""

from __future__ import annotations

import heapq
from typing import TypeAlias

_Place: TypeAlias = tuple[bool, int, int]
"""Sorts by when a slot goes: whether we alone hold it, its last use, the slot."""

_SPARE = 64


class EvictionOrder:
    """Slots that may be evicted, in order. Owned and mutated by one `Pool`, which says which these are and calls again
    when one's use changes; `pop` is valid once. Everything is O(log n), over many calls.

    The heap keeps places that are no more until they come up, or until it holds more of them than of the others.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._heap: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, slot: int) -> bool:
        return slot in self._places

    def put(self, slot: int, *, shared: bool, used: int) -> None:
        """`slot` may be evicted; moves it if it is here already."""
        place = (not shared, used, slot)
        if self._places.get(slot) != place:
            self._places[slot] = place
            heapq.heappush(self._heap, place)
            self._tidy()

    def discard(self, slot: int) -> None:
        """`slot` may not be evicted, if it might."""
        if self._places.pop(slot, None) is not None:
            self._tidy()

    def pop(self) -> int | None:
        """The slot to evict now, taken out; None when none may be."""
        while self._heap:
            place = heapq.heappop(self._heap)
            slot = place[2]
            if self._places.get(slot) == place:
                del self._places[slot]
                self._tidy()
                return slot
        return None

    def clear(self) -> None:
        """No slot may be evicted."""
        self._places.clear()
        self._heap.clear()

    def check(self) -> None:
        """Asserts that the heap holds each slot's place, and not many more."""
        assert set(self._places.values()) <= set(self._heap), "a slot that never comes up"
        assert len(self._heap) <= 2 * len(self._places) + _SPARE, "more places than slots"
        assert all(self._heap[(at - 1) // 2] <= place for at, place in enumerate(self._heap) if at), "no heap"

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._places) + _SPARE:
            self._heap = sorted(self._places.values())
