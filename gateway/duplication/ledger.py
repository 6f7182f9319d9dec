"""How much KV is held more than once, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gateway.duplication.demand import Demand, Load, Traffic
from gateway.duplication.prefixes import Cut, Forest, Shared, SharedPrefix, cut, named, take
from gateway.placement.column import Keys
from gateway.placement.holders import WORD, Change, words
from gateway.placement.index import PrefixIndex
from kvstore.messages import Tier


class Kind(NamedTuple):
    """Blocks that can be copies of one another: one model, one block size (tokens) and one layout (bytes)."""

    model: str
    block_tokens: int
    block_bytes: int


class _Count:
    """Blocks of one kind in one tier.

    `shared` has a row for the number of a bit, with an entry for each other: blocks that this replica got while the
    other had them, less those that it lost while the other had them. So what both of a pair hold is the sum of two
    entries, and a change touches one row.
    """

    __slots__ = ("distinct", "held", "shared")

    def __init__(self) -> None:
        self.held = 0
        self.distinct = 0
        self.shared: dict[int, npt.NDArray[np.int64]] = {}

    def row(self, number: int, width: int) -> npt.NDArray[np.int64]:
        """The row of a bit's number, with at least `width` entries."""
        row = self.shared.get(number)
        if row is None or row.size < width:
            wider = np.zeros(width, np.int64)
            if row is not None:
                wider[: row.size] = row
            row = self.shared[number] = wider
        return row

    def pairs(self) -> Iterator[tuple[int, int, int]]:
        """The numbers of every two replicas that hold blocks in common, and how many."""
        size = max([*self.shared, *(row.size - 1 for row in self.shared.values())], default=-1) + 1
        both = np.zeros((size, size), np.int64)
        for number, row in self.shared.items():
            both[number, : row.size] = row
        both += both.T.copy()
        for first, second in zip(*np.triu(both).nonzero(), strict=True):
            yield int(first), int(second), int(both[first, second])


class Totals(NamedTuple):
    """Bytes. `held` is what replicas keep, `distinct` what one copy of each block would take, `excess` the rest."""

    held: int
    distinct: int

    @property
    def excess(self) -> int:
        """Sum over the blocks b of (c(b) - 1) x bytes(b), c(b) being the number of replicas that hold b."""
        return self.held - self.distinct


class Ledger:
    """Counts copies as the index changes: for every block b held by c(b) replicas, (c(b) - 1) x bytes(b) is excess.

    Listens to one index; `register` says what a replica's blocks are. Blocks of a replica that is not registered are
    not counted, since their bytes are unknown; registering it counts them. Replicas with another block size or KV
    layout are counted apart, even of one model: their blocks cannot stand in for one another. So are tiers.
    What the index has evicted for lack of room is not counted. Owns one count per (kind, tier); memory grows with the
    square of the replicas that share something, not with the index. Figures are valid until the next change.
    """

    def __init__(
        self, index: PrefixIndex, on_stored: Callable[[str, Kind, int, int], None] = lambda *stored: None
    ) -> None:
        """`on_stored` is told of blocks that a registered replica got in HBM: replica, kind, how many, and how many of
        them others of the kind had."""
        self._on_stored = on_stored
        self._index = index
        self._bits: dict[str, int] = {}
        self._replicas: dict[int, str] = {}
        self._kinds: dict[str, Kind] = {}
        self._masks: dict[Kind, int] = {}
        self._counts: dict[tuple[Kind, Tier], _Count] = {}
        self._excess = 0
        self.peak_excess = 0
        """The largest excess since the history's last sample, which sets it back to `excess`."""
        index.add_listener(self)

    # replicas

    def register(self, replica: str, model: str, block_bytes: int, block_tokens: int) -> None:
        """Says what one block of `replica` is, and counts what it holds already. Again with other figures: recounts."""
        kind = Kind(model, block_tokens, block_bytes)
        if self._kinds.get(replica) == kind:
            return
        self.forget(replica)
        self._kinds[replica] = kind
        self._recount(replica, 1)

    def forget(self, replica: str) -> None:
        """A replica left for good: what it is, is forgotten, and what it still holds is counted no more."""
        self._recount(replica, -1)
        kind = self._kinds.pop(replica, None)
        # What an agent says its blocks are may change with every connection.
        if kind is not None and not self._masks.get(kind) and kind not in self._kinds.values():
            self._masks.pop(kind, None)
            for tier in Tier:
                self._counts.pop((kind, tier), None)

    def replica_added(self, replica: str, bit: int) -> None:
        """Index listener. A replica that comes back under its id keeps its registration."""
        self._bits[replica] = bit
        self._replicas[bit] = replica
        kind = self._kinds.get(replica)
        if kind is not None:
            self._masks[kind] = self._masks.get(kind, 0) | bit

    def replica_removed(self, replica: str, bit: int) -> None:
        """Index listener; its blocks were taken out before."""
        del self._bits[replica], self._replicas[bit]
        kind = self._kinds.get(replica)
        if kind is not None:
            self._masks[kind] &= ~bit

    def holders_changed(self, change: Change) -> None:
        """Index listener: one replica got or lost blocks."""
        kind = self._kinds.get(change.replica)
        if kind is not None:
            copied = self._count(kind, change, 1 if change.gained else -1)
            if change.gained and change.tier is Tier.HBM:
                self._on_stored(change.replica, kind, change.keys.size, copied)

    # figures

    @property
    def replicas(self) -> int:
        """Replicas that the index knows, whatever they hold."""
        return len(self._replicas)

    @property
    def excess(self) -> int:
        """Bytes held beyond one copy of each block, in all tiers."""
        return self._excess

    def totals(self) -> dict[tuple[str, Tier], Totals]:
        """Bytes by model and tier."""
        found: dict[tuple[str, Tier], Totals] = {}
        for (kind, tier), count in self._counts.items():
            held, distinct = found.get((kind.model, tier), Totals(0, 0))
            found[kind.model, tier] = Totals(
                held + count.held * kind.block_bytes, distinct + count.distinct * kind.block_bytes
            )
        return found

    def pairs(self) -> dict[tuple[Tier, str, str], int]:
        """Bytes that both replicas of a pair hold, by tier; each pair once, in the order of the ids. Zeros left out.

        A block with c holders is in c(c-1)/2 pairs, so pairs do not add up to the excess.
        """
        found = {}
        for (kind, tier), count in self._counts.items():
            for first, second, blocks in count.pairs():
                names = sorted((self._replicas[1 << first], self._replicas[1 << second]))
                found[tier, names[0], names[1]] = blocks * kind.block_bytes
        return found

    def replica_bytes(self) -> dict[tuple[str, Tier], int]:
        """Bytes each registered replica holds, by tier. Zeros left out."""
        return {
            (replica, tier): blocks * self._kinds[replica].block_bytes
            for replica in self._bits
            if replica in self._kinds
            for tier in Tier
            if (blocks := self._index.held_blocks(replica, tier))
        }

    def prefixes(self, top: int = 20) -> list[SharedPrefix]:
        """The `top` shared prefixes by excess bytes. Looks at every block: for a page, not for a request path."""
        return self.shared(top).top

    def shared(self, top: int = 20, demand: Demand | None = None, load: Load | None = None) -> Shared:
        """The same, and what is useful of the whole excess: copies that the traffic needs, as `demand` and `load` say.

        Without them no prefix needs a second copy.
        """
        demand, load = demand or Traffic({}, 0), load or Load()
        return self.named([cut(forest, top, demand, load, self.replicas) for forest in self.forests(demand.least)], top)

    def forests(self, least: int) -> list[Forest]:
        """Of every kind and tier in which there is excess, the blocks that `least` or more replicas hold, copied."""
        return [
            take(self._index, kind, tier, self._masks[kind], least)
            for (kind, tier), count in self._counts.items()
            if count.held > count.distinct
        ]

    def named(self, cuts: Sequence[Cut], top: int) -> Shared:
        """The `top` prefixes of all these cuts of `forests`."""
        shared = [named(self._index, made) for made in cuts]
        found = [prefix for each in shared for prefix in each.top]
        found.sort(key=lambda prefix: (-prefix.excess_bytes, prefix.tier, prefix.key))
        return Shared(found[:top], sum(each.useful_bytes for each in shared))

    def check(self) -> None:
        """Asserts that the counts are what a recount of the index gives."""
        excess = 0
        for (kind, tier), count in self._counts.items():
            mask = self._masks.get(kind, 0)
            keys = {key for replica in self._members(kind) for key in self._index.keys_of(replica, tier)}
            copies = {key: (self._index.holder_mask(key, tier) & mask).bit_count() for key in keys}
            assert count.held == sum(copies.values())
            assert count.distinct == len(keys)
            pairs = [blocks for *_, blocks in count.pairs()]
            assert all(blocks > 0 for blocks in pairs)
            assert sum(pairs) == sum(c * (c - 1) // 2 for c in copies.values())
            excess += (count.held - count.distinct) * kind.block_bytes
        assert excess == self._excess

    # the one place where counts change

    def _count(self, kind: Kind, change: Change, sign: int) -> int:
        """How many of the blocks others of the kind hold."""
        count = self._counts.get((kind, change.tier))
        if count is None:
            count = self._counts[kind, change.tier] = _Count()
        members = words(self._masks.get(kind, 0) & ~change.bit)
        others = [(word, masks & np.uint64(members[word])) for word, masks in change.others if word in members]
        copied = 0
        if others:
            anybody = others[0][1]
            for _, masks in others[1:]:
                anybody = anybody | masks
            copied = int(np.count_nonzero(anybody))
        count.held += sign * change.keys.size
        count.distinct += sign * (change.keys.size - copied)
        if not copied:
            return 0
        self._excess += sign * copied * kind.block_bytes
        self.peak_excess = max(self.peak_excess, self._excess)
        row = count.row(change.bit.bit_length() - 1, WORD * (max(members) + 1))
        for word, masks in others:
            row[WORD * word : WORD * word + WORD] += sign * _by_bit(masks)
        return copied

    def _recount(self, replica: str, sign: int) -> None:
        kind, bit = self._kinds.get(replica), self._bits.get(replica)
        if kind is None or bit is None:
            return
        for tier in Tier:
            for change in self._index.blocks_of(replica, tier):
                self._count(kind, change, sign)
        others = self._masks.get(kind, 0) & ~bit
        self._masks[kind] = others | bit if sign > 0 else others

    def _members(self, kind: Kind) -> Iterator[str]:
        return (replica for replica in self._bits if self._kinds.get(replica) == kind)


def _by_bit(masks: Keys) -> npt.NDArray[np.int64]:
    """How many masks have each bit."""
    present = int(np.bitwise_or.reduce(masks))
    if present.bit_count() > 8:  # then one pass over the bits costs less than a pass for each
        bits = np.unpackbits(masks.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
        found: npt.NDArray[np.int64] = np.add.reduce(bits, axis=0, dtype=np.int64)
        return found
    found = np.zeros(WORD, np.int64)
    while present:
        bit = present & -present
        present ^= bit
        found[bit.bit_length() - 1] = np.count_nonzero(masks & np.uint64(bit))
    return found
