"""RouteKey -> row, in arrays."""

from __future__ import annotations

import secrets
import struct

import numpy as np

from gateway.placement.column import Column, Flags, Keys, Places, Rows

_LANE_BITS = 4
LANES = 1 << _LANE_BITS
LEAST_BITS = 6
MOVED_BUCKETS = 1024
"""What is moved at a time: 10,000 keys, a millisecond."""
FULL = 0.62
"""A table with this share of its slots in use is replaced, bucket by bucket."""
ROOM = 0.5
"""The new one is the smallest of which no more than this share is in use."""
SPILLED = 0.25
"""So is one in which this share of the buckets has spilled: whoever looks there for a key that is not held has to look
into the next bucket, too."""
SLOT_BYTES = 2 + 4 + 1 / LANES

_MULTIPLIER = secrets.randbits(64) | 1
"""Of this process alone: nobody can make prompts whose keys meet in one bucket."""
_TIMES = np.uint64(_MULTIPLIER)
_TAG_SHIFT = np.uint64(16)
_ODD = np.uint16(1)
_U64 = (1 << 64) - 1
_lanes_at = struct.Struct(f"={LANES}H").unpack_from


def rows_fitting(limit_bytes: int, row_bytes: int) -> int:
    """How many keys a table can hold in `limit_bytes`, with `row_bytes` for each row in all columns that hang on it."""
    best, slots = 0, LANES << LEAST_BITS
    while (left := limit_bytes - 2 * slots * SLOT_BYTES) > 0:  # twice: a table and the one that takes its place
        best = max(best, min(int(slots * FULL), int(left / row_bytes)))
        slots *= 2
    return best


class KeyTable:
    """Gives every key a row, a number that stays the same as long as the key is there; other columns hang on it.

    Keys are u64 and not 0. Rows count from 1 and those of dropped keys are used again, so a chain that is added at once
    mostly has consecutive rows, which is what makes walks cheap. Owns the keys by row, the free rows and the buckets. A
    table of buckets that is full is replaced by a new one in pieces, a few buckets with every `add`, so that no call
    takes longer than its own keys warrant.

    Whoever owns the table is the only one to change it. It never holds more than `capacity` keys: make room first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys = Column(np.uint64, capacity + 2)  # a walk looks at the row after the last
        self.top = 1
        """The first row that was never used, or was given back."""
        self._free = Column(np.uint32, capacity + 1)
        self._freed = 0
        self._table = _Buckets(LEAST_BITS, self.keys)
        self._old: _Buckets | None = None
        self._moved = self._debt = 0

    def __len__(self) -> int:
        """Keys held."""
        return self.top - 1 - self._freed

    @property
    def room(self) -> int:
        """How many keys more there is room for."""
        return self.capacity - len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        tables = self._table.slots + (self._old.slots if self._old is not None else 0)
        return self.top * 8 + self._freed * 4 + int(tables * SLOT_BYTES)

    def find(self, keys: Keys) -> Rows:
        """The row of every key, 0 for those that are not there."""
        return self.locate(keys)[0]

    def find_one(self, key: int) -> int:
        """The row of one key, 0 if it is not there; much cheaper than `find` for a handful."""
        row = self._table.find_one(key)[0]
        return row if row or self._old is None else self._old.find_one(key)[0]

    def locate(self, keys: Keys) -> tuple[Rows, Places]:
        """Rows, as `find`, and where they are written down: what `drop` asks for, valid until the next change."""
        rows, slots = self._table.find(keys)
        if self._old is not None:
            miss = (rows == 0).nonzero()[0]
            if miss.size:
                rows[miss], before = self._old.find(keys.take(miss))
                slots[miss] = ~before
        return rows, slots

    def add(self, keys: Keys) -> tuple[Rows, Places]:
        """The row of every key, and which of them (indexes) were not there before; equal keys have one row."""
        rows = self.find(keys)
        absent = (rows == 0).nonzero()[0]
        if absent.size:
            self._grow(absent.size)
            wanted = keys if absent.size == keys.size else keys.take(absent)
            own = self._allot(absent.size)
            self.keys.values[own] = wanted
            rows[absent] = given = self._table.put(wanted, own)
            if given is not own:
                self._release(own[given != own])
        return rows, absent

    def drop(self, rows: Rows, slots: Places) -> None:
        """Takes out keys by what `locate` said of them, each once."""
        if self._old is not None:
            old = slots < 0
            self._old.clear(~slots[old])
            slots = slots[~old]
        self._table.clear(slots)
        self._release(rows)

    def shrink(self) -> None:
        """Gives back the memory of rows above `capacity`, which was lowered; their keys have been dropped."""
        if self.top > self.capacity + 1:
            free = self._free.values[: self._freed]
            kept = free[free <= self.capacity]
            self._free.values[: kept.size] = kept
            self._freed, self.top = kept.size, self.capacity + 1
            self.keys.release(self.top)

    def check(self) -> None:
        """Asserts that every key has one row, and every row up to the top one key or a place among the free."""
        rows = self.keys.values[: self.top].nonzero()[0].astype(np.uint32)
        free = self._free.values[: self._freed]
        assert rows.size == len(self) == self._table.used + (self._old.used if self._old is not None else 0)
        assert len({*free.tolist(), *rows.tolist(), 0}) == self.top == rows.size + free.size + 1
        keys = self.keys.values.take(rows)
        found, _ = self.locate(keys)
        assert (found == rows).all()
        assert [self.find_one(key) for key in keys[:1000].tolist()] == rows[:1000].tolist()

    # rows

    def _allot(self, count: int) -> Rows:
        again = min(count, self._freed)
        fresh = count - again
        assert self.top + fresh - 1 <= self.capacity, "no room was made"
        self._freed -= again
        # What was freed tail first is used head first, so that a chain has ascending rows again.
        used = np.sort(self._free.values[self._freed : self._freed + again])
        self.top += fresh
        new = np.arange(self.top - fresh, self.top, dtype=np.uint32)
        if not again:
            return new
        return np.concatenate((used, new)) if fresh else used

    def _release(self, rows: Rows) -> None:
        self.keys.values[rows] = 0
        self._free.values[self._freed : self._freed + rows.size] = rows
        self._freed += rows.size

    # buckets

    def _grow(self, count: int) -> None:
        self._debt += count
        while self._old is not None and (
            self._debt >= MOVED_BUCKETS or self._table.used + count > FULL * self._table.slots
        ):
            self._move()
        # Only now: a table that filled up while it was taking the place of another may be too small already.
        if self._old is None and self._table.crowded(count):
            bits = LEAST_BITS
            while len(self) + count > ROOM * (LANES << bits) and self.capacity > FULL * (LANES << bits):
                bits += 1
            self._old, self._moved = self._table, 0
            self._table = _Buckets(bits, self.keys)
            self._debt = count

    def _move(self) -> None:
        assert self._old is not None
        self._debt -= MOVED_BUCKETS
        begin, self._moved = self._moved, self._moved + MOVED_BUCKETS
        rows, lanes = self._old.empty(begin, self._moved)
        self._table.put(self.keys.values.take(rows), rows, lanes)
        if self._moved > self._old.last:
            self._old = None


class _Buckets:
    """Slots for rows, sixteen a bucket. A key is in its home bucket, or in one of the next if all before have spilled.

    A slot has 16 bits of its key's hash, the tag, so that nearly every key costs one look at a bucket and one at a row.
    An empty slot has tag 0 and row 0, whose key is 0: no key is ever found there.
    """

    __slots__ = (
        "_column",
        "_flat",
        "_lines",
        "_row_at",
        "_rows",
        "_shift",
        "_shift_one",
        "_spilled",
        "_spilled_at",
        "_spills",
        "_tag_bytes",
        "last",
        "slots",
        "used",
    )

    def __init__(self, bits: int, column: Column) -> None:
        self._column = column
        self.last = (1 << bits) - 1
        self.slots = LANES << bits
        self.used = 0
        self._shift = np.uint64(64 - bits)
        # One bucket more, where `put` writes what has no place. Not numpy's own memory: it asks for huge pages, and the
        # first batch of keys into a new table of millions would wait for all of them.
        self._flat = Column(np.uint16, self.slots + LANES).values
        self._lines = self._flat.reshape(-1, LANES)
        self._rows = Column(np.uint32, self.slots + LANES).values
        self._spilled = Column(np.bool_, self.last + 1).values
        self._spills = 0
        self._shift_one, self._tag_bytes = 64 - bits, self._flat.data
        self._row_at, self._spilled_at = self._rows.data, self._spilled.data

    def crowded(self, count: int) -> bool:
        """Whether `count` keys more are too many."""
        return self.used + count > FULL * self.slots or self._spills > SPILLED * self.last

    def find(self, keys: Keys) -> tuple[Rows, Places]:
        """Row and slot of every key; row 0 for one that is not here."""
        home, tags = self._homes(keys)
        slots = (home << _LANE_BITS) + _first_lane(self._lines.take(home, axis=0) == tags[:, None])
        rows = self._rows.take(slots)
        hit = self._column.values.take(rows) == keys
        at: Places | None = None
        while np.count_nonzero(hit) != hit.size:
            miss = (~hit).nonzero()[0]
            there = miss if at is None else at.take(miss)
            clash = self._flat.take(slots.take(there)) == tags.take(miss)
            rows[there] = 0
            if np.count_nonzero(clash):  # another key of the same tag stands in front: one in thousands
                for i in there[clash].tolist():
                    rows[i], slots[i] = self.find_one(int(keys[i]))
                miss, there = miss[~clash], there[~clash]
            onward = self._spilled.take(home.take(miss))
            at, miss = there[onward], miss[onward]
            if not at.size:
                break
            home, tags = home.take(miss) + 1 & self.last, tags.take(miss)
            found = (home << _LANE_BITS) + _first_lane(self._lines.take(home, axis=0) == tags[:, None])
            rows[at] = again = self._rows.take(found)
            slots[at] = found
            hit = self._column.values.take(again) == keys.take(at)
        return rows, slots

    def find_one(self, key: int) -> tuple[int, int]:
        """As `find`, for one key."""
        product = key * _MULTIPLIER & _U64
        home = product >> self._shift_one
        tag = product >> 16 & 0xFFFF | 1
        while True:
            lanes = _lanes_at(self._tag_bytes, home << _LANE_BITS + 1)
            if tag in lanes:
                for lane in range(LANES):
                    if lanes[lane] == tag:
                        row = self._row_at[home << _LANE_BITS | lane]
                        if self._column.at[row] == key:
                            return row, home << _LANE_BITS | lane
            if not self._spilled_at[home]:
                return 0, 0
            home = home + 1 & self.last

    def put(self, keys: Keys, rows: Rows, lanes: Places | None = None) -> Rows:
        """Writes down keys that are not here, with `rows` all different, and in these `lanes` where they are free.

        Of equal keys one gets its row, and the others that one, too: what they have in the end is returned, `rows`
        itself where there are none.
        """
        own = given = rows
        at: Places | None = None
        home, tags = self._homes(keys)
        while rows.size:
            wanted = lanes
            if wanted is None:
                wanted = _first_lane(self._lines.take(home, axis=0) == 0)
            slots = (home << _LANE_BITS) + wanted
            full = self._flat.take(slots) != 0
            if np.count_nonzero(full):
                if lanes is None:
                    spilled = home[full]
                    self._spills += int(np.count_nonzero(~self._spilled.take(spilled)))
                    self._spilled[spilled] = True
                slots[full] = self.slots
            self._rows[slots] = rows
            seated = self._rows.take(slots)
            won = seated == rows
            won &= ~full
            if np.count_nonzero(won) == won.size:
                self._flat[slots] = tags
                self.used += rows.size
                break
            taken = slots[won]
            self._flat[taken] = tags[won]
            self.used += taken.size
            lost = (~won).nonzero()[0]
            twins = (self._column.values.take(seated.take(lost)) == keys.take(lost)) & ~full.take(lost)
            if np.count_nonzero(twins):
                given = given.copy() if given is own else given
                same = lost[twins]
                given[same if at is None else at.take(same)] = seated.take(same)
                lost = lost[~twins]
            at = lost if at is None else at.take(lost)
            home = home.take(lost)
            if lanes is None:
                home = home + full.take(lost) & self.last
            lanes = None
            keys, rows, tags = keys.take(lost), rows.take(lost), tags.take(lost)
        self._rows[self.slots] = 0
        return given

    def clear(self, slots: Places) -> None:
        """Empties slots that are in use, each once."""
        self._flat[slots] = 0
        self._rows[slots] = 0
        self.used -= slots.size

    def empty(self, begin: int, end: int) -> tuple[Rows, Places]:
        """Takes out the rows of the buckets from `begin` up to `end`, and says which lanes to give them elsewhere.

        They are all different for the rows of a bucket, and the last that `put` would choose itself. Buckets that have
        spilled go on being passed on the way to the next.
        """
        end = min(end, self.last + 1)
        rows = self._rows[begin << _LANE_BITS : end << _LANE_BITS]
        slots = rows.nonzero()[0]
        taken = rows.take(slots)
        rows[:] = 0
        self._lines[begin:end] = 0
        self.used -= taken.size
        return taken, ~slots & LANES - 1

    def _homes(self, keys: Keys) -> tuple[Places, np.ndarray]:
        hashes = keys * _TIMES
        tags = (hashes >> _TAG_SHIFT).astype(np.uint16)
        tags |= _ODD
        return (hashes >> self._shift).view(np.int64), tags


def _first_lane(lanes: Flags) -> Places:
    """The first lane of each bucket that is set, 0 where none is."""
    if len(lanes) < 500:
        first: Places = lanes.argmax(axis=1)
        return first
    lowest: Places = _LOWEST.take(np.packbits(lanes, bitorder="little").view("<u2"))
    return lowest


_LOWEST = np.array([max(0, (bits & -bits).bit_length() - 1) for bits in range(1 << LANES)])
