"""What one engine holds, told from its KV events, in the names that gateways use."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvstore.identity import TOKEN_BYTES, UNIT_TOKENS, Namespace, chain, pack_keys
from kvstore.messages import MAX_CHANGED_BLOCKS, ROOT_PARENT, SHARDS, Change, Cleared, Stored, Tier
from replica_agent.block import COPIES_BITS, NAMED, ORPHAN, UNNAMED, Block, names_of, salt_of
from replica_agent.cast_off import CastOff
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored, EngineHash, Event
from replica_agent.held import HeldKeys

TIERS = (Tier.HBM, Tier.DRAM)
"""Tiers that an engine's events can speak of; the agent's pool is in the second, too."""

_POOL = len(TIERS)
_PLACES = (*TIERS, Tier.DRAM)
"""The tier of each place where a block can have copies: the engine's two, and the agent's pool."""


class CatalogueCounts(msgspec.Struct, frozen=True):
    """Sizes, for metrics: engine hashes held, of these orphans and unnamed ones; and, so far, orphans forgotten, blocks
    told again that were held, and copies taken off because the engine has no room for so many."""

    hashes: int
    orphans: int
    unnamed: int
    forgotten: int
    told_again: int
    surplus: int


class Catalogue:
    """The blocks of one engine, by engine hash and by RouteKey.

    Owns both maps, the names of the blocks in the agent's pool, and the changes not taken yet. Mutated on one event
    loop, by what the engine's events say and what the pool says. What `take_changes`, `digest` and `held` say is valid
    until the next of those calls.

    An engine counts copies: a hash stored twice and removed once is still held. But vLLM also tells again what a
    request found cached (`kv_cache_report_mode` "full"), in events of the same form, and never that it is removed so
    often. What was held before the batch and comes in a run from the first block of a prompt on is taken for that,
    where the run has several blocks or is followed by its child: an engine computes such blocks again only for requests
    that must not read the cache. A first block alone can be either; it counts, and the doubt is remembered: when there
    are more copies in HBM than `capacity_blocks`, all that were in doubt are taken off.

    Several hashes may lead to one RouteKey (same tokens, hashed differently); a key is held in a tier while any of them
    is. Only one group of a hybrid model is followed, the first of full attention.

    The pool knows its blocks by ContentKey alone: one of them is reported once the engine has told its tokens, before
    or after. What the pool holds outlasts every reset.
    """

    def __init__(self, model: str, seed: int, *, max_orphans: int = 65_536) -> None:
        self._seed = seed
        self._max_orphans = max_orphans
        self._forgotten = self._taken_off = self._told_again = 0
        self.block_size = 0
        self.capacity_blocks = 0
        """Blocks that the engine's HBM has room for; 0 while unknown."""
        self._pooled: set[EngineHash] = set()
        self._held = {tier: HeldKeys(tier) for tier in TIERS}
        self._cast_off = CastOff()
        self._blocks: dict[EngineHash, Block] = {}
        self.reset(model)

    def reset(self, model: str) -> None:
        """Starts over, empty and with nothing to tell, for an engine that serves `model`."""
        self._model = model
        self._roots: dict[tuple[str, str], int] = {}
        self._group: int | None = None
        self._empty(tell=False)

    def _empty(self, *, tell: bool) -> None:
        for held in self._held.values():
            held.clear(tell=tell)
        self._cast_off.add((self._blocks,))
        self._blocks = {}
        self._orphans: dict[EngineHash, None] = {}
        self._waiting: dict[EngineHash, dict[EngineHash, None]] = {}
        self._unnamed = 0
        self._hbm_copies = 0
        self._doubted: dict[EngineHash, int] = {}
        self._fresh: set[EngineHash] = set()

    def sweep(self, limit: int) -> bool:
        """Frees about `limit` entries of what a reset or a clear left behind; whether there is more."""
        left = [held.sweep(limit) for held in self._held.values()]
        return self._cast_off.sweep(limit) or any(left)

    @property
    def blocks(self) -> int:
        """Reported blocks, a key held in two tiers counted twice."""
        return sum(held.count for held in self._held.values())

    @property
    def digest(self) -> int:
        """Of everything reported; see `kvstore.messages.digest_term`."""
        return sum(held.digest for held in self._held.values()) & (1 << 64) - 1

    @property
    def pooled(self) -> int:
        """Blocks that the agent's pool holds, reported or not."""
        return len(self._pooled) // 2  # each under both its names

    @property
    def counts(self) -> CatalogueCounts:
        """Sizes, for metrics."""
        orphans = len(self._orphans)
        return CatalogueCounts(
            len(self._blocks), orphans, self._unnamed, self._forgotten, self._told_again, self._taken_off
        )

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would say anything."""
        return any(held.has_changes for held in self._held.values())

    def held(self, tier: Tier) -> tuple[list[int], list[int]]:
        """Keys held in `tier` and their parents' keys: copies of all, which takes long where there are many."""
        return self._held[tier].part(0, SHARDS)

    def part(self, first: int, blocks: int) -> tuple[int, list[Stored]]:
        """What is held in the shards from `first` on, in so many of them as have about `blocks` blocks: the shard to go
        on with, and the blocks, none with more than a message takes."""
        end, size = first, 0
        while end < SHARDS and (end == first or size < blocks):
            size += sum(held.size(end) for held in self._held.values())
            end += 1
        stored: list[Stored] = []
        for tier, held in self._held.items():
            keys, parents = held.part(first, end)
            for begin in range(0, len(keys), MAX_CHANGED_BLOCKS):
                span = slice(begin, begin + MAX_CHANGED_BLOCKS)
                stored.append(Stored(tier=tier, keys=pack_keys(keys[span]), parents=pack_keys(parents[span])))
        return end, stored

    def apply(self, events: Iterable[Event]) -> None:
        """Takes in the events of one batch, in order."""
        self._fresh.clear()
        batch = list(events)
        for at, event in enumerate(batch):
            if isinstance(event, BlockStored):
                first = event.parent is None and event.tier is Tier.HBM
                self._store(event, run=first and (len(event.hashes) > 1 or _goes_on(batch, at)), first=first)
            elif isinstance(event, BlockRemoved):
                if event.group == (self._group or 0):
                    for engine_hash in event.hashes:
                        self._remove(engine_hash, event.tier)
            else:
                self._clear(event)

    def pool_held(self, key: bytes) -> None:
        """The agent's pool holds the block with this ContentKey."""
        for engine_hash in names_of(key):
            if engine_hash not in self._pooled:
                self._pooled.add(engine_hash)
                block = self._blocks.get(engine_hash)
                if block is not None:
                    self._add_copy(engine_hash, block, _POOL)

    def pool_dropped(self, key: bytes) -> None:
        """The agent's pool holds it no more."""
        for engine_hash in names_of(key):
            if engine_hash in self._pooled:
                self._pooled.remove(engine_hash)
                self._remove(engine_hash, _POOL)

    def take_changes(self, limit: int) -> list[Change]:
        """What has become of about `limit` blocks since the last call, no more than twice as many in a tier: each that
        is gone or was in between, and then each that is held now and was not all the time."""
        changes: list[Change] = []
        for held in self._held.values():
            changes += held.take(max(0, limit - _blocks_in(changes)))
        return changes

    def _store(self, event: BlockStored, *, first: bool, run: bool) -> None:
        """`first`: begins with a prompt's first block, in HBM; `run`: and does not end with it."""
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
                block = self._blocks[engine_hash] = Block()
                self._orphans[engine_hash] = None
                if engine_hash in self._pooled:
                    self._add_copy(engine_hash, block, _POOL)
            if block.state == ORPHAN and not block.tokens and event.tokens:
                block.parent = parent
                block.tokens = event.tokens[index * block_bytes : (index + 1) * block_bytes]
                self._identify(engine_hash, block, event, index)
            again = first and engine_hash not in self._fresh and bool(block.copies_in(Tier.HBM))
            if again and run:
                self._told_again += 1
            else:
                self._add_copy(engine_hash, block, event.tier)
                if again:
                    self._doubted[engine_hash] = self._doubted.get(engine_hash, 0) + 1
            parent = engine_hash
        while len(self._orphans) > self._max_orphans:
            self._forget(next(iter(self._orphans)))
        if self._hbm_copies > self.capacity_blocks > 0:
            self._take_off_surplus()

    def _identify(self, engine_hash: EngineHash, block: Block, event: BlockStored, index: int) -> None:
        """Names `block` and everything that waited for it, or says what it waits for."""
        salt = salt_of(event, index, first=block.parent is None)
        if salt is None or event.lora == "" or event.block_size % UNIT_TOKENS:
            self._settle(engine_hash, block, None)
        elif block.parent is None:
            self._settle(engine_hash, block, self._root(event.lora or "", salt))
        else:
            parent = self._blocks.get(block.parent)
            if parent is None or parent.state == ORPHAN:
                self._waiting.setdefault(block.parent, {})[engine_hash] = None
            else:
                self._settle(engine_hash, block, parent.key if parent.state == NAMED else None)

    def _settle(self, engine_hash: EngineHash, block: Block, start: int | None) -> None:
        """Gives a block the key chained from `start` (None: it can have none), then its waiting descendants theirs."""
        ready: list[tuple[EngineHash, Block, int | None]] = [(engine_hash, block, start)]
        while ready:
            engine_hash, block, start = ready.pop()
            del self._orphans[engine_hash]
            if start is None:
                block.state = UNNAMED
                self._unnamed += 1
            else:
                block.state = NAMED
                block.key = chain(start, block.tokens)[-1]
                block.parent_key = ROOT_PARENT if block.parent is None else start
                for place, tier in enumerate(_PLACES):
                    if block.copies_in(place):
                        self._held[tier].add(block.key, block.parent_key)
            block.tokens = b""
            onward = block.key if block.state == NAMED else None
            for child_hash in self._waiting.pop(engine_hash, ()):
                ready.append((child_hash, self._blocks[child_hash], onward))

    def _root(self, lora: str, salt: str) -> int:
        root = self._roots.get((lora, salt))
        if root is None:
            root = Namespace(self._model, lora, salt).root(self._seed)
            if len(self._roots) >= 16_384:  # salts come from tenants; the map is only a cache
                self._roots.clear()
            if len(lora) + len(salt) <= 1_024:
                self._roots[lora, salt] = root
        return root

    def _remove(self, engine_hash: EngineHash, place: int) -> None:
        block = self._blocks.get(engine_hash)
        if block is None or not block.copies_in(place):
            return
        block.copies -= 1 << COPIES_BITS * place
        left = block.copies_in(place)
        if place == Tier.HBM:
            self._hbm_copies -= 1
            if self._doubted.get(engine_hash, 0) > left:
                self._doubted[engine_hash] = left
            if not left:
                self._doubted.pop(engine_hash, None)
        if left:
            return
        if block.state == NAMED:
            self._held[_PLACES[place]].release(block.key)
        if not block.copies:
            self._drop(engine_hash, block)

    def _add_copy(self, engine_hash: EngineHash, block: Block, place: int) -> None:
        block.copies += 1 << COPIES_BITS * place
        copies = block.copies_in(place)
        if copies == 1 and block.state == NAMED:
            self._held[_PLACES[place]].add(block.key, block.parent_key)
        if place == Tier.HBM:
            self._hbm_copies += 1
            if copies == 1:
                self._fresh.add(engine_hash)

    def _take_off_surplus(self) -> None:
        # One copy too few costs a hit, at worst until the block is stored again; one too many is a promise not kept.
        doubted, self._doubted = self._doubted, {}
        for engine_hash, count in doubted.items():
            self._taken_off += count
            for _ in range(count):
                self._remove(engine_hash, Tier.HBM)

    def _drop(self, engine_hash: EngineHash, block: Block) -> None:
        del self._blocks[engine_hash]
        if block.state == UNNAMED:
            self._unnamed -= 1
        elif block.state == ORPHAN:
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
        block = self._blocks[engine_hash]
        self._hbm_copies -= block.copies_in(Tier.HBM)
        self._doubted.pop(engine_hash, None)
        self._drop(engine_hash, block)

    def _clear(self, event: AllCleared) -> None:
        if event.tier is None:
            self._empty(tell=True)
            return
        for engine_hash, block in list(self._blocks.items()):
            while block.copies_in(event.tier):
                self._remove(engine_hash, event.tier)

    def check(self) -> None:
        """Asserts what must always hold: both maps, the digest and the waiting lists tell one story."""
        holders: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}
        copies = 0
        for engine_hash, block in self._blocks.items():
            counts = [block.copies_in(place) for place in range(len(_PLACES))]
            assert any(counts), f"{engine_hash!r} is kept without a copy"
            assert block.copies >> COPIES_BITS * len(_PLACES) == 0, f"{engine_hash!r} has {counts} copies"
            assert counts[_POOL] == (engine_hash in self._pooled)
            assert 0 <= self._doubted.get(engine_hash, 0) <= counts[Tier.HBM]
            copies += counts[Tier.HBM]
            assert (block.state == ORPHAN) == (engine_hash in self._orphans)
            if block.state == ORPHAN and block.parent is not None:
                assert engine_hash in self._waiting[block.parent]
            if block.state == NAMED:
                for place, tier in enumerate(_PLACES):
                    if counts[place]:
                        holders[tier][block.key] = holders[tier].get(block.key, 0) + 1
        assert copies == self._hbm_copies
        assert self._doubted.keys() <= self._blocks.keys()
        assert self._unnamed == sum(block.state == UNNAMED for block in self._blocks.values())
        assert sum(len(children) for children in self._waiting.values()) <= len(self._orphans) <= self._max_orphans
        for tier, held in self._held.items():
            held.check(holders[tier])


def _goes_on(batch: list[Event], at: int) -> bool:
    """Whether the next run of the same group is the child of this one, which is not removed before."""
    event = batch[at]
    assert isinstance(event, BlockStored)
    for following in batch[at + 1 :]:
        if isinstance(following, AllCleared) or following.group != event.group:
            continue
        if isinstance(following, BlockStored):
            return following.parent == event.hashes[-1]
        if event.hashes[-1] in following.hashes:
            return False
    return False


def _blocks_in(changes: list[Change]) -> int:
    return sum(0 if isinstance(change, Cleared) else len(change.keys) // 8 for change in changes)
