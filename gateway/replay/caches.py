"""The prefix caches of all simulated replicas."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class Stored(NamedTuple):
    """What placing a prompt changed in one cache."""

    added: list[int]
    evicted: list[int]


class Caches:
    """An LRU of blocks for each replica, tails evicted before heads; a prompt longer than a cache keeps its head.

    Owns the LRUs (block -> time of last use), for every block the mask of replicas that hold it (`held[block]`, bit r
    for replica r), and how many copies and distinct blocks there are. Only `store` and `give_up` change them. Blocks
    are there from the moment their request is placed; generated tokens are not kept.
    """

    def __init__(self, replicas: int, capacity_blocks: int, blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.held = [0] * blocks
        self.copies = 0
        self.distinct = 0
        self._lru: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(replicas)]

    def store(self, replica: int, chain: Sequence[int], now: float) -> Stored:
        """`replica` has been given a prompt with these blocks."""
        lru, held, bit = self._lru[replica], self.held, 1 << replica
        added: list[int] = []
        for block in reversed(chain[: self.capacity_blocks]):
            if block in lru:
                lru.move_to_end(block)
            else:
                added.append(block)
                before = held[block]
                held[block] = before | bit
                if not before:
                    self.distinct += 1
            lru[block] = now
        evicted = [lru.popitem(last=False)[0] for _ in range(len(lru) - self.capacity_blocks)]
        for block in evicted:
            held[block] ^= bit
            if not held[block]:
                self.distinct -= 1
        self.copies += len(added) - len(evicted)
        return Stored(added, evicted)

    def give_up(self, replica: int, blocks: Sequence[int]) -> None:
        """A peer has read these blocks of a prompt: those that `replica` last used for one prompt are evicted next."""
        lru = self._lru[replica]
        used = lru.get(blocks[-1]) if blocks else None
        alone = list(takewhile(lambda block: lru.get(block) == used, reversed(blocks)))
        for block in reversed(alone):  # the tail comes to stand first
            lru[block] = -math.inf
            lru.move_to_end(block, last=False)

    def check(self) -> None:
        """Asserts that masks and counts are those of the LRUs, and that none is over its capacity."""
        held = [0] * len(self.held)
        for replica, lru in enumerate(self._lru):
            assert len(lru) <= self.capacity_blocks
            for block in lru:
                held[block] |= 1 << replica
        assert held == self.held
        assert self.copies == sum(map(len, self._lru))
        assert self.distinct == sum(mask > 0 for mask in held)


def match(held: Sequence[int], chain: Sequence[int], replicas: int) -> list[int]:
    """How many blocks of `chain` each replica holds from its beginning on, by a table of masks: one walk for all."""
    found = [0] * replicas
    mask = (1 << replicas) - 1
    position = 0
    for block in chain:
        still = mask & held[block]
        if still != mask:
            gone = mask ^ still
            while gone:
                bit = gone & -gone
                found[bit.bit_length() - 1] = position
                gone ^= bit
            if not still:
                return found
            mask = still
        position += 1
    while mask:
        bit = mask & -mask
        found[bit.bit_length() - 1] = position
        mask ^= bit
    return found
