"""What it costs to make room in a replica's cache."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from gateway.placement.eviction_order import EvictionOrder, Segment
from gateway.placement.holders import Change
from gateway.placement.placement import ReplicaView
from gateway.placement.reuse import ReuseCurve
from kvstore.messages import Tier

END_S = 1.0
"""For so long a price may be used again: what stands at the end of an order has been idle for much longer."""


class _Cache:
    """What is believed of one replica's cache: the order of what was placed there, after `before` blocks that are older
    than the first of it, which came at `since`."""

    __slots__ = ("before", "end", "order", "since")

    def __init__(self, before: int, since: float) -> None:
        self.order = EvictionOrder()
        self.before = before
        self.since = since
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
    effort of computing it again at its depth. Which blocks go is known from this gateway's own placements
    (`EvictionOrder`), and how many from reports: an order is no longer than what the replica holds and was promised.
    Of what it holds beyond, that which was there before goes first; the rest is taken to be of the same ages as what
    was placed, so that the order is a sample of the cache.

    Owns an order for each replica and the curve of all, and listens to the index. Only `used`, `answered`, `fetched`
    and `forget` change what is believed; the other questions drop what reports say has gone. Memory: 8 bytes for each
    block that a replica has room for, and about 10 MB of the curve's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.reuse = ReuseCurve()
        self._clock = clock
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

    def used(self, view: ReplicaView, blocks: Sequence[int]) -> Segment | None:
        """A prompt with these whole blocks is placed on `view`; what is returned is for `answered`."""
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
            return None
        cache = self._caches.get(view.id)
        if cache is None:
            cache = self._caches[view.id] = _Cache(view.held_blocks, now)
        segment = cache.order.use(blocks[: view.capacity_blocks], now)
        cache.order.shrink(view.capacity_blocks)
        return segment

    def answered(self, replica: str, segment: Segment, blocks: int) -> None:
        """The engine wrote so many whole blocks after a prompt."""
        if (cache := self._caches.get(replica)) is not None:
            cache.order.answered(segment, blocks)

    def fetched(self, view: ReplicaView, blocks: Sequence[int], keep: int) -> None:
        """A peer reads these blocks from `view`, which then gives them up, but for the first `keep`."""
        if view.yields and (cache := self._caches.get(view.id)) is not None:
            cache.order.give_up(blocks, keep)

    def forget(self, replica: str) -> None:
        """Its cache is empty, or it left."""
        self._caches.pop(replica, None)

    def replica_added(self, replica: str, bit: int) -> None:
        """Index listener: nothing is known of it yet."""

    def replica_removed(self, replica: str, bit: int) -> None:
        """Index listener: it left."""
        self.forget(replica)

    def holders_changed(self, change: Change) -> None:
        """Index listener: what a replica loses is first what it had before."""
        if not change.gained and change.tier is Tier.HBM:
            cache = self._caches.get(change.replica)
            if cache is not None:
                cache.before = max(0, cache.before - len(change.keys))

    def check(self) -> None:
        """Asserts the laws of all orders."""
        for cache in self._caches.values():
            cache.order.check()
            assert cache.before >= 0


def _chance(reuse: ReuseCurve, segment: Segment, now: float) -> float:
    """That a segment is used again where it is: who would, has gone to the peer that took it over."""
    return 0.0 if segment.given else reuse.chance(now - segment.at)
