"""What `PrefixIndex` is meant to be: dicts of int masks, one Python object per block, no bound and no listeners."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gateway.placement.walk import Runs
from kvstore.messages import Tier

_MASK = (1 << 64) - 1


class _Share:
    """One replica's part of the index: its bit, and per tier its keys and digest.

    `parents` holds the parents that differ from the index's own: two block sizes give one key two parents.
    """

    __slots__ = ("bit", "digests", "evicted", "keys", "parents")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.keys: tuple[set[int], ...] = tuple(set() for _ in Tier)
        self.evicted: tuple[set[int], ...] = tuple(set() for _ in Tier)
        self.digests = [0 for _ in Tier]
        self.parents: dict[int, int] = {}


class NaiveIndex:
    """As `PrefixIndex`; `evict` takes a block from all its holders, whose digests go on counting it."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self._replicas: dict[int, str] = {}
        self._free_bits: list[int] = []
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._parents: dict[int, int] = {}

    # replicas

    def add_replica(self, replica: str) -> None:
        """Makes a replica known, holding nothing; one that is known keeps what it holds."""
        if replica in self._shares:
            return
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._shares)
        self._shares[replica] = _Share(bit)
        self._replicas[bit] = replica

    def remove_replica(self, replica: str) -> None:
        """Forgets a replica and everything it holds; one that is not known is no error."""
        if replica not in self._shares:
            return
        self.clear(replica)
        bit = self._shares.pop(replica).bit
        del self._replicas[bit]
        self._free_bits.append(bit)

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

    # blocks

    def store(self, replica: str, tier: Tier, keys: Sequence[int], parents: Sequence[int]) -> None:
        """Blocks that `replica` now holds; held ones are no change. `parents` is as long as `keys` (ValueError)."""
        share = self._shares[replica]
        own, bit, holders, common = share.keys[tier], share.bit, self._holders[tier], self._parents
        added = 0
        for key, parent in zip(keys, parents, strict=True):
            if key in own:
                continue
            own.add(key)
            added += key
            before = holders.get(key, 0)
            holders[key] = before | bit
            if common.setdefault(key, parent) != parent:
                share.parents.setdefault(key, parent)
        share.digests[tier] = share.digests[tier] + added * (2 * tier + 1) & _MASK

    def remove(self, replica: str, tier: Tier, keys: Sequence[int]) -> None:
        """Blocks that `replica` holds no more in `tier`; ones it did not hold are no change."""
        share = self._shares[replica]
        own, bit, holders = share.keys[tier], share.bit, self._holders[tier]
        removed = 0
        for key in keys:
            if key in share.evicted[tier]:
                share.evicted[tier].remove(key)
                removed += key
            if key not in own:
                continue
            own.remove(key)
            removed += key
            before = holders[key]
            after = before ^ bit
            if after:
                holders[key] = after
            else:
                del holders[key]
            if not any(key in held for held in share.keys):
                share.parents.pop(key, None)
            if not after and not any(key in held for held in self._holders):
                del self._parents[key]
        share.digests[tier] = share.digests[tier] - removed * (2 * tier + 1) & _MASK

    def clear(self, replica: str) -> None:
        """Everything `replica` holds is gone: a restart, a cleared cache, a new snapshot."""
        for tier in Tier:
            share = self._shares[replica]
            self.remove(replica, tier, [*share.keys[tier], *share.evicted[tier]])

    def held_blocks(self, replica: str, tier: Tier | None = None) -> int:
        """Blocks `replica` holds in `tier`, or summed over all tiers."""
        keys = self._shares[replica].keys
        return len(keys[tier]) if tier is not None else sum(len(held) for held in keys)

    def digest(self, replica: str) -> int:
        """Digest of everything `replica` holds, to be compared with its agent's (`kvstore.messages.digest_term`)."""
        return sum(self._shares[replica].digests) & _MASK

    def holders(self, key: int, tier: Tier = Tier.HBM) -> list[str]:
        """The replicas that hold `key` in `tier`."""
        return self.replicas_of(self._holders[tier].get(key, 0))

    def holder_mask(self, key: int, tier: Tier = Tier.HBM) -> int:
        """The replicas that hold `key` in `tier`, as a mask."""
        return self._holders[tier].get(key, 0)

    def keys_of(self, replica: str, tier: Tier) -> Iterator[int]:
        """The keys `replica` holds in `tier`, in no particular order; not to be used over a change."""
        return iter(self._shares[replica].keys[tier])

    def parent(self, key: int, replica: str | None = None) -> int | None:
        """Key of the block before `key`, in the block size of `replica` if given; None when nobody holds `key`."""
        if replica is not None:
            own = self._shares[replica].parents.get(key)
            if own is not None:
                return own
        return self._parents.get(key)

    def match(self, keys: Sequence[int], block_units: Mapping[str, int]) -> dict[str, int]:
        """The longest prefix each replica holds in HBM, in units; replicas that hold none are left out.

        `keys` are a prompt's unit keys, `block_units` the engine block of each replica to ask, in units. Only whole
        blocks count, from the first one on: a block whose chain to the root is not held is no hit. One walk for all
        replicas of a block size; it ends where the last of them ends.
        """
        found: dict[str, int] = {}
        lookup = self._holders[Tier.HBM].get
        for units, mask in self._groups(block_units).items():
            position = 0
            for key in keys if units == 1 else keys[units - 1 :: units]:
                still = mask & lookup(key, 0)
                if still != mask:
                    if position:
                        for replica in self.replicas_of(mask ^ still):
                            found[replica] = position
                    mask = still
                    if not mask:
                        break
                position += units
            if mask and position:
                for replica in self.replicas_of(mask):
                    found[replica] = position
        return found

    def runs(self, keys: Sequence[int], block_units: Mapping[str, int], pools: Collection[str]) -> Runs:
        """As `match`, in one walk also over the pools of the agents of `pools`; about twice its price.

        The order of the tiers is the engine's: it takes what its HBM holds, and asks its agent from there on. What
        stands in HBM again behind that is out of its reach.
        """
        found = Runs({}, {}, {})
        in_hbm, in_pool = self._holders[Tier.HBM].get, self._holders[Tier.DRAM].get
        pooled = sum(self.bit(replica) for replica in pools)
        for units, mask in self._groups(block_units).items():
            near, far, serving = mask, 0, mask & pooled
            position = 0
            for key in keys if units == 1 else keys[units - 1 :: units]:
                hbm, pool = in_hbm(key, 0), in_pool(key, 0)
                if near & ~hbm or (far | serving) & ~pool:
                    stay = near & hbm
                    loads = (far | (near ^ stay) & pooled) & pool
                    if position:
                        self._note(found.resident, near ^ stay, position)
                        self._note(found.usable, (near | far) & ~(stay | loads), position)
                        self._note(found.served, serving & ~pool, position)
                    near, far, serving = stay, loads, serving & pool
                    if not near | far:  # and so nobody serves: what is served is used, too
                        break
                position += units
            if position:
                self._note(found.resident, near, position)
                self._note(found.usable, near | far, position)
                self._note(found.served, serving, position)
        return found

    def _groups(self, block_units: Mapping[str, int]) -> dict[int, int]:
        """Masks of the known replicas, by their block size in units."""
        groups: dict[int, int] = {}
        for replica, units in block_units.items():
            share = self._shares.get(replica)
            if share is not None:
                groups[units] = groups.get(units, 0) | share.bit
        return groups

    def _note(self, found: dict[str, int], mask: int, position: int) -> None:
        for replica in self.replicas_of(mask):
            found[replica] = position

    def evict(self, key: int) -> None:
        """Takes a block from everybody, as an index does that has no room for it."""
        for replica, share in self._shares.items():
            for tier in Tier:
                if key in share.keys[tier]:
                    self.remove(replica, tier, [key])
                    share.digests[tier] = share.digests[tier] + key * (2 * tier + 1) & _MASK
                    share.evicted[tier].add(key)
