"""How much KV is held more than once, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gateway.duplication.prefixes import SharedPrefix, shared_prefixes
from gateway.placement.index import PrefixIndex
from kvstore.messages import Tier


class Kind(NamedTuple):
    """Blocks that can be copies of one another: one model, one block size (tokens) and one layout (bytes)."""

    model: str
    block_tokens: int
    block_bytes: int


class _Count:
    """Blocks of one kind in one tier. `pairs`: blocks that both replicas of an ordered pair hold."""

    __slots__ = ("distinct", "held", "pairs", "shared")

    def __init__(self) -> None:
        self.held = 0
        self.distinct = 0
        self.pairs: dict[tuple[str, str], int] = {}
        self.shared: set[int] = set()


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
    Owns one count per (kind, tier); memory grows with the replica pairs that share something and with the shared
    blocks, not with the index. Figures are valid until the next change.
    """

    def __init__(self, index: PrefixIndex) -> None:
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
        self._recount(replica, -1)
        self._kinds[replica] = kind
        self._recount(replica, 1)

    def forget(self, replica: str) -> None:
        """A replica left for good: what it is, is forgotten, and what it still holds is counted no more."""
        self._recount(replica, -1)
        self._kinds.pop(replica, None)

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

    def holders_changed(self, key: int, tier: Tier, before: int, after: int, parent: int) -> None:
        """Index listener: one replica got or lost `key`."""
        bit = before ^ after
        kind = self._kinds.get(self._replicas[bit])
        if kind is not None:
            self._change(kind, tier, key, bit, before & after & self._masks[kind], 1 if after & bit else -1)

    # figures

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
        return {
            (tier, *pair): blocks * kind.block_bytes
            for (kind, tier), count in self._counts.items()
            for pair, blocks in count.pairs.items()
        }

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
        """The `top` shared prefixes by excess bytes. Walks every shared block: for a page, not for a request path."""
        found: list[SharedPrefix] = []
        for (kind, tier), count in self._counts.items():
            if count.shared:
                found += shared_prefixes(self._index, count.shared, kind, tier, self._masks[kind])
        found.sort(key=lambda prefix: (-prefix.excess_bytes, prefix.tier, prefix.key))
        return found[:top]

    def check(self) -> None:
        """Asserts that the counts are what a recount of the index gives."""
        excess = 0
        for (kind, tier), count in self._counts.items():
            mask = self._masks.get(kind, 0)
            keys = {key for replica in self._members(kind) for key in self._index.keys_of(replica, tier)}
            copies = {key: (self._index.holder_mask(key, tier) & mask).bit_count() for key in keys}
            assert count.held == sum(copies.values())
            assert count.distinct == len(keys)
            assert count.shared == {key for key, c in copies.items() if c > 1}
            assert sum(count.pairs.values()) == sum(c * (c - 1) // 2 for c in copies.values())
            assert all(blocks > 0 for blocks in count.pairs.values())
            excess += (count.held - count.distinct) * kind.block_bytes
        assert excess == self._excess

    # the one place where counts change

    def _change(self, kind: Kind, tier: Tier, key: int, bit: int, others: int, sign: int) -> None:
        count = self._counts.get((kind, tier))
        if count is None:
            count = self._counts[kind, tier] = _Count()
        count.held += sign
        if not others:
            count.distinct += sign
            return
        self._excess += sign * kind.block_bytes
        self.peak_excess = max(self.peak_excess, self._excess)
        if not others & (others - 1):
            (count.shared.add if sign > 0 else count.shared.discard)(key)
        replica, pairs = self._replicas[bit], count.pairs
        while others:
            other = self._replicas[others & -others]
            others &= others - 1
            pair = (replica, other) if replica < other else (other, replica)
            blocks = pairs.get(pair, 0) + sign
            if blocks:
                pairs[pair] = blocks
            else:
                del pairs[pair]

    def _recount(self, replica: str, sign: int) -> None:
        kind, bit = self._kinds.get(replica), self._bits.get(replica)
        if kind is None or bit is None:
            return
        others = self._masks.get(kind, 0) & ~bit
        for tier in Tier:
            for key in self._index.keys_of(replica, tier):
                self._change(kind, tier, key, bit, self._index.holder_mask(key, tier) & others, sign)
        self._masks[kind] = others | bit if sign > 0 else others

    def _members(self, kind: Kind) -> Iterator[str]:
        return (replica for replica in self._bits if self._kinds.get(replica) == kind)
