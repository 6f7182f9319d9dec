"""A pool with real memory, blocks with real bytes, and the pool's naive twin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.pool import Held, Pool
from kvstore.region import make_region
from kvstore.slot import pitch_of

BLOCK_BYTES = 4_000
"""Payload and trailer fill a slot of one page."""


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Visible:
    """A listener that keeps what it was told, and is told nothing twice."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def block_held(self, key: bytes) -> None:
        assert key not in self.keys
        self.keys.add(key)

    def block_dropped(self, key: bytes) -> None:
        self.keys.remove(key)


def chain(*path: object) -> list[bytes]:
    """The keys of a prompt's blocks; two prompts share the keys of what they share from the first on."""
    return [hashlib.sha256(repr(path[:end]).encode()).digest() for end in range(1, len(path) + 1)]


def make_pool(slots: int, clock: Clock | None = None, **settings: Any) -> Pool:
    return Pool(make_region(slots, pitch_of(BLOCK_BYTES)), BLOCK_BYTES, clock=clock or Clock(), **settings)


def payload(key: bytes) -> bytes:
    return (key * (BLOCK_BYTES // len(key) + 1))[:BLOCK_BYTES]


def write(pool: Pool, key: bytes, held: Held, rank: int = 0) -> None:
    """A rank writes its share of a block."""
    share = slice(rank * BLOCK_BYTES // pool.ranks, (rank + 1) * BLOCK_BYTES // pool.ranks)
    pool.view(held.slot)[share] = payload(key)[share]


def store(pool: Pool, keys: Sequence[bytes], parent: bytes = b"") -> list[Held | None]:
    """Save the blocks of one prompt, as an engine of one rank does; what `reserve` gave."""
    given = pool.reserve(keys, parent)
    for key, held in zip(keys, given, strict=True):
        if held is not None:
            write(pool, key, held)
            assert pool.commit(0, key, held)
    return given


@dataclass(eq=False)
class NaiveBlock:
    """One slot in use, in the twin."""

    held: Held
    key: bytes
    parent: bytes
    state: str = "reserved"
    writers: set[int | None] = field(default_factory=set)
    written: set[int | None] = field(default_factory=set)
    pins: int = 0
    until: float = 0.0
    used: int = 0
    shared: bool = False


class NaivePool:
    """The same promises by exhaustive search over the blocks there are; slots are numbered by the real pool."""

    def __init__(self, slots: int, ranks: int, quarantine_s: float, clock: Clock) -> None:
        self.slots, self.ranks, self.quarantine_s, self.clock = slots, ranks, quarantine_s, clock
        self.blocks: list[NaiveBlock] = []
        self.uses = 0

    def find(self, state: str, key: bytes) -> NaiveBlock | None:
        return next((block for block in self.blocks if block.state == state and block.key == key), None)

    def at(self, held: Held) -> NaiveBlock:
        return next(block for block in self.blocks if block.held == held)

    @property
    def visible(self) -> set[bytes]:
        return {block.key for block in self.blocks if block.state == "held"}

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        states = [block.state for block in self.blocks]
        pinned = sum(block.pins > 0 or (block.state == "held" and block.until > 0) for block in self.blocks)
        count = states.count
        return self.slots - len(states), count("reserved"), count("held"), count("quarantined"), pinned

    def pin(self, keys: Sequence[bytes]) -> list[Held]:
        self.uses += 1
        run = []
        for key in keys:
            block = self.find("held", key)
            if block is None:
                break
            block.pins, block.used, block.shared = block.pins + 1, self.uses, False
            run.append(block.held)
        return run

    def unpin(self, held: Sequence[Held], hold_s: float = 0.0) -> None:
        for block in map(self.at, held):
            block.pins -= 1
            if hold_s:
                block.until = max(block.until, self.clock() + hold_s)
        self._sweep()

    def reserve(self, keys: Sequence[bytes], parent: bytes, rank: int | None) -> list[NaiveBlock | None]:
        """The block of each key that may be written; one that is new is without a slot yet."""
        self.expire()
        rank = 0 if self.ranks == 1 else rank
        given: list[NaiveBlock | None] = []
        for key in keys:
            block = self.find("reserved", key)
            if key in self.visible or (block and (rank is None or block.writers & {rank, None})):
                given.append(None)
            elif block:
                block.writers.add(rank)
                given.append(block)
            elif self._room(parent):
                block = NaiveBlock(Held(-1, -1), key, parent, writers={rank})
                self.blocks.append(block)
                given.append(block)
            else:
                break
            parent = key
        return given + [None] * (len(keys) - len(given))

    def _room(self, parent: bytes) -> bool:
        if len(self.blocks) < self.slots:
            return True
        parents = {block.parent for block in self.blocks if block.state != "quarantined"} | {parent}
        leaves = [
            block
            for block in self.blocks
            if block.state == "held" and not block.pins and not block.until and block.key not in parents
        ]
        if leaves:
            self.blocks.remove(min(leaves, key=lambda block: (not block.shared, block.used)))
        return bool(leaves)

    def commit(self, rank: int | None, held: Held) -> bool:
        """By one rank; None: a fetched block, whole."""
        rank = 0 if self.ranks == 1 else rank
        block = next((block for block in self.blocks if block.held == held and block.state == "reserved"), None)
        if block is None or rank not in block.writers:
            return False
        block.written.add(rank)
        if rank is not None and len(block.written) < self.ranks:
            block.until = block.until or self.clock() + self.quarantine_s
            return False
        self.uses += 1
        block.state, block.used, block.until = "held", self.uses, 0.0
        return True

    def abandon(self, held: Held, stopped: bool) -> None:
        for block in [block for block in self.blocks if block.held == held and block.state == "reserved"]:
            if stopped and len(block.writers - block.written) <= 1:
                self.blocks.remove(block)
            else:
                block.state, block.until = "quarantined", self.clock() + self.quarantine_s

    def shared(self, held: Sequence[Held]) -> None:
        for block in map(self.at, held):
            block.shared = True

    def clear(self) -> None:
        for block in self.blocks:
            if block.state == "reserved":
                block.until = self.clock() + self.quarantine_s
            block.state = "quarantined"
        self._sweep()

    def expire(self) -> None:
        for block in self.blocks:
            if block.until and block.until <= self.clock():
                patience_over = block.state == "reserved"
                block.until = self.clock() + self.quarantine_s if patience_over else 0.0
                block.state = "quarantined" if patience_over else block.state
        self._sweep()

    def _sweep(self) -> None:
        """A quarantined block goes once nobody pins it and its time is over."""
        self.blocks = [block for block in self.blocks if block.state != "quarantined" or block.pins or block.until]
