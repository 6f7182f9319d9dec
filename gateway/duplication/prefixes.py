"""Shared prefixes: where the copies are."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from gateway.duplication.demand import Demand, Links, Load
from gateway.placement.column import Keys
from gateway.placement.holders import WORD
from gateway.placement.index import PrefixIndex
from kvstore.messages import ROOT_PARENT, Tier


class BlockKind(Protocol):
    """What is needed of a ledger's kind."""

    @property
    def model(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A maximal chain segment whose blocks have one holder set of two or more, named by its last `key`.

    A segment ends where the holder set changes or where two chains with that holder set part. `depth_tokens` counts
    from the prompt's first token to the segment's last (where the chain above is held by nobody, from the first block
    that is), `tokens` the segment alone; `excess_bytes` is what all copies of the segment but one take. Its traffic
    needs `needed` copies (`gateway.duplication.demand`): of the excess, what they take but for one is `useful_bytes`,
    the rest `wasted_bytes`.
    """

    key: int
    model: str
    tier: Tier
    depth_tokens: int
    tokens: int
    copies: int
    holders: list[str]
    needed: int
    excess_bytes: int
    useful_bytes: int
    wasted_bytes: int


class Shared(NamedTuple):
    """The `top` of the shared prefixes, by excess, and the useful bytes of all of them."""

    top: list[SharedPrefix]
    useful_bytes: int


class Forest(NamedTuple):
    """Blocks of one kind in one tier, copied out of the index: it stays as it is while the index changes.

    `names` has the replicas of `mask` by their bits.
    """

    kind: BlockKind
    tier: Tier
    mask: int
    names: dict[int, str]
    keys: Keys
    parents: Keys
    holders: list[tuple[int, Keys]]


class Segment(NamedTuple):
    """A shared prefix before it is named. Figures are blocks, but for the copies that are `needed`."""

    key: int
    blocks: int
    holders: int
    needed: int
    useful: int


class Cut(NamedTuple):
    """A forest in segments: the `top` by excess, and the useful blocks of all of them."""

    forest: Forest
    top: list[Segment]
    useful: int


def take(index: PrefixIndex, kind: BlockKind, tier: Tier, mask: int, least: int) -> Forest:
    """What `least` or more replicas of `mask` hold now."""
    names = {index.bit(name): name for name in index.replicas_of(mask)}
    return Forest(kind, tier, mask, names, *index.shared(tier, mask, least))


def cut(forest: Forest, top: int, demand: Demand, load: Load, replicas: int) -> Cut:
    """Cuts what two or more replicas hold into prefixes, every block in exactly one.

    `demand` and `load`, that of all `replicas`, say how many copies each needs. May run in a thread of its own.
    """
    keys, parents, holders = forest.keys, forest.parents, forest.holders
    copies = _copies(keys, holders)
    links = _links(keys, parents)
    shares = demand.shares(keys, links, holders)
    shared = (copies > 1).nonzero()[0]
    if shared.size < keys.size:
        keys, parents, shares = keys.take(shared), parents.take(shared), shares.take(shared)
        holders = [(word, masks.take(shared)) for word, masks in holders]
        copies, links = copies.take(shared), _links(keys, parents)
    if not keys.size:
        return Cut(forest, [], 0)
    joined = links >= 0
    above = np.maximum(links, 0)
    for _, masks in holders:
        joined &= masks.take(above) == masks
    children = np.bincount(above[joined], minlength=keys.size)
    # A block whose one child has its holder set is followed by that child: it and the child are of one segment.
    follows = joined & (children.take(above) == 1)
    lengths = _lengths(np.where(follows, above, -1))
    lasts = (children != 1).nonzero()[0]
    excess = (copies.take(lasts) - 1) * lengths.take(lasts)
    needed = np.minimum(load.needed(shares, replicas), forest.mask.bit_count())
    useful = (np.minimum(copies, needed) - 1) * lengths
    best = lasts.take(np.lexsort((keys.take(lasts), -excess))[:top])
    segments = [
        Segment(
            int(keys[last]),
            int(lengths[last]),
            sum(int(masks[last]) << WORD * word for word, masks in holders),
            int(needed[last]),
            int(useful[last]),
        )
        for last in best.tolist()
    ]
    return Cut(forest, segments, int(useful.take(lasts).sum()))


def named(index: PrefixIndex, made: Cut) -> Shared:
    """The prefixes of a cut, with their holders' names, their bytes and their depths by the index as it is now."""
    forest, kind = made.forest, made.forest.kind
    depths: dict[int, int] = {}
    found = []
    for segment in made.top:
        holders = sorted(name for bit, name in forest.names.items() if segment.holders & bit)
        excess, useful = (len(holders) - 1) * segment.blocks * kind.block_bytes, segment.useful * kind.block_bytes
        found.append(
            SharedPrefix(
                key=segment.key,
                model=kind.model,
                tier=forest.tier,
                depth_tokens=_depth(index, segment.key, forest.mask, depths) * kind.block_tokens,
                tokens=segment.blocks * kind.block_tokens,
                copies=len(holders),
                holders=holders,
                needed=segment.needed,
                excess_bytes=excess,
                useful_bytes=useful,
                wasted_bytes=excess - useful,
            )
        )
    return Shared(found, made.useful * kind.block_bytes)


def _copies(keys: Keys, holders: list[tuple[int, Keys]]) -> Links:
    copies = np.zeros(keys.size, np.int64)
    for _, masks in holders:
        copies += np.bitwise_count(masks)
    return copies


def _links(keys: Keys, parents: Keys) -> Links:
    """For every block the index of its parent, -1 where that is not among them.

    Most blocks stand behind their parents, as they were stored; only the others are looked up.
    """
    links = np.arange(-1, keys.size - 1)
    apart = np.append(True, parents[1:] != keys[:-1])[: keys.size].nonzero()[0]
    if apart.size:
        order = np.argsort(keys)
        wanted = parents.take(apart)
        found = order.take(np.searchsorted(keys.take(order), wanted), mode="clip")
        links[apart] = np.where(keys.take(found) == wanted, found, -1)
    return links


def _lengths(above: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many blocks each segment has down to each block, itself counted; -1 is above the first of a segment.

    Each step looks twice as far up. Blocks that lead round in a circle are in no segment: their figures mean nothing.
    """
    lengths = np.ones(above.size + 1, np.int64)
    lengths[-1] = 0
    above = np.append(above, -1)
    for _ in range(above.size.bit_length()):
        if not np.count_nonzero(above >= 0):
            break
        lengths += lengths.take(above)
        above = above.take(above)
    return lengths[:-1]


def _depth(index: PrefixIndex, key: int, mask: int, depths: dict[int, int]) -> int:
    """Blocks from the root to `key`, as far up as a replica of `mask` holds them. Fills `depths` on the way."""
    walk: dict[int, None] = {}  # in order; parents that lead round in a circle are somebody's mistake, not our end
    seen = key
    while seen != ROOT_PARENT and seen not in depths and seen not in walk:
        # A holder of this block size: another's parent of the same key is a block of another length.
        held = next((held for tier in Tier if (held := index.holder_mask(seen, tier) & mask)), 0)
        if not held:
            break
        walk[seen] = None
        seen = index.parent(seen, index.replicas_of(held & -held)[0]) or ROOT_PARENT
    depth = depths.get(seen, 0)
    for step in reversed(walk):
        depth += 1
        depths[step] = depth
    return depth
