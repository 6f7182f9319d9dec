"""One replica's part of the index, and the parents that are its own."""

from __future__ import annotations

import numpy as np

from gateway.placement.column import Column, Flags, Keys
from gateway.placement.holders import WORD
from gateway.placement.key_table import KeyTable, rows_fitting
from kvstore.messages import Tier

_U64 = (1 << 64) - 1


class Share:
    """A replica's bit, and how much it holds per tier.

    `counts` and `sums` are number and sum (modulo 2^64) of the keys that the index holds for it; `evicted` and
    `evicted_sums` of those which the replica has reported and the index has dropped for lack of room.
    """

    __slots__ = ("alternates", "bit", "counts", "evicted", "evicted_sums", "mask", "rest", "salt", "sums", "word")

    def __init__(self, number: int) -> None:
        self.bit = 1 << number
        self.word = number // WORD
        self.mask = np.uint64(1 << number % WORD)
        self.rest = ~self.mask
        self.salt = np.uint64((number + 1) * 0x9E3779B97F4A7C15 & _U64)
        self.alternates = 0
        self.counts = [0 for _ in Tier]
        self.sums = [0 for _ in Tier]
        self.evicted = [0 for _ in Tier]
        self.evicted_sums = [0 for _ in Tier]

    def digest(self) -> int:
        """Of everything the replica has reported; see `kvstore.messages.digest_of`."""
        return sum((self.sums[tier] + self.evicted_sums[tier]) * (2 * tier + 1) for tier in Tier) & _U64


class Alternates:
    """Parents that differ from the index's own, by replica and key: two block sizes give one key two parents.

    Full, it takes no more: such a block is told the parent that the index has, and a report on shared prefixes may cut
    there.
    """

    def __init__(self, limit_bytes: int) -> None:
        capacity = rows_fitting(limit_bytes, 8 + 4 + 8)
        self._table = KeyTable(capacity)
        self._parents = Column(np.uint64, capacity + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self._table.nbytes + self._table.top * 8

    def add(self, share: Share, keys: Keys, parents: Keys) -> None:
        """Remembers parents; those of keys that have one already are no change."""
        keys = (keys ^ share.salt)[: self._table.room]
        before = len(self._table)
        rows, absent = self._table.add(keys)
        self._parents.values[rows.take(absent)] = parents.take(absent)
        share.alternates += len(self._table) - before

    def drop(self, share: Share, keys: Keys) -> None:
        """Forgets the parents of these keys, each once; those that have none are no change."""
        rows, slots = self._table.locate(keys ^ share.salt)
        there = rows != 0
        self._table.drop(rows[there], slots[there])
        share.alternates -= int(np.count_nonzero(there))

    def find(self, share: Share, keys: Keys) -> tuple[Flags, Keys]:
        """Which of these keys have a parent of their own, and what it is."""
        rows = self._table.find(keys ^ share.salt)
        return rows != 0, self._parents.values.take(rows)

    def __len__(self) -> int:
        return len(self._table)

    def check(self) -> None:
        """Asserts what its table asserts."""
        self._table.check()
