"""One array of a table: memory is reserved once and taken page by page, as it is first written."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = npt.NDArray[np.uint64]
"""RouteKeys, or holder masks of 64 replicas."""
Rows: TypeAlias = npt.NDArray[np.uint32]
"""Numbers of rows."""
Places: TypeAlias = npt.NDArray[np.int64]
"""Numbers of slots, or indexes into another array."""
Flags: TypeAlias = npt.NDArray[np.bool_]


class Column:
    """`values` has room for `rows` numbers, all 0 at first, and never moves; `at` is the same for one at a time.

    An array that is copied when it grows would stop the event loop, and take twice the memory, just when there is most
    of it. Reading one number through `at` costs a third of what numpy takes for it.
    """

    __slots__ = ("_map", "at", "values")

    def __init__(self, dtype: npt.DTypeLike, rows: int) -> None:
        size = rows * np.dtype(dtype).itemsize
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.values: npt.NDArray[Any] = np.frombuffer(self._map, dtype, rows)
        self.at = self.values.data

    def release(self, row: int) -> None:
        """Gives back the memory from `row` on; what was there reads 0 afterwards."""
        start = row * self.values.itemsize
        page = min(-(-start // mmap.PAGESIZE) * mmap.PAGESIZE, len(self._map))
        self.values[row : page // self.values.itemsize] = 0
        if page < len(self._map):
            self._map.madvise(mmap.MADV_DONTNEED, page)


def as_keys(keys: Iterable[int] | Keys) -> Keys:
    """RouteKeys in any form as an array; a view where they are packed already."""
    if isinstance(keys, np.ndarray):
        return keys
    if isinstance(keys, array) and keys.typecode == "Q" and keys:
        return np.frombuffer(keys, np.uint64)
    return np.array(list(keys), np.uint64)
