"""Which block is in which slot: reserve, write, commit; look up and pin; evict, quarantine, clear."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvstore.errors import PoolError
from kvstore.eviction import EvictionOrder
from kvstore.slot import pitch_of, restamp, seal
from kvstore.transfer.base import Region


class Held(NamedTuple):
    """One use of a slot: `generation` rises whenever the slot is reserved, so another use never equals it."""

    slot: int
    generation: int


class PoolListener(Protocol):
    """Told, in order, which blocks can be looked up."""

    def block_held(self, key: bytes) -> None:
        """`key` became visible."""

    def block_dropped(self, key: bytes) -> None:
        """`key` is visible no more: evicted or cleared."""


class Counts(NamedTuple):
    """Slots by state; `pinned` are those, of any state, that are pinned, or held and not let go of for a while yet."""

    free: int
    reserved: int
    held: int
    quarantined: int
    pinned: int


class _State(IntEnum):
    """FREE -> RESERVED -> HELD -> FREE. What somebody may still read or write, though its block is gone, is QUARANTINED
    before it is FREE."""

    FREE = 0
    RESERVED = 1
    HELD = 2
    QUARANTINED = 3


_FREE, _RESERVED, _HELD, _QUARANTINED = _State
# Looked up in an enumeration each costs four times as much, several times for each block.


class _Slot:
    """One slot. `writers` and `written` are bit masks of ranks, with a bit above them for one who writes it whole.
    `until` is when what keeps it is over, 0 for nothing: the hold of a HELD one, the quarantine, or the patience with a
    RESERVED one that some ranks have committed."""

    __slots__ = ("generation", "key", "parent", "pins", "shared", "state", "until", "used", "writers", "written")

    def __init__(self) -> None:
        self.state = _FREE
        self.generation = 0
        self.key = self.parent = b""
        self.writers = self.written = 0
        self.pins = self.used = 0
        self.until = 0.0
        self.shared = False


class Pool:
    """Owns every slot of a region: its state, its block, and who may not be disturbed in it.

    One thread may call it (an agent's event loop); nothing in it blocks. Slots from `pin` hold their block until
    `unpin`; slots from `reserve` are the writer's until `commit`, `admit` or `abandon`; what `lookup` says is valid
    until the next call. A block is visible when all `ranks` have committed it, under one generation.

    Evicted are HELD slots that nobody pins, that are not on hold and that no held or reserved block follows: a prefix
    goes tail first, because blocks behind a missing one can never be hit.
    """

    def __init__(
        self,
        region: Region,
        block_bytes: int,
        *,
        ranks: int = 1,
        quarantine_s: float = 60.0,
        listener: PoolListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises PoolError for a region whose slots are not those of `block_bytes`, and for a bad `ranks` or
        `quarantine_s` (seconds after which nobody writes any more who was not seen to stop)."""
        if block_bytes < 1 or region.pitch != pitch_of(block_bytes):
            raise PoolError(f"block_bytes: {block_bytes} does not go with slots of {region.pitch} bytes")
        if ranks < 1:
            raise PoolError(f"ranks: must be above 0, got {ranks}")
        if not quarantine_s > 0:
            raise PoolError(f"quarantine_s: must be above 0, got {quarantine_s}")
        self.region = region
        self.block_bytes = block_bytes
        self.ranks = ranks
        self.clears = 0
        """Number of `clear`s: what was pinned under an older one must not be believed any more."""
        self._everyone = (1 << ranks) - 1
        self._whole = 1 << ranks if ranks > 1 else 1
        self._quarantine_s = quarantine_s
        self._listener = listener
        self._clock = clock
        self._slots = [_Slot() for _ in range(region.slots)]
        self._free = [*reversed(range(region.slots))]
        self._reserved: dict[bytes, int] = {}
        self._held: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}
        self._pinned: set[int] = set()
        self._order = EvictionOrder()
        self._timers: list[tuple[float, int]] = []
        self._uses = 0

    @property
    def counts(self) -> Counts:
        """Slots by state now."""
        free, reserved, held = len(self._free), len(self._reserved), len(self._held)
        return Counts(free, reserved, held, len(self._slots) - free - reserved - held, len(self._pinned))

    def view(self, slot: int) -> memoryview:
        """The `pitch` bytes of a slot: payload, padding, trailer."""
        return self.region.memory[slot * self.region.pitch : (slot + 1) * self.region.pitch]

    def pins(self, held: Held) -> int:
        """How often this use of a slot is pinned now."""
        slot = self._slots[held.slot]
        return slot.pins if slot.generation == held.generation else 0

    @property
    def all_pins(self) -> int:
        """Pins on all slots, also on those whose block is gone: a look at each, for checks."""
        return sum(slot.pins for slot in self._slots)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Blocks of the longest run of `keys`, from the first on, that is held. Changes nothing."""
        return next((index for index, key in enumerate(keys) if key not in self._held), len(keys))

    def pin(self, keys: Iterable[bytes]) -> list[Held]:
        """The longest run of `keys` that is held, each block pinned once more: one use of the whole run."""
        self._uses += 1
        pinned = []
        for key in keys:
            index = self._held.get(key)
            if index is None:
                break
            slot = self._slots[index]
            slot.pins += 1
            slot.used = self._uses
            slot.shared = False
            self._settle(index)
            pinned.append(Held(index, slot.generation))
        return pinned

    def unpin(self, held: Iterable[Held], *, hold_s: float = 0.0, shared: bool = False) -> None:
        """Undo one `pin` of each. For `hold_s` seconds they may still be read unseen, and are not reused. `shared`: a
        peer holds these blocks now, too; they go first, unless they are pinned once more."""
        until = self._clock() + hold_s if hold_s > 0 else 0.0
        for index, generation in held:
            slot = self._slots[index]
            assert slot.pins and slot.generation == generation, f"slot {index} is unpinned and not pinned"
            slot.pins -= 1
            if until > slot.until:
                self._wait(index, until)
            if shared and slot.state is _HELD:
                slot.shared = True
            self._settle(index)

    def reserve(self, keys: Sequence[bytes], parent: bytes = b"", *, rank: int | None = None) -> list[Held | None]:
        """Slots to write consecutive blocks in, the first of which follows `parent`; evicts for them what it must.

        None for a block that is held already, that another writes, or that finds no room (then nor do those behind it).
        `rank` writes its share only: each rank is given the same slot, once. Without it, one writes all of the block.
        """
        self.expire()
        writer = self._whole if rank is None else self._share(rank)
        given: list[Held | None] = []
        for key in keys:
            if key in self._held:
                given.append(None)
            elif key in self._reserved:
                given.append(self._join(self._reserved[key], writer))
            else:
                # Counted first, so that no block makes room for the one that follows it.
                self._adopt(parent)
                index = self._room()
                if index is None:
                    self._orphan(parent)
                    break
                slot = self._slots[index]
                slot.state = _RESERVED
                slot.generation += 1
                slot.key, slot.parent = key, parent
                slot.writers, slot.written = writer, 0
                self._reserved[key] = index
                given.append(Held(index, slot.generation))
            parent = key
        return given + [None] * (len(keys) - len(given))

    def commit(self, rank: int, key: bytes, held: Held) -> bool:
        """`rank` has written its share. True when the block became visible by it, sealed with the bytes it has now.
        Without effect for what is not, or no longer, reserved under this key, generation and rank."""
        slot = self._writing(held)
        share = self._share(rank)
        if slot is None or slot.key != key or not slot.writers & share:
            return False
        slot.written |= share
        if slot.written != self._everyone:
            if not slot.until:
                self._wait(held.slot, self._clock() + self._quarantine_s)
            return False
        seal(self.view(held.slot), self.block_bytes, key, slot.generation)
        self._show(held.slot)
        return True

    def admit(self, key: bytes, held: Held) -> bool:
        """Make a fetched block visible whose slot has been verified; as `commit` of all ranks. Its checksum stays the
        one that was verified: a new one would vouch for bytes that nobody has looked at."""
        slot = self._writing(held)
        if slot is None or slot.key != key or slot.writers != self._whole:
            return False
        restamp(self.view(held.slot), slot.generation)
        self._show(held.slot)
        return True

    def abandon(self, held: Held, *, stopped: bool = True) -> None:
        """A reserved block will not be committed. Unless its writer has `stopped`, and no other rank is still writing,
        the slot is quarantined. Without effect for what is not, or no longer, reserved."""
        slot = self._writing(held)
        if slot is not None:
            writing = (slot.writers & ~slot.written).bit_count()
            self._give_up(held.slot, quarantine=not stopped or writing > 1)

    def clear(self) -> None:
        """Nothing is held any more, and nothing that is being written can be committed. What is pinned or on hold is
        free once it is let go of, what is reserved after the quarantine."""
        self.clears += 1
        gone, reserved = self._held, self._reserved
        self._held, self._reserved = {}, {}
        self._children.clear()
        self._order.clear()
        for index in reserved.values():
            self._wait(index, self._clock() + self._quarantine_s)
        for index in (*gone.values(), *reserved.values()):
            self._slots[index].state = _QUARANTINED
            self._settle(index)
        if self._listener is not None:
            for key in gone:
                self._listener.block_dropped(key)

    def expire(self) -> None:
        """Let go of what only time kept: holds and quarantines that are over, blocks that some ranks never commit."""
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            until, index = heapq.heappop(self._timers)
            slot = self._slots[index]
            if slot.until != until:  # Prolonged since, or over before its time.
                continue
            slot.until = 0.0
            if slot.state is _RESERVED:
                self._give_up(index, quarantine=True)
            else:
                self._settle(index)

    def check(self) -> None:
        """Asserts that every slot is in one state and every table says what the slots say."""
        states = {state: [i for i, slot in enumerate(self._slots) if slot.state is state] for state in _State}
        assert sorted(self._free) == states[_FREE], "the free list is not the FREE slots"
        for table, state in ((self._reserved, _RESERVED), (self._held, _HELD)):
            assert sorted(table.values()) == states[state], f"the index is not the {state.name} slots"
            assert all(self._slots[index].key == key for key, index in table.items()), f"{state.name} key"
        counts = self.counts
        assert counts.quarantined == len(states[_QUARANTINED]) and sum(counts[:4]) == len(self._slots), counts
        children: dict[bytes, int] = {}
        for index in (*self._reserved.values(), *self._held.values()):
            parent = self._slots[index].parent
            children[parent] = children.get(parent, 0) + 1
        assert self._children == children, "children miscounted"
        timed = set(self._timers)
        for index, slot in enumerate(self._slots):
            on_hold = slot.state is _HELD and slot.until > 0
            evictable = slot.state is _HELD and not (slot.pins or slot.until or slot.key in children)
            assert slot.pins >= 0 and (index in self._pinned) == (slot.pins > 0 or on_hold), f"pins of slot {index}"
            assert (index in self._order) == evictable, f"slot {index} in the eviction order"
            assert not slot.until or (slot.until, index) in timed, f"nothing ends what keeps slot {index}"
            if slot.state is _FREE:
                assert not slot.pins and not slot.until, f"slot {index} is free and in use"
            elif slot.state is _QUARANTINED:
                assert slot.pins or slot.until, f"slot {index} is kept for nothing"
            elif slot.state is _RESERVED:
                assert slot.writers and slot.written != self._everyone and not slot.pins, f"writers of slot {index}"
                assert slot.written & ~slot.writers == 0 and bool(slot.until) == bool(slot.written), f"slot {index}"
        self._order.check()

    def _share(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise PoolError(f"rank: must be between 0 and {self.ranks - 1}, got {rank}")
        return 1 << rank

    def _writing(self, held: Held) -> _Slot | None:
        """The slot, if it is still reserved in this use; slot numbers come from outside and may be any."""
        if not 0 <= held.slot < len(self._slots):
            return None
        slot = self._slots[held.slot]
        return slot if slot.state is _RESERVED and slot.generation == held.generation else None

    def _join(self, index: int, writer: int) -> Held | None:
        slot = self._slots[index]
        if slot.writers & writer or self._whole in (slot.writers, writer):
            return None
        slot.writers |= writer
        return Held(index, slot.generation)

    def _room(self) -> int | None:
        """A slot out of every table, evicting the block in it if need be; None when nothing may be evicted."""
        if self._free:
            return self._free.pop()
        index = self._order.pop()
        if index is not None:
            slot = self._slots[index]
            del self._held[slot.key]
            self._orphan(slot.parent)
            if self._listener is not None:
                self._listener.block_dropped(slot.key)
        return index

    def _show(self, index: int) -> None:
        slot = self._slots[index]
        del self._reserved[slot.key]
        self._held[slot.key] = index
        self._uses += 1
        slot.state = _HELD
        slot.used = self._uses
        slot.shared = False
        slot.until = 0.0
        self._settle(index)
        if self._listener is not None:
            self._listener.block_held(slot.key)

    def _give_up(self, index: int, *, quarantine: bool) -> None:
        slot = self._slots[index]
        del self._reserved[slot.key]
        slot.state = _QUARANTINED
        slot.until = 0.0
        if quarantine:
            self._wait(index, self._clock() + self._quarantine_s)
        self._settle(index)
        self._orphan(slot.parent)

    def _wait(self, index: int, until: float) -> None:
        self._slots[index].until = until
        heapq.heappush(self._timers, (until, index))

    def _adopt(self, parent: bytes) -> None:
        self._children[parent] = self._children.get(parent, 0) + 1
        if parent in self._held:
            self._settle(self._held[parent])

    def _orphan(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._held:
                self._settle(self._held[parent])

    def _settle(self, index: int) -> None:
        """Put a slot where its state, pins, hold and children say; called after each change of one of these."""
        slot = self._slots[index]
        pinned = slot.pins > 0
        if slot.state is _HELD:
            pinned = pinned or slot.until > 0
            if pinned or slot.key in self._children:
                self._order.discard(index)
            else:
                self._order.put(index, shared=slot.shared, used=slot.used)
        else:
            self._order.discard(index)
            if slot.state is _QUARANTINED and not (pinned or slot.until):
                slot.state = _FREE
                self._free.append(index)
        if pinned:
            self._pinned.add(index)
        else:
            self._pinned.discard(index)
