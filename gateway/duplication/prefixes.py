"""Shared prefixes: where the copies are."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

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
    that is), `tokens` the segment alone; `excess_bytes` is what all copies of the segment but one take.
    """

    key: int
    model: str
    tier: Tier
    depth_tokens: int
    tokens: int
    copies: int
    holders: list[str]
    excess_bytes: int


def shared_prefixes(index: PrefixIndex, kind: BlockKind, tier: Tier, mask: int, top: int) -> list[SharedPrefix]:
    """Cuts what two or more replicas of `mask` hold into prefixes, every block in exactly one; the `top` by excess."""
    keys, parents, holders = index.shared(tier, mask)
    if not keys.size:
        return []
    order = np.argsort(keys)
    above = order.take(np.searchsorted(keys, parents, sorter=order), mode="clip")
    joined = keys.take(above) == parents
    for _, masks in holders:
        joined &= masks.take(above) == masks
    children = np.bincount(above[joined], minlength=keys.size)
    # A block whose one child has its holder set is followed by that child: it and the child are of one segment.
    follows = joined & (children.take(above) == 1)
    lengths = _lengths(np.where(follows, above, -1))
    lasts = (children != 1).nonzero()[0]
    copies = sum(np.bitwise_count(masks.take(lasts)).astype(np.int64) for _, masks in holders)
    excess = (copies - 1) * lengths.take(lasts)
    best = lasts.take(np.lexsort((keys.take(lasts), -excess))[:top])
    depths: dict[int, int] = {}
    found = []
    for last in best.tolist():
        names = index.replicas_of(sum(int(masks[last]) << WORD * word for word, masks in holders))
        blocks = int(lengths[last])
        found.append(
            SharedPrefix(
                key=int(keys[last]),
                model=kind.model,
                tier=tier,
                depth_tokens=_depth(index, int(keys[last]), mask, depths) * kind.block_tokens,
                tokens=blocks * kind.block_tokens,
                copies=len(names),
                holders=sorted(names),
                excess_bytes=(len(names) - 1) * blocks * kind.block_bytes,
            )
        )
    return found


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
