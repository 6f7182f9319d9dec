"""Who holds which block, as reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gateway.placement.blocks import PIECE_BLOCKS, Blocks
from gateway.placement.column import Column, Keys, Places, Rows, as_keys
from gateway.placement.holders import WORD, Change, HoldersListener, words
from gateway.placement.share import Alternates, Share
from kvstore.messages import Tier, digest_of

LEAST_BYTES = 16 << 20
DEFAULT_BYTES = 1 << 30
EVICTED_BLOCKS = 4_096
"""Blocks that are evicted at a time, at least."""


_U64 = (1 << 64) - 1


class Holdings:
    """Keeps the holders of every block, tells its listeners of changes, and stays within its memory.

    The part of `PrefixIndex` that changes; see there.
    """

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        if limit_bytes < LEAST_BYTES:
            raise ValueError(f"an index needs at least {LEAST_BYTES} bytes, got {limit_bytes}")
        self.evicted_blocks = 0
        """Blocks evicted so far."""
        self._shares: dict[str, Share] = {}
        self._replicas: dict[int, str] = {}
        self._free_numbers: list[int] = []
        self._listeners: list[HoldersListener] = []
        self._blocks = Blocks(limit_bytes)
        self._alternates: Alternates | None = None

    @property
    def limit_bytes(self) -> int:
        """The bound on its memory."""
        return self._blocks.limit_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self._blocks.nbytes + (self._alternates.nbytes if self._alternates is not None else 0)

    def __len__(self) -> int:
        """Blocks that anybody holds, each once."""
        return len(self._blocks.table)

    # replicas

    def add_listener(self, listener: HoldersListener) -> None:
        """Tells `listener` of every change from now on, beginning with the replicas that are there."""
        self._listeners.append(listener)
        for replica, share in self._shares.items():
            listener.replica_added(replica, share.bit)

    def add_replica(self, replica: str) -> None:
        """Makes a replica known, holding nothing; one that is known keeps what it holds."""
        if replica in self._shares:
            return
        share = Share(self._free_numbers.pop() if self._free_numbers else len(self._shares))
        self._shares[replica] = share
        self._replicas[share.bit] = replica
        for listener in self._listeners:
            listener.replica_added(replica, share.bit)

    def remove_replica(self, replica: str) -> None:
        """Forgets a replica and everything it holds; one that is not known is no error."""
        if replica not in self._shares:
            return
        self.clear(replica)
        bit = self._shares.pop(replica).bit
        del self._replicas[bit]
        self._free_numbers.append(bit.bit_length() - 1)
        for listener in self._listeners:
            listener.replica_removed(replica, bit)

    def replicas(self) -> list[str]:
        """Every known replica, in no particular order."""
        return list(self._shares)

    def bit(self, replica: str) -> int:
        """The replica's bit in holder masks, until it is removed; 0 for one that is not known."""
        share = self._shares.get(replica)
        return share.bit if share else 0

    def replicas_of(self, mask: int) -> list[str]:
        """The replicas of a holder mask, in the order of their bits."""
        found = []
        while mask:
            bit = mask & -mask
            found.append(self._replicas[bit])
            mask ^= bit
        return found

    # changes

    def store(
        self,
        replica: str,
        tier: Tier,
        keys: Iterable[int] | Keys,
        parents: Iterable[int] | Keys,
        *,
        snapshot: bool = False,
    ) -> None:
        """Blocks that `replica` now holds; held ones are no change. `parents` is as long as `keys` (ValueError).

        With `snapshot` it may have held them for long.
        """
        share = self._shares[replica]
        keys, parents = as_keys(keys), as_keys(parents)
        if keys.size != parents.size:
            raise ValueError(f"{keys.size} keys but {parents.size} parents")
        for begin in range(0, keys.size, PIECE_BLOCKS):
            end = begin + PIECE_BLOCKS
            self._store(replica, share, tier, keys[begin:end], parents[begin:end], snapshot)

    def remove(self, replica: str, tier: Tier, keys: Iterable[int] | Keys) -> None:
        """Blocks that `replica` holds no more in `tier`; ones it did not hold are no change."""
        share = self._shares[replica]
        keys = as_keys(keys)
        for begin in range(0, keys.size, PIECE_BLOCKS):
            self._remove(replica, share, tier, keys[begin : begin + PIECE_BLOCKS])

    def clear(self, replica: str) -> None:
        """Everything `replica` holds is gone: a restart, a cleared cache, a new snapshot."""
        for _ in self.clearing(replica):
            pass

    def clearing(self, replica: str, tiers: Iterable[Tier] = tuple(Tier)) -> Iterator[None]:
        """`clear` in pieces, for those who have other work to do in between; nothing may be stored for it meanwhile."""
        share = self._shares[replica]
        for tier in tiers:
            share.evicted[tier] = share.evicted_sums[tier] = 0
            if not share.counts[tier]:
                continue
            for rows in self._blocks.held(tier, share.word, share.mask, PIECE_BLOCKS):
                if rows.size:
                    self._lose(replica, share, tier, self._blocks.table.keys.values.take(rows), rows)
                yield
                if self._shares.get(replica) is not share:
                    return
                if not share.counts[tier]:
                    break

    def _store(self, replica: str, share: Share, tier: Tier, keys: Keys, parents: Keys, snapshot: bool) -> None:
        if np.count_nonzero(keys) != keys.size:
            named = keys != 0
            keys, parents = keys[named], parents[named]
        blocks = self._blocks
        plane = self._plane(tier, share.word)
        while blocks.table.room < keys.size:
            self._evict(blocks.oldest(max(EVICTED_BLOCKS, keys.size)))
        rows, absent = blocks.table.add(keys)
        new, all_new = rows.take(absent), absent.size == rows.size
        blocks.parents.values[new[::-1]] = parents.take(absent)[::-1]  # of equal keys the first one counts
        first = blocks.use(rows)
        others = plane.values.take(rows)
        fresh = (others & share.mask) == 0
        if first is not None:
            fresh &= first
        if np.count_nonzero(fresh) != fresh.size:
            keys, parents, rows, others = keys[fresh], parents[fresh], rows[fresh], others[fresh]
        if not rows.size:
            return
        plane.values[rows] = others | share.mask
        if not all_new:
            differ = blocks.parents.values.take(rows) != parents
            if np.count_nonzero(differ):
                self._alternate(share, keys[differ], parents[differ])
        share.counts[tier] += rows.size
        share.sums[tier] += int(np.add.reduce(keys))
        self._tell(replica, share, tier, True, keys, rows, others, not snapshot, None if snapshot else parents)

    def _remove(self, replica: str, share: Share, tier: Tier, keys: Keys) -> None:
        rows, slots = self._blocks.table.locate(keys)
        held = self._blocks.masks(tier, share.word, rows) & share.mask != 0
        if share.evicted[tier]:
            # Only what was reported is said to be removed; a removal that was not is found by the digest.
            gone = np.unique(keys[~held])
            share.evicted[tier] = max(0, share.evicted[tier] - gone.size)
            share.evicted_sums[tier] -= int(np.add.reduce(gone))
        if np.count_nonzero(held) != held.size:
            keys, rows, slots = keys[held], rows[held], slots[held]
        ordered = np.sort(rows)
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            rows, once = np.unique(rows, return_index=True)
            keys, slots = keys.take(once), slots.take(once)
        if rows.size:
            self._lose(replica, share, tier, keys, rows, slots, just_now=True)

    def _lose(
        self,
        replica: str,
        share: Share,
        tier: Tier,
        keys: Keys,
        rows: Rows,
        slots: Places | None = None,
        *,
        just_now: bool = False,
    ) -> None:
        """The one way in which a replica loses blocks, each of which it holds."""
        blocks = self._blocks
        plane = blocks.planes[tier, share.word].values
        left = plane.take(rows) & share.rest
        plane[rows] = left
        share.counts[tier] -= rows.size
        share.sums[tier] -= int(np.add.reduce(keys))
        if share.alternates and self._alternates is not None:
            elsewhere = np.zeros(rows.size, np.bool_)
            for other in Tier:
                elsewhere |= blocks.masks(other, share.word, rows) & share.mask != 0
            self._alternates.drop(share, keys[~elsewhere])
        self._tell(replica, share, tier, False, keys, rows, left, just_now)
        bare = (left == 0).nonzero()[0]
        if len(blocks.planes) > 1:
            bare = bare.take(blocks.unheld(rows.take(bare)))
        if bare.size == rows.size:
            blocks.drop(rows, slots)
        elif bare.size:
            blocks.drop(rows.take(bare), None if slots is None else slots.take(bare))

    def _tell(
        self,
        replica: str,
        share: Share,
        tier: Tier,
        gained: bool,
        keys: Keys,
        rows: Rows,
        others: Keys,
        just_now: bool,
        parents: Keys | None = None,
    ) -> None:
        if self._listeners:
            sets = [(share.word, others), *self._blocks.others(tier, share.word, rows)]
            change = Change(replica, share.bit, tier, gained, keys, sets, just_now, parents)
            for listener in self._listeners:
                listener.holders_changed(change)

    # room

    def _plane(self, tier: Tier, word: int) -> Column:
        plane = self._blocks.planes.get((tier, word))
        if plane is None:
            plane = self._blocks.plane(tier, word)
            self._fit()
        return plane

    def _alternate(self, share: Share, keys: Keys, parents: Keys) -> None:
        if self._alternates is None:
            self._alternates = Alternates(self.limit_bytes // 4)
            self._fit()
        self._alternates.add(share, keys, parents)

    def _fit(self) -> None:
        spare = self.limit_bytes // 4 if self._alternates is not None else 0
        self._evict(self._blocks.fit(spare))
        self._blocks.shrink()

    def _evict(self, rows: Rows) -> None:
        keys = self._blocks.table.keys.values.take(rows)
        self.evicted_blocks += rows.size
        for (tier, word), plane in self._blocks.planes.items():
            masks = plane.values.take(rows)
            for replica in self.replicas_of(int(np.bitwise_or.reduce(masks)) << WORD * word):
                share = self._shares[replica]
                held = masks & share.mask != 0
                gone = keys[held]
                share.evicted[tier] += gone.size
                share.evicted_sums[tier] += int(np.add.reduce(gone))
                self._lose(replica, share, tier, gone, rows[held])

    # what is held

    def held_blocks(self, replica: str, tier: Tier | None = None) -> int:
        """Blocks known to be held by `replica` in `tier`, or summed over all tiers."""
        counts = self._shares[replica].counts
        return counts[tier] if tier is not None else sum(counts)

    def reported_blocks(self, replica: str, tier: Tier) -> int:
        """Blocks that `replica` has reported in `tier`, with those that were evicted here."""
        share = self._shares[replica]
        return share.counts[tier] + share.evicted[tier]

    def evicted_of(self, replica: str) -> int:
        """Blocks that `replica` has reported and that are not known any more for lack of room, in all tiers."""
        return sum(self._shares[replica].evicted)

    def digest(self, replica: str) -> int:
        """Digest of everything `replica` has reported, as its agent counts it (`kvstore.messages.digest_term`)."""
        return self._shares[replica].digest()

    def holders(self, key: int, tier: Tier = Tier.HBM) -> list[str]:
        """The replicas that hold `key` in `tier`."""
        return self.replicas_of(self.holder_mask(key, tier))

    def holder_mask(self, key: int, tier: Tier = Tier.HBM) -> int:
        """The replicas that hold `key` in `tier`, as a mask."""
        row = self._blocks.table.find_one(key) if key else 0
        return sum(plane.at[row] << WORD * word for (held, word), plane in self._blocks.planes.items() if held is tier)

    def keys_of(self, replica: str, tier: Tier) -> Iterator[int]:
        """The keys `replica` holds in `tier`, in no particular order; not to be used over a change."""
        for change in self.blocks_of(replica, tier):
            yield from change.keys.tolist()

    def blocks_of(self, replica: str, tier: Tier) -> Iterator[Change]:
        """What `replica` holds in `tier`, in pieces, told as if it got it just now; not to be used over a change."""
        share, blocks = self._shares[replica], self._blocks
        for rows in filter(len, blocks.held(tier, share.word, share.mask, PIECE_BLOCKS)):
            own = blocks.masks(tier, share.word, rows) & share.rest
            sets = [(share.word, own), *blocks.others(tier, share.word, rows)]
            yield Change(replica, share.bit, tier, True, blocks.table.keys.values.take(rows), sets)

    def parent(self, key: int, replica: str | None = None) -> int | None:
        """Key of the block before `key`, in the block size of `replica` if given; None when nobody holds `key`."""
        row = self._blocks.table.find_one(key) if key else 0
        if not row:
            return None
        if replica is not None and self._alternates is not None and (share := self._shares[replica]).alternates:
            (own,), (parent,) = self._alternates.find(share, np.array([key], np.uint64))
            if own:
                return int(parent)
        return int(self._blocks.parents.at[row])

    def shared(self, tier: Tier, mask: int, least: int = 2) -> tuple[Keys, Keys, list[tuple[int, Keys]]]:
        """Blocks that `least` or more replicas of `mask` hold in `tier`: keys, parents, and holders of `mask` by word.

        The parent is that of the holder with the lowest bit. Looks at every block: for a page, not for a request path.
        """
        rows, sets = self._blocks.shared(tier, words(mask), least)
        keys, parents = self._blocks.table.keys.values.take(rows), self._blocks.parents.values.take(rows)
        above = np.zeros(rows.size, np.bool_)
        for word, masks in sets:
            for share in self._shares.values():
                if share.word == word and share.alternates and self._alternates is not None:
                    first = (masks & (~masks + np.uint64(1)) == share.mask) & ~above
                    own, parent = self._alternates.find(share, keys[first])
                    parents[first] = np.where(own, parent, parents[first])
            above |= masks != 0
        return keys, parents, sets

    def check(self) -> None:
        """Asserts that planes, counts and digests agree, and that exactly the held blocks have rows."""
        blocks = self._blocks
        blocks.check()
        assert {share.bit for share in self._shares.values()} == set(self._replicas)
        assert not {1 << number for number in self._free_numbers} & set(self._replicas), "a free bit is in use"
        for (_, word), plane in blocks.planes.items():
            known = sum(share.bit for share in self._shares.values() if share.word == word) >> WORD * word
            assert not np.count_nonzero(plane.values & ~np.uint64(known)), "a block of nobody's"
        for replica, share in self._shares.items():
            for tier in Tier:
                keys = list(self.keys_of(replica, tier))
                assert share.counts[tier] == len(keys)
                assert digest_of(keys, tier) == share.sums[tier] * (2 * tier + 1) & _U64
        alternates = sum(share.alternates for share in self._shares.values())
        assert alternates == (len(self._alternates) if self._alternates is not None else 0)
        if self._alternates is not None:
            self._alternates.check()
        assert self.nbytes <= self.limit_bytes
