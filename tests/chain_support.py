"""Keys of chains, for tests to which only matters which are the same."""

from __future__ import annotations

from array import array


def chained(*numbers: int) -> array[int]:
    """Chained keys: each stands for the whole path up to it."""
    keys, path = array("Q"), 0
    for number in numbers:
        path = hash((path, number)) & (1 << 64) - 1
        keys.append(path)
    return keys
