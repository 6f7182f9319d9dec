"""What it costs to make room in a replica's cache."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence

from gateway.placement.eviction_order import EvictionOrder, Segment
from gateway.placement.holders import Change
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import ReplicaView
from gateway.placement.reported_uses import ReportedUses, Use
from gateway.placement.reuse import ReuseCurve
from kvstore.messages import Tier

END_S = 1.0
"""For so long a price may be used again: what stands at the end of an order has been idle for much longer."""

LOOK_UPS = 64
"""After so many the rest of what was reported waits for the next report or request. A use takes 1 to 4, and 10 to 20
us; one after 2,000 blocks which were stored one by one, and never used as a whole, 5 ms (`benchmarks/index.py`)."""

MOST_PIECES = 4_096
"""A chain in more pieces than this is not followed to its beginning."""


class _Cache:
    """What is believed of one replica's cache: the order of what was used there, after `before` blocks that are older
    than the first of it, which came at `since`. `room` as far as known."""

    __slots__ = ("before", "end", "order", "room", "since")

    def __init__(self, before: int, since: float) -> None:
        self.order = EvictionOrder()
        self.before = before
        self.since = since
        self.room = 0
        self.end: _End | None = None


class _End:
    """The end of an order with what its blocks cost, summed up, as far as was asked for; of one moment and one state.

    Most decisions look at the same ends of many orders: placing a request changes one of them.
    """

    __slots__ = ("_chances", "_order", "_prices", "_segments", "_sizes", "at", "changes", "growth", "reuse")

    def __init__(self, order: EvictionOrder, reuse: ReuseCurve, growth: float, at: float) -> None:
        self.changes = order.changes
        self.growth = growth
        self.at = at
        self.reuse = reuse
        self._order = iter(order)
        self._segments: list[Segment] = []
        self._chances: list[float] = []
        self._sizes = [0]
        self._prices = [0.0]

    def price(self, blocks: float) -> tuple[float, float]:
        """The price of the first so many blocks, and when the last of their segments was used."""
        sizes = self._sizes
        while sizes[-1] < blocks and (segment := next(self._order, None)) is not None:
            size = len(segment)
            chance = _chance(self.reuse, segment, self.at)
            self._segments.append(segment)
            self._chances.append(chance)
            sizes.append(sizes[-1] + size)
            self._prices.append(self._prices[-1] + self._cost(segment, chance, size))
        whole = bisect_left(sizes, blocks) - 1
        if whole >= len(self._segments):
            return self._prices[-1], self._segments[-1].at
        segment = self._segments[whole]
        rest = self._cost(segment, self._chances[whole], blocks - sizes[whole])
        return self._prices[whole] + rest, segment.at

    def _cost(self, segment: Segment, chance: float, count: float) -> float:
        """Of its last `count` blocks."""
        return count * chance * (1 + self.growth * (segment.depth + len(segment) - count / 2))


class Evictions:
    """Knows what a replica's cache gives up next, and prices it.

    The price of a block is the chance that it is used again, given how long it has been idle (`ReuseCurve`), times the
    effort of computing it again at its depth. Which blocks go is known from this gateway's own placements and from what
    replicas report to have stored for anybody (`ReportedUses`), in the order of use (`EvictionOrder`); how many, from
    reports alone: an order is no longer than what the replica holds and was promised. Of what it holds beyond, that
    which was there before goes first; the rest is taken to be of the same ages as what was used, so that the order is a
    sample of the cache. The chances are learned from own placements: those are a sample of all.

    A placement is believed at once; when its replica reports it, it counts as used again: an engine, too, ranks a
    prompt by when it was done with it.

    Owns an order for each replica, the uses that are to be taken up and the curve of all, and listens to the index.
    Only `used`, `fetched`, `forget`, reports and `catch_up` change what is believed; the other questions drop what
    reports say has gone. Memory: 8 bytes for each block that a replica has room for, about 10 MB of the curve's, and
    the few MB that `ReportedUses` may take.
    """

    def __init__(self, index: PrefixIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self.reuse = ReuseCurve()
        self._index = index
        self._clock = clock
        self._uses = ReportedUses()
        self._caches: dict[str, _Cache] = {}

    def price(self, view: ReplicaView, blocks: Sequence[int], new: int, pending: int) -> float:
        """What making room for `new` blocks costs, in tokens of prefill: those of the prompt that `view` lacks.

        `blocks` are the keys of the prompt's whole blocks: those that are held are not dropped for the others of
        the same prompt. `pending` blocks of requests placed before will come, too.
        """
        capacity = view.capacity_blocks
        held = view.held_blocks + pending
        if not capacity or held + new <= capacity:
            return 0.0
        missing = min(held + new - capacity, capacity)
        held = min(held, capacity)
        now, chance = self._clock(), self.reuse.chance
        cache = self._caches.get(view.id)
        if cache is None:
            return missing * view.block_tokens * chance(0.0)
        order = cache.order
        order.shrink(held)
        before = min(cache.before, missing, held - order.blocks)
        price = before * chance(now - cache.since)
        missing -= before
        if missing and order.blocks:
            sample = min(1.0, order.blocks / (held - before))
            growth = view.attention * view.block_tokens
            price += self._priced(cache, blocks, missing * sample, growth, now) / sample
        return price * view.block_tokens

    def _priced(self, cache: _Cache, blocks: Sequence[int], missing: float, growth: float, now: float) -> float:
        """The price of the first `missing` blocks to go, in blocks at a prompt's beginning."""
        order, end = cache.order, cache.end
        if end is None or end.changes != order.changes or end.growth != growth or now - end.at > END_S:
            end = cache.end = _End(order, self.reuse, growth, now)
        price, last = end.price(missing)
        if all(segment.at > last and not segment.given for segment, _ in order.path(blocks)):
            return price
        # Some of the prompt's own blocks stand there.
        price, left = 0.0, missing
        for segment in order:
            size = len(segment)
            bottom = segment.depth + size
            if segment.depth < len(blocks) and blocks[segment.depth] == segment.head:
                common = segment.common(blocks)
                size = size - common if common < len(segment.keys) else 0
            count = min(size, left)
            price += count * _chance(self.reuse, segment, now) * (1 + growth * (bottom - count / 2))
            left -= count
            if left <= 0:
                break
        return price

    def left(self, view: ReplicaView, blocks: Sequence[int], cached: int, pending: int) -> int:
        """How many of the first `cached` blocks of a prompt, which are held now, still are when the requests placed
        before have taken the room that they need."""
        cache = self._caches.get(view.id)
        evicted = view.held_blocks + pending - view.capacity_blocks
        if cache is None or evicted <= 0:
            return cached
        cache.order.shrink(view.capacity_blocks)
        if cache.order.blocks + min(cache.before, view.held_blocks) < view.capacity_blocks:
            # Something of unknown age may go instead.
            return cached
        return min(cached, cache.order.held(blocks))

    def used(self, view: ReplicaView, blocks: Sequence[int]) -> None:
        """A prompt with these whole blocks is placed on `view`."""
        now = self._clock()
        held, last = 0, now
        for each in self._caches.values():
            depth, at = 0, now
            for found, common in each.order.path(blocks):
                depth += common
                at = found.at
            if depth > held or (depth == held and at > last):
                held, last = depth, at
        self.reuse.observe(blocks, view.block_tokens, held, now - last, now)
        if not view.capacity_blocks:
            return
        cache = self._cache(view.id, view.held_blocks, now)
        cache.room = view.capacity_blocks
        cache.order.use(blocks[: view.capacity_blocks], now)
        cache.order.shrink(view.capacity_blocks)

    def catch_up(self) -> None:
        """Takes up what replicas have reported to have used, the first first, a little at a time."""
        now, left = self._clock(), LOOK_UPS
        while left > 0 and (use := self._uses.next(now)) is not None:
            left -= 1 + self._take_up(use, now)

    def fetched(self, view: ReplicaView, blocks: Sequence[int], keep: int) -> None:
        """A peer reads these blocks from `view`, which then gives them up, but for the first `keep`."""
        if view.yields and (cache := self._caches.get(view.id)) is not None:
            cache.order.give_up(blocks, keep)

    def forget(self, replica: str) -> None:
        """Its cache is empty, or it left."""
        self._caches.pop(replica, None)
        self._uses.forget(replica)

    def replica_added(self, replica: str, bit: int) -> None:
        """Index listener: nothing is known of it yet."""

    def replica_removed(self, replica: str, bit: int) -> None:
        """Index listener: it left."""
        self.forget(replica)

    def holders_changed(self, change: Change) -> None:
        """Index listener: what a replica evicts and was not used is of what it had before; what it stores was used."""
        if change.tier is not Tier.HBM:
            return
        if not change.gained:
            cache = self._caches.get(change.replica)
            if cache is not None:
                dropped = cache.order.drop(change.keys.tolist()) if change.just_now else 0
                cache.before = max(0, cache.before - (len(change.keys) - dropped))
        elif change.parents is not None:
            self._uses.stored(change.replica, change.keys, change.parents, self._clock())
            self.catch_up()

    def check(self) -> None:
        """Asserts the laws of all orders, and of the uses that wait."""
        self._uses.check()
        for cache in self._caches.values():
            cache.order.check()
            assert cache.before >= 0

    def _cache(self, replica: str, held: int, now: float) -> _Cache:
        """What is believed of its cache, from now on where that was nothing."""
        cache = self._caches.get(replica)
        if cache is None:
            cache = self._caches[replica] = _Cache(held, now)
        return cache

    def _take_up(self, use: Use, now: float) -> int:
        """The whole chain was used; returns how many look-ups it took to find its beginning."""
        replica, key, keys = use
        held = self._index.held_blocks(replica, Tier.HBM)
        if not self._index.holder_mask(keys[-1]) & self._index.bit(replica):
            return 0  # gone again
        cache = self._cache(replica, held, now)
        parts: list[Sequence[int]] = [keys]
        size = len(keys)
        while key:
            segment = cache.order.ending(key)
            before: int | None
            if segment is not None:
                # A chain may be scattered over the index's rows; what was known of it before takes one look-up.
                parts.append(segment.keys)
                before = self._index.parent(segment.head, replica) if segment.depth else 0
            else:
                stretch, before = self._index.stretch(key, replica)
                parts.append(array("Q", stretch.tobytes()))
            size += len(parts[-1])
            if before is None or not parts[-1] or size > held or len(parts) == MOST_PIECES:
                return len(parts)  # its beginning is not known any more, or it has none
            key = before
        path = array("Q")
        for part in reversed(parts):
            path.extend(part)
        cache.order.use(path, now)
        cache.order.shrink(max(cache.room, held))
        return len(parts)


def _chance(reuse: ReuseCurve, segment: Segment, now: float) -> float:
    """That a segment is used again where it is: who would, has gone to the peer that took it over."""
    return 0.0 if segment.given else reuse.chance(now - segment.at)
