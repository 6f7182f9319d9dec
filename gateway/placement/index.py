"""Which replica holds which prefix, as reported."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from gateway.placement.column import Keys
from gateway.placement.holders import WORD, words
from gateway.placement.holdings import DEFAULT_BYTES, Holdings
from gateway.placement.walk import SHORT, Chain, Runs, ends, short_ends
from kvstore.messages import Tier

STRETCH = 1024
"""Rows that are looked at together when a chain is followed upwards."""


class PrefixIndex(Holdings):
    """RouteKey -> the replicas that hold the block ending there, per tier, with the key of the block before it.

    Owns what it was told and nothing else: it is as true as the reports it is fed. Whoever applies the reports is the
    only one to mutate it; results of `match` and `holders` are valid until the next change. An unknown replica is a
    KeyError. Key 0 is no block and is left out.

    Every block has a row in a few arrays: key, parent, stamp of its last use, and for each tier and each 64 replicas
    that hold anything there one word of its holder set. So any number of replicas can hold a block, and a block takes
    28 bytes, and 8 more for each word, and 10-20 in the table.

    It takes at most `limit_bytes`. At the bound it evicts blocks that were longest neither stored nor used (of
    a sample of `SAMPLE` times as many), for all their holders, and counts them: it then knows less than was reported,
    never more. Digests are those of all that was reported.
    """

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        super().__init__(limit_bytes)
        self._asked: dict[str, int] = {}
        self._grouped: dict[int, dict[int, int]] = {}

    def add_replica(self, replica: str) -> None:
        """Makes a replica known, holding nothing; one that is known keeps what it holds."""
        super().add_replica(replica)
        self._asked, self._grouped = {}, {}

    def remove_replica(self, replica: str) -> None:
        """Forgets a replica and everything it holds; one that is not known is no error."""
        super().remove_replica(replica)
        self._asked, self._grouped = {}, {}

    def match(self, keys: Sequence[int], block_units: Mapping[str, int], *, use: bool = False) -> dict[str, int]:
        """The longest prefix each replica holds in HBM, in units; replicas that hold none are left out.

        `keys` are a prompt's unit keys, `block_units` the engine block of each replica to ask, in units. Only whole
        blocks count, from the first one on: a block whose chain to the root is not held is no hit. One walk for all
        replicas of a block size. With `use` it is a placement's: what it found is evicted later than what is older.
        """
        found: dict[str, int] = {}
        table, planes = self._blocks.table, self._blocks.planes
        use = use and self._blocks.half_full
        for units, masks in self._groups(block_units).items():
            asked = keys if units == 1 else keys[units - 1 :: units]
            if len(asked) <= SHORT and not use:
                for word, mask in masks.items():
                    if (plane := planes.get((Tier.HBM, word))) is not None:
                        for blocks, gone in short_ends(table, plane, asked, mask):
                            self._note(found, word, gone, blocks * units)
                continue
            chain = Chain(table, asked)
            for word, mask in masks.items():
                for blocks, gone in ends(chain.masks(planes.get((Tier.HBM, word))), mask):
                    self._note(found, word, gone, blocks * units)
            if use:
                self._blocks.stamp(chain)
        return found

    def runs(self, keys: Sequence[int], block_units: Mapping[str, int], pools: Collection[str]) -> Runs:
        """As `match`, in one walk also over the pools of the agents of `pools`; about twice its price.

        The order of the tiers is the engine's: it takes what its HBM holds, and asks its agent from there on. What
        stands in HBM again behind that is out of its reach.
        """
        found = Runs({}, {}, {})
        pooled = 0
        for replica in pools:
            pooled |= self.bit(replica)
        for units, masks in self._groups(block_units).items():
            chain = Chain(self._blocks.table, keys if units == 1 else keys[units - 1 :: units])
            for word, mask in masks.items():
                hbm = chain.masks(self._blocks.planes.get((Tier.HBM, word)))
                pool = chain.masks(self._blocks.planes.get((Tier.DRAM, word)))
                with_pool = mask & pooled >> WORD * word
                for blocks, gone in ends(hbm, mask):
                    self._note(found.resident, word, gone, blocks * units)
                    self._note(found.usable, word, gone & ~with_pool, blocks * units)
                    if gone & with_pool:
                        for further, last in ends(pool, gone & with_pool, blocks):
                            self._note(found.usable, word, last, further * units)
                if with_pool:
                    for blocks, gone in ends(pool, with_pool):
                        self._note(found.served, word, gone, blocks * units)
        return found

    def stretch(self, key: int, replica: str) -> tuple[Keys, int]:
        """Some blocks of the chain that ends with block `key`, the last ones, and the key of the block before them.

        As many as stand in rows one after another, where a chain is that was stored at once; none when nobody holds
        `key`. Parents are those of `replica`, as in `parent`.
        """
        row = self._blocks.table.find_one(key) if key else 0
        if not row:
            return np.zeros(0, np.uint64), 0
        if self._shares[replica].alternates:
            return np.array([key], np.uint64), self.parent(key, replica) or 0
        keys, parents = self._blocks.table.keys, self._blocks.parents
        first = row
        if (parent := parents.at[row]) and keys.at[row - 1] == parent:
            begin = max(1, row - STRETCH)
            before = parents.values[begin + 1 : row + 1]
            apart = ((keys.values[begin:row] != before) | (before == 0))[::-1]
            at = int(apart.argmax())
            first = row - (at if apart[at] else apart.size)
        return keys.values[first : row + 1], int(parents.at[first])

    def _groups(self, block_units: Mapping[str, int]) -> dict[int, dict[int, int]]:
        """Words of the known replicas, by their block size in units. One fleet is asked for again and again."""
        if block_units == self._asked:
            return self._grouped
        groups: dict[int, int] = {}
        for replica, units in block_units.items():
            share = self._shares.get(replica)
            if share is not None:
                groups[units] = groups.get(units, 0) | share.bit
        grouped = {units: words(mask) for units, mask in groups.items()}
        if len(block_units) > 1:
            self._asked, self._grouped = dict(block_units), grouped
        return grouped

    def _note(self, found: dict[str, int], word: int, mask: int, position: int) -> None:
        if position:
            mask <<= WORD * word
            while mask:
                bit = mask & -mask
                found[self._replicas[bit]] = position
                mask ^= bit
