"""Dictionaries that are done with, freed a little at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class CastOff:
    """Owns what a reset or a clear left behind. To free a million entries at once would hold the event loop for some
    tenths of a second (`benchmarks/reports.py`); `sweep` has others' turns in between."""

    def __init__(self) -> None:
        self._left: list[dict[Any, Any]] = []

    def add(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Takes over tables that nobody uses any more."""
        self._left += filter(None, tables)

    def sweep(self, limit: int) -> bool:
        """Frees about `limit` entries; whether there are more."""
        while self._left and limit > 0:
            last = self._left[-1]
            for _ in range(min(limit, len(last))):
                last.popitem()
                limit -= 1
            if not last:
                self._left.pop()
        return bool(self._left)
