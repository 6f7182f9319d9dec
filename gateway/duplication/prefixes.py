"""Shared prefixes: where the copies are."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

import msgspec

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


def shared_prefixes(index: PrefixIndex, shared: Set[int], kind: BlockKind, tier: Tier, mask: int) -> list[SharedPrefix]:
    """Cuts the blocks `shared` by two or more replicas of `mask` into prefixes; every block is in exactly one."""
    holders = {key: index.holder_mask(key, tier) & mask for key in shared}
    witness = {holder_set: index.replicas_of(holder_set) for holder_set in set(holders.values())}
    parents = {key: index.parent(key, witness[holder_set][0]) for key, holder_set in holders.items()}
    children: dict[int, int] = {}
    for key, parent in parents.items():
        if parent is not None and holders.get(parent) == holders[key]:
            children[parent] = children.get(parent, 0) + 1
    depths: dict[int, int] = {}
    found = []
    for last, holder_set in holders.items():
        if children.get(last) == 1:
            continue  # its one child of the same holder set goes on with the segment
        blocks, key = 1, last
        while (parent := parents[key]) is not None and holders.get(parent) == holder_set and children[parent] == 1:
            blocks, key = blocks + 1, parent
        names = witness[holder_set]
        found.append(
            SharedPrefix(
                key=last,
                model=kind.model,
                tier=tier,
                depth_tokens=_depth(index, last, mask, depths) * kind.block_tokens,
                tokens=blocks * kind.block_tokens,
                copies=len(names),
                holders=sorted(names),
                excess_bytes=(len(names) - 1) * blocks * kind.block_bytes,
            )
        )
    return found


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
