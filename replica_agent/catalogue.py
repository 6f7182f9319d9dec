"""What one engine holds, told from its KV events, in the names that gateways use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvstore.identity import TOKEN_BYTES, UNIT_TOKENS, Namespace, chain, pack_keys, wire_block_hash
from kvstore.messages import ROOT_PARENT, Change, Removed, Stored, Tier, digest_of, digest_term
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored, EngineHash, Event

TIERS = (Tier.HBM, Tier.DRAM)
"""Tiers that an engine's events can speak of; the agent's pool is in the second, too."""

_POOL = len(TIERS)
_PLACES = (*TIERS, Tier.DRAM)
"""The tier of each place where a block can have copies: the engine's two, and the agent's pool."""

_MASK = (1 << 64) - 1

# How far a block's identity is known. An ORPHAN may still become NAMED; an UNNAMED block never will, nor its children.
_NAMED, _ORPHAN, _UNNAMED = range(3)


class _Block:
    """One engine hash: its copies by place, and its RouteKey once the chain to the root is known."""

    __slots__ = ("copies", "key", "parent", "parent_key", "state", "tokens")

    def __init__(self) -> None:
        self.copies = [0] * len(_PLACES)
        self.state = _ORPHAN
        self.key = 0
        self.parent_key = ROOT_PARENT
        self.parent: EngineHash | None = None
        self.tokens = b""


class CatalogueCounts(msgspec.Struct, frozen=True):
    """Sizes, for metrics: engine hashes held, of these orphans and unnamed ones; and orphans forgotten so far."""

    hashes: int
    orphans: int
    unnamed: int
    forgotten: int


class Catalogue:
    """The blocks of one engine, by engine hash and by RouteKey.

    Owns both maps, the names of the blocks in the agent's pool, and the changes not taken yet. Mutated on one event
    loop, by what the engine's events say and what the pool says. What `take_changes`, `digest` and `held` say is valid
    until the next of those calls.

    An engine counts copies: a hash stored twice and removed once is still held. Several hashes may lead to one RouteKey
    (same tokens, hashed differently); a key is held in a tier while any of them is. Only one group of a hybrid model is
    followed, the first of full attention.

    The pool knows its blocks by ContentKey alone: one of them is reported once the engine has told its tokens, before
    or after. What the pool holds outlasts every reset.
    """

    def __init__(self, model: str, seed: int, *, max_orphans: int = 65_536) -> None:
        self._seed = seed
        self._max_orphans = max_orphans
        self._forgotten = 0
        self.block_size = 0
        self._pooled: set[EngineHash] = set()
        self.reset(model)

    def reset(self, model: str) -> None:
        """Starts over, empty and with nothing to tell, for an engine that serves `model`."""
        self._model = model
        self._roots: dict[tuple[str, str], int] = {}
        self._group: int | None = None
        self._changed: dict[tuple[Tier, int], bool] = {}
        self.digest = 0
        self._empty()

    def _empty(self) -> None:
        self._blocks: dict[EngineHash, _Block] = {}
        self._orphans: dict[EngineHash, None] = {}
        self._waiting: dict[EngineHash, dict[EngineHash, None]] = {}
        self._unnamed = 0
        self._held: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}
        self._holders: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}

    @property
    def blocks(self) -> int:
        """Reported blocks, a key held in two tiers counted twice."""
        return sum(len(held) for held in self._held.values())

    @property
    def pooled(self) -> int:
        """Blocks that the agent's pool holds, reported or not."""
        return len(self._pooled) // 2  # each under both its names

    @property
    def counts(self) -> CatalogueCounts:
        """Sizes, for metrics."""
        return CatalogueCounts(len(self._blocks), len(self._orphans), self._unnamed, self._forgotten)

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would say anything."""
        return bool(self._changed)

    def held(self, tier: Tier) -> tuple[list[int], list[int]]:
        """Keys held in `tier` and their parents' keys: a copy, so it stays as it was."""
        held = self._held.get(tier, {})
        return list(held.keys()), list(held.values())

    def apply(self, events: Iterable[Event]) -> None:
        """Takes in the events of one batch, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                if event.group == (self._group or 0):
                    for engine_hash in event.hashes:
                        self._remove(engine_hash, event.tier)
            else:
                self._clear(event)

    def pool_held(self, key: bytes) -> None:
        """The agent's pool holds the block with this ContentKey."""
        for engine_hash in _names_of(key):
            if engine_hash not in self._pooled:
                self._pooled.add(engine_hash)
                block = self._blocks.get(engine_hash)
                if block is not None:
                    self._add_copy(block, _POOL)

    def pool_dropped(self, key: bytes) -> None:
        """The agent's pool holds it no more."""
        for engine_hash in _names_of(key):
            if engine_hash in self._pooled:
                self._pooled.remove(engine_hash)
                self._remove(engine_hash, _POOL)

    def take_changes(self, limit: int) -> list[Change]:
        """Up to `limit` blocks that became held or are held no more since the last call; each appears once."""
        if len(self._changed) <= limit:
            taken, self._changed = self._changed, {}
        else:
            taken = {place: self._changed.pop(place) for place in list(self._changed)[:limit]}
        changes: list[Change] = []
        for tier in TIERS:
            gone = [key for (where, key), now in taken.items() if where is tier and not now]
            come = [key for (where, key), now in taken.items() if where is tier and now]
            if gone:
                changes.append(Removed(tier=tier, keys=pack_keys(gone)))
            if come:
                held = self._held[tier]
                changes.append(Stored(tier=tier, keys=pack_keys(come), parents=pack_keys(held[key] for key in come)))
        return changes

    def _store(self, event: BlockStored) -> None:
        if event.group != self._group:
            if self._group is not None or not (event.full or event.group == 0):
                return
            self._group = event.group
        if event.tokens:
            self.block_size = event.block_size
        block_bytes = event.block_size * TOKEN_BYTES
        parent = event.parent
        for index, engine_hash in enumerate(event.hashes):
            block = self._blocks.get(engine_hash)
            if block is None:
                block = self._blocks[engine_hash] = _Block()
                self._orphans[engine_hash] = None
                if engine_hash in self._pooled:
                    self._add_copy(block, _POOL)
            if block.state == _ORPHAN and not block.tokens and event.tokens:
                block.parent = parent
                block.tokens = event.tokens[index * block_bytes : (index + 1) * block_bytes]
                self._identify(engine_hash, block, event, index)
            self._add_copy(block, event.tier)
            parent = engine_hash
        while len(self._orphans) > self._max_orphans:
            self._forget(next(iter(self._orphans)))

    def _identify(self, engine_hash: EngineHash, block: _Block, event: BlockStored, index: int) -> None:
        """Names `block` and everything that waited for it, or says what it waits for."""
        salt = _salt_of(event, index, first=block.parent is None)
        if salt is None or event.lora == "" or event.block_size % UNIT_TOKENS:
            self._settle(engine_hash, block, None)
        elif block.parent is None:
            self._settle(engine_hash, block, self._root(event.lora or "", salt))
        else:
            parent = self._blocks.get(block.parent)
            if parent is None or parent.state == _ORPHAN:
                self._waiting.setdefault(block.parent, {})[engine_hash] = None
            else:
                self._settle(engine_hash, block, parent.key if parent.state == _NAMED else None)

    def _settle(self, engine_hash: EngineHash, block: _Block, start: int | None) -> None:
        """Gives a block the key chained from `start` (None: it can have none), then its waiting descendants theirs."""
        ready: list[tuple[EngineHash, _Block, int | None]] = [(engine_hash, block, start)]
        while ready:
            engine_hash, block, start = ready.pop()
            del self._orphans[engine_hash]
            if start is None:
                block.state = _UNNAMED
                self._unnamed += 1
            else:
                block.state = _NAMED
                block.key = chain(start, block.tokens)[-1]
                block.parent_key = ROOT_PARENT if block.parent is None else start
                for place, tier in enumerate(_PLACES):
                    if block.copies[place]:
                        self._hold(block, tier)
            block.tokens = b""
            onward = block.key if block.state == _NAMED else None
            for child_hash in self._waiting.pop(engine_hash, ()):
                ready.append((child_hash, self._blocks[child_hash], onward))

    def _root(self, lora: str, salt: str) -> int:
        root = self._roots.get((lora, salt))
        if root is None:
            if len(self._roots) >= 65_536:  # salts come from tenants; the map is only a cache
                self._roots.clear()
            root = self._roots[lora, salt] = Namespace(self._model, lora, salt).root(self._seed)
        return root

    def _remove(self, engine_hash: EngineHash, place: int) -> None:
        block = self._blocks.get(engine_hash)
        if block is None or not block.copies[place]:
            return
        block.copies[place] -= 1
        if block.copies[place]:
            return
        if block.state == _NAMED:
            self._release(block, _PLACES[place])
        if not any(block.copies):
            self._drop(engine_hash, block)

    def _add_copy(self, block: _Block, place: int) -> None:
        block.copies[place] += 1
        if block.copies[place] == 1 and block.state == _NAMED:
            self._hold(block, _PLACES[place])

    def _hold(self, block: _Block, tier: Tier) -> None:
        holders = self._holders[tier]
        count = holders[block.key] = holders.get(block.key, 0) + 1
        if count == 1:
            self._held[tier][block.key] = block.parent_key
            self._transition(tier, block.key, now=True)

    def _release(self, block: _Block, tier: Tier) -> None:
        holders = self._holders[tier]
        holders[block.key] -= 1
        if not holders[block.key]:
            del holders[block.key], self._held[tier][block.key]
            self._transition(tier, block.key, now=False)

    def _transition(self, tier: Tier, key: int, *, now: bool) -> None:
        term = digest_term(key, tier)
        self.digest = (self.digest + (term if now else -term)) & _MASK
        # Transitions of one place alternate, so a second one since the last take undoes the first.
        if self._changed.pop((tier, key), None) is None:
            self._changed[tier, key] = now

    def _drop(self, engine_hash: EngineHash, block: _Block) -> None:
        del self._blocks[engine_hash]
        if block.state == _UNNAMED:
            self._unnamed -= 1
        elif block.state == _ORPHAN:
            del self._orphans[engine_hash]
            if block.parent is not None:
                siblings = self._waiting[block.parent]
                del siblings[engine_hash]
                if not siblings:
                    del self._waiting[block.parent]

    def _forget(self, engine_hash: EngineHash) -> None:
        # An orphan earns nothing, so forgetting one only costs hits that might have come. Its copies are forgotten too:
        # a later Removed of it finds nothing, or takes away a copy stored anew; never the reverse.
        self._forgotten += 1
        self._drop(engine_hash, self._blocks[engine_hash])

    def _clear(self, event: AllCleared) -> None:
        if event.tier is None:
            for tier in TIERS:
                for key in self._held[tier]:
                    self._transition(tier, key, now=False)
            self._empty()
            return
        for engine_hash, block in list(self._blocks.items()):
            if block.copies[event.tier]:
                block.copies[event.tier] = 1
                self._remove(engine_hash, event.tier)

    def check(self) -> None:
        """Asserts what must always hold: both maps, the digest and the waiting lists tell one story."""
        expected: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}
        for engine_hash, block in self._blocks.items():
            assert any(block.copies), f"{engine_hash!r} is kept without a copy"
            assert min(block.copies) >= 0, f"{engine_hash!r} has {block.copies} copies"
            assert block.copies[_POOL] == (engine_hash in self._pooled)
            assert (block.state == _ORPHAN) == (engine_hash in self._orphans)
            if block.state == _ORPHAN and block.parent is not None:
                assert engine_hash in self._waiting[block.parent]
            if block.state == _NAMED:
                for place, tier in enumerate(_PLACES):
                    if block.copies[place]:
                        expected[tier][block.key] = expected[tier].get(block.key, 0) + 1
        assert expected == self._holders
        assert self._unnamed == sum(block.state == _UNNAMED for block in self._blocks.values())
        assert sum(len(children) for children in self._waiting.values()) <= len(self._orphans) <= self._max_orphans
        for tier in TIERS:
            assert self._held[tier].keys() == self._holders[tier].keys()
        assert self.digest == sum(digest_of(self._held[tier], tier) for tier in TIERS) & _MASK
        for (tier, key), now in self._changed.items():
            assert (key in self._held[tier]) == now


def _names_of(key: bytes) -> tuple[EngineHash, EngineHash]:
    """What an engine's events may call a block: by default they carry its hash's last 64 bits."""
    return wire_block_hash(key), key


def _salt_of(event: BlockStored, index: int, *, first: bool) -> str | None:
    """The salt that starts a chain ("" below the first block); None when the block's extra keys are not understood."""
    extra: list[Any] = event.extra[index] if event.extra else []
    if event.lora and extra and extra[0] == event.lora:
        extra = extra[1:]
    if not extra:
        return event.salt
    if first and len(extra) == 1 and isinstance(extra[0], str):
        return extra[0]
    return None
