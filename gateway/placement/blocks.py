"""The blocks that an index knows, in a few arrays of one row for each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gateway.placement.column import Column, Flags, Keys, Places, Rows
from gateway.placement.key_table import KeyTable, rows_fitting
from gateway.placement.walk import Chain
from kvstore.messages import Tier

ROW_BYTES = 8 + 4 + 8 + 4
"""Key, place among the free rows, parent and stamp of one block; each word of holder sets is 8 more."""
SWEEP_ROWS = 262_144
"""Rows that are looked through at a time for those of one replica: 0.3 ms (`benchmarks/index.py`)."""
PIECE_BLOCKS = 4_096
"""More blocks than this are changed in pieces; one takes 0.5-2 ms (`benchmarks/index.py`)."""
LEAST_ROWS = 4 * PIECE_BLOCKS
SAMPLE = 8
"""One block is evicted of so many that were looked at."""

_STRIDE = np.uint64(0x9E3779B1)
_STAMPS = 1 << 32


class Blocks:
    """Key, parent, stamp of the last use and holders of every block, by its row in `table`.

    Holders are kept in planes: one column for each tier and each word (64 replicas) that anybody has held anything in,
    so what nobody uses takes no memory. Owns all columns and the bound on their rows; `PrefixIndex` alone changes them,
    and sees to it that a row is free when no plane has a holder for it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        rows = rows_fitting(limit_bytes, ROW_BYTES + 8)
        self._rows = rows + 1
        self.table = KeyTable(rows)
        self.parents = Column(np.uint64, self._rows)
        self.planes: dict[tuple[Tier, int], Column] = {}
        self._stamps = Column(np.uint32, self._rows)
        self._clock = 0
        self._hand = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self.table.nbytes + self.table.top * (8 + 4 + 8 * len(self.planes))

    def plane(self, tier: Tier, word: int) -> Column:
        """The holders in `tier` among the replicas of a word; a new one leaves less room, so `fit` is to be called."""
        plane = self.planes.get((tier, word))
        if plane is None:
            plane = self.planes[tier, word] = Column(np.uint64, self._rows)
        return plane

    # room

    @property
    def half_full(self) -> bool:
        """Whether it matters what is used: as long as there is room for as much again nothing is evicted soon."""
        return self.table.room < len(self.table)

    def fit(self, spare_bytes: int) -> Rows:
        """Lowers the bound on rows to what the planes leave room for beside `spare_bytes` for others.

        Returns rows above it that have blocks: when those are dropped, call `shrink`.
        """
        rows = rows_fitting(self.limit_bytes - spare_bytes, ROW_BYTES + 8 * len(self.planes))
        self.table.capacity = min(self.table.capacity, max(rows, LEAST_ROWS))
        return self._live(np.arange(self.table.capacity + 1, self.table.top, dtype=np.uint32))

    def shrink(self) -> None:
        """Gives back the memory of rows above the bound."""
        self.table.shrink()
        for column in (self.parents, self._stamps, *self.planes.values()):
            column.release(self.table.top)

    def oldest(self, count: int) -> Rows:
        """About `count` blocks, at least one: of `SAMPLE` times as many all over the rows those used longest ago."""
        size = count * SAMPLE
        steps = np.arange(self._hand, self._hand + size, dtype=np.uint64)
        self._hand += size
        rows = self._live((steps * _STRIDE % np.uint64(self.table.top - 1)).astype(np.uint32) + np.uint32(1))
        if not rows.size:
            return self._live(np.arange(1, self.table.top, dtype=np.uint32))
        last = -(-rows.size // SAMPLE)
        chosen = np.argpartition(self._stamps.values.take(rows), last - 1)[:last]
        return np.unique(rows.take(chosen))

    # stamps

    def tick(self, count: int) -> int:
        """Takes `count` stamps, all later than any before; returns the latest."""
        if self._clock + count >= _STAMPS:
            self._stamps.values[: self.table.top] >>= np.uint32(1)
            self._clock >>= 1
        self._clock += count
        return self._clock

    def use(self, rows: Rows) -> Flags | None:
        """Stamps blocks, a prefix later than its tail. If a row comes more than once: which are the first of theirs."""
        latest = self.tick(rows.size)
        stamps = np.arange(latest, latest - rows.size, -1, dtype=np.uint32)
        self._stamps.values[rows[::-1]] = stamps[::-1]  # of equal rows the last one written stays
        first: Flags = self._stamps.values.take(rows) == stamps
        return None if np.count_nonzero(first) == rows.size else first

    def stamp(self, chain: Chain) -> None:
        """As `use`, for a chain that a placement makes use of."""
        chain.stamp(self._stamps, self.tick(chain.length))

    # holders

    def masks(self, tier: Tier, word: int, rows: Rows) -> Keys:
        """One word of the holder sets of blocks."""
        plane = self.planes.get((tier, word))
        return np.zeros(rows.size, np.uint64) if plane is None else plane.values.take(rows)

    def others(self, tier: Tier, word: int, rows: Rows) -> list[tuple[int, Keys]]:
        """The other words of the holder sets of blocks, with their numbers."""
        return [
            (other, plane.values.take(rows))
            for (held_tier, other), plane in self.planes.items()
            if held_tier is tier and other != word
        ]

    def unheld(self, rows: Rows) -> Places:
        """Which of these rows (indexes) have a block that nobody holds any more."""
        at = np.arange(rows.size)
        for plane in self.planes.values():
            at = at[plane.values.take(rows.take(at)) == 0]
        return at

    def held(self, tier: Tier, word: int, mask: np.uint64, most: int) -> Iterator[Rows]:
        """Rows of the blocks that a replica holds in `tier`, at most `most` at a time, none where there are none among
        many; they may change in between."""
        plane, begin = self.planes.get((tier, word)), 1
        while plane is not None and begin < self.table.top:
            rows = (plane.values[begin : min(begin + SWEEP_ROWS, self.table.top)] & mask).nonzero()[0][: most + 1]
            last = begin + SWEEP_ROWS
            if rows.size > most:
                last = begin + int(rows[most])
            yield (rows[:most] + begin).astype(np.uint32)
            begin = last

    def shared(self, tier: Tier, masks: dict[int, int], least: int = 2) -> tuple[Rows, list[tuple[int, Keys]]]:
        """Rows of the blocks that `least` or more of these holders have in `tier`, ascending, and which by word."""
        planes = [(word, self.planes[tier, word]) for word in sorted(masks) if (tier, word) in self.planes]
        found = [np.zeros(0, np.uint32)]
        for begin in range(1, self.table.top, SWEEP_ROWS):
            end = min(begin + SWEEP_ROWS, self.table.top)
            copies = np.zeros(end - begin, np.uint16)
            for word, plane in planes:
                copies += np.bitwise_count(plane.values[begin:end] & np.uint64(masks[word]))
            found.append(((copies >= least).nonzero()[0] + begin).astype(np.uint32))
        rows = np.concatenate(found)
        return rows, [(word, plane.values.take(rows) & np.uint64(masks[word])) for word, plane in planes]

    def drop(self, rows: Rows, slots: Places | None = None) -> None:
        """Frees rows whose blocks nobody holds."""
        if slots is None:
            rows, slots = self.table.locate(self.table.keys.values.take(rows))
        self.table.drop(rows, slots)

    def _live(self, rows: Rows) -> Rows:
        live: Rows = rows[self.table.keys.values.take(rows) != 0]
        return live

    def check(self) -> None:
        """Asserts that exactly the rows with holders have a key."""
        self.table.check()
        top = self.table.top
        held = np.zeros(top, np.bool_)
        for plane in self.planes.values():
            held |= plane.values[:top] != 0
        assert (held == (self.table.keys.values[:top] != 0)).all(), (
            "a block without holders, or holders without a block"
        )
        assert self._clock < _STAMPS
