"""Walks a prompt's keys through the index: how long a prefix each replica holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gateway.placement.column import Column, Keys, Rows, as_keys
from gateway.placement.key_table import KeyTable

SHORT = 64
"""Up to this many blocks are walked one by one: no more than numpy's calls cost (`benchmarks/structures.py`)."""
FEW = 96
"""Holder sets of up to this many blocks are looked at one by one."""
RUN = 1024
SCATTERED = 16
"""After a run of fewer consecutive rows than this the next keys, if there are more, are looked up all at once."""
BATCH = 512


class Runs(NamedTuple):
    """Longest prefixes of a prompt in units, by replica; a replica that has none is left out.

    `resident`: held in HBM. `usable`: held in HBM and, from where that ends, in the pool of its own agent. `served`:
    held in that pool from the first block on, which is what a peer can read.
    """

    resident: dict[str, int]
    usable: dict[str, int]
    served: dict[str, int]


class Chain:
    """The rows of the longest prefix of `keys` that anybody holds; valid until the index changes."""

    __slots__ = ("_parts", "length")

    def __init__(self, table: KeyTable, keys: Sequence[int] | Keys) -> None:
        self.length = 0
        self._parts: list[list[int] | slice | Rows] = []
        if len(keys) <= SHORT:
            self._walk_short(table, keys)
        else:
            self._walk_long(table, as_keys(keys))

    def masks(self, column: Column | None) -> Keys | list[int]:
        """What stands in a column for each block of the chain: a list of numbers for a short one, else an array."""
        if column is None:
            return [0] * self.length
        parts = self._parts
        if not parts:
            return []
        if isinstance(first := parts[0], list):
            at = column.at
            return [at[row] for row in first]
        taken = [column.values[part] if isinstance(part, slice) else column.values.take(part) for part in parts]
        masks = taken[0] if len(taken) == 1 else np.concatenate(taken)
        return masks.tolist() if masks.size <= FEW else masks

    def stamp(self, column: Column, clock: int) -> None:
        """Writes `clock`, and less and less of it down the chain, so that a prefix looks younger than its tail."""
        stamps = np.arange(clock, clock - self.length, -1, dtype=np.uint32)
        begin = 0
        for part in self._parts:
            size = part.stop - part.start if isinstance(part, slice) else len(part)
            column.values[part] = stamps[begin : begin + size]
            begin += size

    def _walk_short(self, table: KeyTable, keys: Sequence[int] | Keys) -> None:
        at, row = table.keys.at, 0
        rows: list[int] = []
        for key in keys:
            row += 1  # mostly the chain was added at once, and this is it
            if at[row] != key:
                row = table.find_one(int(key))
                if not row:
                    break
            rows.append(row)
        if rows:
            self._parts.append(rows)
            self.length = len(rows)

    def _walk_long(self, table: KeyTable, keys: Keys) -> None:
        column, begin, count = table.keys.values, 0, keys.size
        while begin < count:
            row = table.find_one(int(keys[begin]))
            if not row:
                break
            run = column[row : row + min(RUN, count - begin)]
            differ = run != keys[begin : begin + run.size]
            length = int(differ.argmax())
            if not length:
                length = run.size
            self._parts.append(slice(row, row + length))
            begin += length
            batch = BATCH
            while length < SCATTERED and begin + SCATTERED < count:
                rows = table.find(keys[begin : begin + batch])
                known = int((rows == 0).argmax()) if np.count_nonzero(rows) != rows.size else rows.size
                if known:
                    self._parts.append(rows[:known])
                begin += known
                if known < rows.size:
                    self.length = begin
                    return
                batch *= 4
        self.length = begin


def short_ends(table: KeyTable, column: Column, keys: Sequence[int] | Keys, bits: int) -> Iterator[tuple[int, int]]:
    """The `ends` of a `Chain` in one column, in one go: a third less for up to `SHORT` blocks."""
    at, held, row = table.keys.at, column.at, 0
    for position, key in enumerate(keys):
        row += 1
        if at[row] != key:
            row = table.find_one(int(key))  # row 0, that of no key, has no holders
        still = bits & held[row]
        if still != bits:
            yield position, bits ^ still
            bits = still
            if not bits:
                return
    if bits:
        yield len(keys), bits


def ends(masks: Keys | list[int], bits: int, begin: int = 0) -> Iterator[tuple[int, int]]:
    """Where the replicas of `bits` end that hold every block from `begin` on: (blocks, their bits), shortest first."""
    if isinstance(masks, list):
        for position in range(begin, len(masks)):
            still = bits & masks[position]
            if still != bits:
                yield position, bits ^ still
                bits = still
                if not bits:
                    return
        if bits:
            yield len(masks), bits
        return
    if masks.size <= begin:
        yield begin, bits
        return
    held = np.bitwise_and.accumulate(masks[begin:] & np.uint64(bits))
    first, last = int(held[0]), int(held[-1])
    if first != bits:
        yield begin, bits ^ first
    if last != first:
        before = first
        for at in ((held[1:] != held[:-1]).nonzero()[0] + 1).tolist():
            after = int(held[at])
            yield begin + at, before ^ after
            before = after
    if last:
        yield begin + held.size, last
