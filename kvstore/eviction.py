"""Which slot goes next: what a peer holds too before what only we hold, then least recently used."""

from __future__ import annotations

from typing import NamedTuple

from sortedcontainers import SortedList


class _Place(NamedTuple):
    """Sorts by when a slot goes: `alone`, nobody else holds a copy, goes after the others; `used` counts uses."""

    alone: bool
    used: int
    slot: int


class EvictionOrder:
    """Slots that may be evicted, in order. Owned and mutated by one `Pool`, which says which these are and calls again
    when one's use changes; `pop` is valid once. Everything is O(log n)."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._order = SortedList()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, slot: int) -> bool:
        return slot in self._places

    def put(self, slot: int, *, shared: bool, used: int) -> None:
        """`slot` may be evicted; moves it if it is here already."""
        place = _Place(not shared, used, slot)
        if self._places.get(slot) != place:
            self.discard(slot)
            self._places[slot] = place
            self._order.add(place)

    def discard(self, slot: int) -> None:
        """`slot` may not be evicted, if it might."""
        place = self._places.pop(slot, None)
        if place is not None:
            self._order.remove(place)

    def pop(self) -> int | None:
        """The slot to evict now, taken out; None when none may be."""
        if not self._order:
            return None
        slot: int = self._order.pop(0).slot
        del self._places[slot]
        return slot

    def clear(self) -> None:
        """No slot may be evicted."""
        self._places.clear()
        self._order.clear()

    def check(self) -> None:
        """Asserts that the order holds each slot's place, once."""
        assert list(self._order) == sorted(self._places.values()), "order and places differ"
