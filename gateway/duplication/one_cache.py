"""What one cache would have hit, had it been given every prompt: an endless one, and one of a bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gateway.placement.column import Column, Keys, Places, Rows, as_keys
from gateway.placement.key_table import KeyTable

KEPT_BLOCKS = 1 << 20
_EVERYTHING = 1 << 64


class Hits(NamedTuple):
    """Blocks of one prompt that an endless cache had, and one of the capacity given (None: not given).

    The first is an estimate where blocks are met again that were used very long ago; see `OneCache`.
    """

    endless: float
    bounded: int | None


class OneCache:
    """Remembers the prompts that it is fed; the bounded cache evicts what was used longest ago, tails before heads.

    Owns up to `limit_blocks` keys, each with the number of the prompt that used it last: 30 to 40 bytes, 38 MB for the
    1,048,576 that are the default (17 million tokens). As long as they fit, all figures are exact. When there are more,
    the half that was used last stays exact, and of the older ones only those with the lowest keys are kept, which is a
    sample, and each stands for as many as its share of them says. A sample of all (as in SHARDS, FAST '15) would take
    less, but be far off where one prompt of some hundred blocks is part of most requests. The bounded cache has room
    for `most_blocks`, the exact half, at most.

    A key names the whole prompt up to it, so of one prompt the head was used no earlier than the tail. One caller at a
    time.
    """

    def __init__(self, limit_blocks: int = KEPT_BLOCKS) -> None:
        self.most_blocks = limit_blocks // 2
        self._oldest_kept = limit_blocks // 4
        self._table = KeyTable(limit_blocks)
        self._used = Column(np.int64, limit_blocks + 1)
        self._below = _EVERYTHING
        self._exact_from = 1
        self._prompts = 0
        self._held = 0
        # Prompt -> keys that it was the last to use and that the bounded cache holds; all of them, but for the first
        # prompt, of which tails may be evicted. Ascending, and without zeros, so there are never more than keys.
        self._last_used: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """Keys remembered."""
        return len(self._table)

    @property
    def share(self) -> float:
        """Share of the old blocks that are remembered: 1 as long as there is room for all, then 1/2, 1/4 and so on."""
        return self._below / _EVERYTHING

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use, but for a few for each prompt that the bounded cache has blocks of."""
        return self._table.nbytes + self._table.top * 8

    def feed(self, keys: Sequence[int] | Keys, usable: int, capacity_blocks: int = 0) -> Hits:
        """The hits of a prompt with these block keys, which is then held. Its first `usable` blocks may be hits.

        The bounded cache has room for `capacity_blocks`; 0: not known. Of a prompt of more than a quarter of the limit
        only the head is looked at.
        """
        found = as_keys(keys)[: self._oldest_kept]
        if found.size > self._table.room:
            self._thin()
        used = self._used.values
        rows, absent = self._table.add(found)
        used[rows.take(absent)] = 0
        before = used.take(rows)
        exact = int(np.count_nonzero(before >= self._exact_from))
        old = int(np.count_nonzero(before[exact:usable]))
        endless = min(usable, exact) + old / self.share
        bounded = min(usable, self._touch(rows, before))
        room = min(capacity_blocks, self.most_blocks) or self.most_blocks
        while self._held > room:
            self._take(next(iter(self._last_used)), self._held - room)
        return Hits(endless, bounded if capacity_blocks else None)

    def check(self) -> None:
        """Asserts the bounds, and that prompts are counted with what they were the last to use, all but the first with
        all of it."""
        self._table.check()
        assert self._held == sum(self._last_used.values()) <= self.most_blocks
        rows = self._table.keys.values[: self._table.top].nonzero()[0]
        used = self._used.values.take(rows)
        assert len(self) == rows.size and (used > 0).all()
        old = self._table.keys.values.take(rows[used < self._exact_from])
        assert (old <= np.uint64(self._below - 1)).all()
        assert next(iter(self._last_used), self._exact_from) >= self._exact_from
        for at, (prompt, count) in enumerate(self._last_used.items()):
            there = int(np.count_nonzero(used == prompt))
            assert 0 < count <= there if at == 0 else count == there

    def _touch(self, rows: Rows, before: Places) -> int:
        """The bounded cache is given a prompt whose blocks were last used `before`; how many of them it had."""
        had = 0
        if self._last_used:
            oldest, whole = next(iter(self._last_used.items()))
            # Few prompts were the last to use a prompt's blocks, each of a stretch of them.
            ends = (before[1:] != before[:-1]).nonzero()[0] + 1
            begin = 0
            for end in [*ends.tolist(), before.size]:
                prompt = int(before[begin]) if begin < end else 0
                if prompt >= oldest:
                    had += min(whole, end - begin) if prompt == oldest else end - begin
                    self._take(prompt, end - begin)
                begin = end
        self._prompts += 1
        self._used.values[rows] = self._prompts
        if rows.size:
            self._last_used[self._prompts] = rows.size
            self._held += rows.size
        return had

    def _take(self, prompt: int, count: int) -> None:
        """Blocks that the bounded cache holds no more for this prompt: used by another, or evicted."""
        left = self._last_used[prompt] - count
        if left > 0:
            self._last_used[prompt] = left
            self._held -= count
        else:
            self._held -= self._last_used.pop(prompt)

    def _thin(self) -> None:
        """Makes room for a quarter of the limit: what is old becomes a sample, or a smaller one."""
        rows = self._table.keys.values[: self._table.top].nonzero()[0]
        keys, used = self._table.keys.values.take(rows), self._used.values.take(rows)
        latest = np.partition(used, -self.most_blocks)[-self.most_blocks]
        self._exact_from = max(self._exact_from, int(latest) + 1)
        while self._last_used and next(iter(self._last_used)) < self._exact_from:
            self._held -= self._last_used.popitem(last=False)[1]
        old = used < self._exact_from
        while np.count_nonzero(old & (keys <= np.uint64(self._below - 1))) > self._oldest_kept:
            self._below >>= 1
        found, slots = self._table.locate(keys[old & (keys > np.uint64(self._below - 1))])
        self._table.drop(found, slots)
