"""In which order caches evict, and what that costs."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict

import pytest
from chain_support import chained

from gateway.placement import reuse
from gateway.placement.eviction_order import EvictionOrder
from gateway.placement.evictions import Evictions
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims, ReplicaView
from gateway.placement.reuse import PRIOR_CHANCE, ReuseCurve


class NaiveOrder:
    """Block by block."""

    def __init__(self) -> None:
        self.lru: OrderedDict[int, float] = OrderedDict()
        self.depths: dict[int, int] = {}
        self.given: set[int] = set()

    def held(self, keys: array[int]) -> int:
        return next((depth for depth, key in enumerate(keys) if key not in self.lru), len(keys))

    def use(self, keys: array[int], at: float) -> None:
        self.depths.update((key, depth) for depth, key in enumerate(keys))
        for key in reversed(keys):
            self.lru[key] = at
            self.lru.move_to_end(key)
        self.given -= set(keys)

    def give_up(self, keys: array[int], keep: int) -> None:
        held = self.held(keys)
        if not held or keys[held - 1] in self.given:
            return
        last = self.lru[keys[held - 1]]
        own = [key for key, at in self.lru.items() if at == last and key not in self.given]
        for key in reversed(own):
            if self.depths[key] >= keep:
                self.lru.move_to_end(key, last=False)
                self.given.add(key)

    def drop(self, gone: set[int]) -> int:
        before = len(self.lru)
        ends: set[tuple[float, bool]] = set()
        for key, at in list(self.lru.items()):
            segment = at, key in self.given
            if key not in gone:
                ends.add(segment)
            elif segment not in ends:
                del self.lru[key]
                self.given.discard(key)
        return before - len(self.lru)

    def shrink(self, blocks: int) -> None:
        while len(self.lru) > blocks:
            self.given.discard(self.lru.popitem(last=False)[0])


@pytest.mark.parametrize(("seed", "giving"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_order_is_that_of_an_lru_tails_first_and_what_was_given_up_before_all(seed, giving):
    rng = random.Random(seed)
    order, naive = EvictionOrder(), NaiveOrder()
    given = dropped = 0
    for step in range(900):
        # Few numbers, so that paths branch everywhere and come again.
        path = chained(*(rng.randrange(3) for _ in range(rng.randrange(12))))
        assert order.held(path) == naive.held(path)
        if giving and rng.random() < 0.3:
            keep = rng.choice((0, 0, 2))
            order.give_up(path, keep)
            naive.give_up(path, keep)
            given += bool(naive.given)
        else:
            order.use(path, float(step))
            naive.use(path, float(step))
        if rng.random() < 0.3:
            size = rng.randrange(80)
            order.shrink(size)
            naive.shrink(size)
        if rng.random() < 0.3:
            # The first to go, and others.
            gone = [*list(naive.lru)[: rng.randrange(9)], *rng.sample(list(naive.lru), min(len(naive.lru), 9))]
            count = naive.drop(set(gone))
            assert order.drop(gone) == count
            dropped += count
        order.check()
        flat = [(key, segment.at) for segment in order for key in reversed(segment.keys)]
        assert flat == list(naive.lru.items())
        assert {key for segment in order if segment.given for key in segment.keys} == naive.given
    assert (given > 100) is giving
    assert dropped > 1000


def test_a_segment_is_found_by_its_last_block_and_nothing_is_left_once_it_is_cleared():
    order = EvictionOrder()
    order.use(chained(1, 2, 3), 1.0)
    order.use(chained(1, 5), 2.0)
    rest = order.ending(chained(1, 2, 3)[-1])
    assert rest is not None
    assert (list(rest.keys), rest.depth) == (list(chained(1, 2, 3)[1:]), 1)
    assert order.ending(chained(1)[-1]) is None, "in the middle of the youngest"
    order.clear()
    order.check()
    assert (order.blocks, order.held(chained(1))) == (0, 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _view(**fields: object) -> ReplicaView:
    given = {"id": "a", "claims": Claims.REPORTS, "prefill_tokens_per_s": 1000.0, "capacity_blocks": 10}
    return ReplicaView(**(given | fields))


def test_blocks_for_which_there_is_room_are_free():
    evictions = Evictions(PrefixIndex(), Clock())
    assert evictions.price(_view(held_blocks=6), chained(1), 4, 0) == 0
    assert evictions.price(_view(held_blocks=6), chained(1), 5, 0) == 16 * PRIOR_CHANCE
    assert evictions.price(_view(held_blocks=6), chained(1), 4, 3) == 3 * 16 * PRIOR_CHANCE, "others come first"
    assert evictions.price(_view(held_blocks=6, capacity_blocks=0), chained(1), 50, 0) == 0, "of unknown size"
    assert evictions.price(_view(held_blocks=10), chained(1), 50, 0) == 10 * 16 * PRIOR_CHANCE, "no more than there are"


def test_what_is_computed_again_at_its_depth_costs_more_and_the_prompts_own_blocks_nothing():
    evictions = Evictions(PrefixIndex(), Clock())
    old, new = chained(*range(6)), chained(*range(10, 14))
    evictions.used(_view(), old)
    evictions.used(_view(), new)
    full = _view(held_blocks=10, attention=0.1)
    # Its two last blocks, which end at 6: tokens 64 to 96 of the path, 80 in the mean.
    assert evictions.price(full, chained(99), 2, 0) == pytest.approx(2 * 16 * PRIOR_CHANCE * (1 + 0.1 * 80))
    assert evictions.price(full, chained(*range(6), 99), 1, 0) == pytest.approx(
        16 * PRIOR_CHANCE * (1 + 0.1 * 3.5 * 16)
    ), "the end of the other one, though it is younger"
    evictions.check()


def test_what_was_there_before_goes_first_and_what_is_unknown_is_like_what_is_known():
    clock = Clock()
    evictions = Evictions(PrefixIndex(), clock)
    evictions.used(_view(held_blocks=4), chained(1, 2))
    full = _view(held_blocks=10, attention=0.1)
    assert evictions.price(full, chained(9), 4, 0) == pytest.approx(4 * 16 * PRIOR_CHANCE)
    deep = evictions.price(full, chained(9), 6, 0)
    # Two of the six placed since: every third of them is ours, so two thirds of a block, three times.
    assert deep == pytest.approx((4 + 2 * (1 + 0.1 * 16 * (2 - 1 / 3))) * 16 * PRIOR_CHANCE)


def test_what_a_peer_read_goes_first_and_costs_nothing_if_the_replica_yields():
    clock = Clock()
    evictions = Evictions(PrefixIndex(), clock)
    old, new = chained(*range(5)), chained(*range(10, 15))
    evictions.used(_view(), old)
    clock.now = 9.0
    evictions.used(_view(), new)
    full = _view(held_blocks=10)
    each = 16 * PRIOR_CHANCE
    evictions.fetched(full, new, 0)
    assert evictions.price(full, chained(99), 4, 0) == 4 * each, "its engine knows nothing of it"
    evictions.fetched(_view(yields=True), new, 2)
    assert evictions.price(full, chained(99), 3, 0) == 0
    assert evictions.price(full, chained(99), 4, 0) == each, "two blocks stay: the next is of the older prompt"
    assert evictions.price(full, new, 4, 0) == 4 * each, "they are not dropped for what comes after them"
    evictions.used(_view(), new)
    assert evictions.price(full, chained(99), 3, 0) == 3 * each, "used again"
    evictions.check()


def test_a_prompt_that_others_will_push_out_is_not_counted_on():
    evictions = Evictions(PrefixIndex(), Clock())
    old, new = chained(*range(6)), chained(*range(10, 18))
    evictions.used(_view(), old)
    evictions.used(_view(held_blocks=6), new)
    assert evictions.left(_view(held_blocks=6), old, 6, 8) == 2
    assert evictions.left(_view(held_blocks=6), old, 6, 4) == 6, "there is room for these"
    assert evictions.left(_view(held_blocks=6), new, 8, 8) == 8
    evictions.forget("a")
    assert evictions.left(_view(held_blocks=6), old, 6, 8) == 6


def _seen(curve: ReuseCurve, chats: int, turns: int, gap_s: float, begin_s: float = 0.0) -> None:
    """Conversations of that time that go on `turns` times, each `gap_s` after the turn before."""
    for turn in range(turns + 1):
        for chat in range(chats):
            keys = chained(int(begin_s) + chat, *range(turn + 1))
            curve.observe(keys, 4096, 0, 0.0, begin_s + turn * gap_s + chat * 1e-3)


def test_the_chance_of_reuse_falls_once_the_usual_gap_is_over():
    curve = ReuseCurve()
    assert curve.chance(0.0) == curve.chance(1e9) == PRIOR_CHANCE
    _seen(curve, 64, 4, 100.0)
    assert curve.chance(1.0) > 0.6
    assert curve.chance(90.0) > 0.6
    assert curve.chance(1000.0) < 0.1


def test_it_is_known_by_how_much_conversations_grow():
    curve = ReuseCurve()
    assert curve.growth == 0
    _seen(curve, 10, 3, 100.0)
    assert curve.growth == 3 * 4096, "a block a turn"
    curve.observe(chained(999), 4096, 0, 0.0, 1e3)
    assert curve.growth == 30 * 4096 / 11


def test_prompts_that_never_come_again_are_worth_nothing():
    curve = ReuseCurve()
    _seen(curve, 2000, 0, 1.0)
    assert curve.chance(0.0) < 0.02


def test_what_traffic_was_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """A year of conversations does not outweigh what came since: some multiples of `MEMORY` do."""
    monkeypatch.setattr(reuse, "MEMORY", 256)
    curve = ReuseCurve()
    for hour in range(50):
        _seen(curve, 64, 4, 100.0, 3600.0 * hour)
    grown = curve.growth
    assert curve.chance(1.0) > 0.6
    for number in range(5 * 256):
        curve.observe(chained(1_000_000 + number), 4096, 0, 0.0, 1e6 + number)
    assert curve.chance(1.0) < 0.1
    assert curve.growth < grown / 10
    for hour in range(4):
        _seen(curve, 64, 4, 100.0, 1e7 + 3600.0 * hour)
    assert curve.chance(1.0) > 0.6
