"""What reports say of uses, and that gateways which learn of each other's so know a cache as well as one alone."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
from chain_support import chained

from gateway.placement import evictions as evictions_module
from gateway.placement import reported_uses
from gateway.placement.evictions import Evictions
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims, ReplicaView
from gateway.placement.reported_uses import WAIT_S, ReportedUses, Use
from kvstore.messages import ROOT_PARENT, Tier


def _parents(keys: array[int]) -> array[int]:
    return array("Q", [ROOT_PARENT, *keys[:-1]])


class Chain(NamedTuple):
    """One that goes on: when it was handed on (or first seen), its replica, the block before it, all its blocks, and
    how many of them were handed on."""

    at: float
    replica: str
    before: int
    blocks: list[int]
    told: int


class NaiveUses:
    """All chains in a list, in the order in which their turn comes."""

    def __init__(self) -> None:
        self.chains: list[Chain] = []

    def stored(self, replica: str, keys: list[int], parents: list[int], at: float) -> None:
        for key, parent in zip(keys, parents, strict=True):
            for chain in self.chains:
                if chain.replica == replica and chain.blocks[-1] == parent:
                    chain.blocks.append(key)
                    break
            else:
                while (
                    len(self.chains) == reported_uses.MOST_CHAINS
                    or sum(len(chain.blocks) - chain.told for chain in self.chains) >= reported_uses.MOST_BLOCKS
                ):
                    self.chains.remove(next((chain for chain in self.chains if chain.told), self.chains[0]))
                self.chains.append(Chain(at, replica, parent, [key], 0))

    def next(self, now: float) -> tuple[str, int, list[int]] | None:
        due = [chain for chain in self.chains if chain.told and chain.at <= now - WAIT_S]
        for chain in due + [chain for chain in self.chains if not chain.told]:
            self.chains.remove(chain)
            if len(chain.blocks) > chain.told:
                self.chains.append(chain._replace(at=now, told=len(chain.blocks)))
                return chain.replica, [chain.before, *chain.blocks][chain.told], chain.blocks[chain.told :]
        return None

    def forget(self, replica: str) -> None:
        self.chains = [chain for chain in self.chains if chain.replica != replica]


@pytest.mark.parametrize("seed", range(4))
def test_uses_are_those_of_a_naive_twin(seed, monkeypatch):
    monkeypatch.setattr(reported_uses, "MOST_CHAINS", 12)
    monkeypatch.setattr(reported_uses, "MOST_BLOCKS", 20)
    rng = random.Random(seed)
    uses, naive = ReportedUses(), NaiveUses()
    now, fresh, handed_on = 0.0, 1, 0
    ends: list[int] = []
    for _ in range(2000):
        now += rng.random() / 4
        replica = rng.choice("ab")
        keys: list[int] = []
        parents: list[int] = []
        for _ in range(rng.randrange(1, 4)):  # chains in one report: on from an end, from anywhere, or from the root
            before = rng.choice([*ends[-6:], rng.randrange(1, fresh + 1), ROOT_PARENT])
            for _ in range(rng.randrange(1, 5)):
                keys.append(fresh)
                parents.append(before)
                before, fresh = fresh, fresh + 1
            ends.append(before)
        uses.stored(replica, np.array(keys, np.uint64), np.array(parents, np.uint64), now)
        naive.stored(replica, keys, parents, now)
        if rng.random() < 0.02:
            uses.forget(replica)
            naive.forget(replica)
        assert len(uses) == len(naive.chains)
        for _ in range(rng.randrange(6)):
            found = uses.next(now)
            assert (found and (found.replica, found.before, found.keys.tolist())) == naive.next(now)
            handed_on += found is not None
        uses.check()
    assert handed_on > 2000


def test_a_chain_is_handed_on_at_once_and_as_it_goes_on_once_a_second():
    uses = ReportedUses()

    def stored(key: int, at: float) -> None:
        uses.stored("a", np.array([key], np.uint64), np.array([key - 1], np.uint64), at)

    stored(1, 0.0)
    assert uses.next(0.0) == Use("a", 0, array("Q", [1]))
    for key in range(2, 6):
        stored(key, key / 10)
    assert uses.next(0.5) is None
    assert uses.next(1.0) == Use("a", 1, array("Q", [2, 3, 4, 5]))
    assert uses.next(9.0) is None
    assert len(uses) == 0, "it went on no more"
    uses.check()


def test_a_chain_that_is_stored_again_is_one_use():
    uses = ReportedUses()
    uses.stored("a", np.array([1, 2], np.uint64), np.array([0, 1], np.uint64), 0.0)
    uses.stored("a", np.array([2], np.uint64), np.array([1], np.uint64), 0.5)
    uses.check()
    assert len(uses) == 1
    assert uses.next(0.5) == Use("a", 1, array("Q", [2])), "the first one, which ended alike, is in it"
    assert uses.next(0.5) is None
    uses.check()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """One replica's LRU, block by block, which tells all gateways what it stores and evicts, a chain from its beginning
    on; with `rng` in two pieces."""

    def __init__(self, capacity: int, rng: random.Random | None = None) -> None:
        self.capacity = capacity
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.gateways: list[Gateway] = []
        self.rng = rng

    def run(self, keys: array[int]) -> None:
        stored = [at for at, key in enumerate(keys) if key not in self.lru]
        for key in reversed(keys):
            self.lru[key] = None
            self.lru.move_to_end(key)
        gone = array("Q", [self.lru.popitem(last=False)[0] for _ in range(len(self.lru) - self.capacity)])
        parents = _parents(keys)
        cut = self.rng.randrange(len(stored) + 1) if self.rng is not None else len(stored)
        for gateway in self.gateways:
            gateway.index.remove("a", Tier.HBM, gone)
            for part in (stored[:cut], stored[cut:]):
                told = array("Q", [keys[at] for at in part])
                gateway.index.store("a", Tier.HBM, told, array("Q", [parents[at] for at in part]))


class Gateway:
    """What one gateway believes of the engine's cache."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.index = PrefixIndex()
        self.index.add_replica("a")
        self.evictions = Evictions(self.index, clock)
        self.index.add_listener(self.evictions)
        engine.gateways.append(self)

    @property
    def view(self) -> ReplicaView:
        return ReplicaView(
            id="a",
            claims=Claims.REPORTS,
            prefill_tokens_per_s=1000.0,
            capacity_blocks=self.engine.capacity,
            held_blocks=self.index.held_blocks("a", Tier.HBM),
            attention=0.1,
            yields=True,
        )

    @property
    def order(self) -> list[int]:
        """Blocks, the first to go first."""
        self.evictions.catch_up()
        self.evictions.check()
        cache = self.evictions._caches["a"]
        return [key for segment in cache.order for key in reversed(segment.keys)]

    def place(self, keys: array[int]) -> None:
        self.evictions.used(self.view, keys)
        self.engine.run(keys)

    def price(self, new: int) -> float:
        self.evictions.catch_up()
        return self.evictions.price(self.view, chained(-1), new, 0)


@pytest.mark.parametrize(("seed", "share"), [(0, 0.5), (1, 0.5), (2, 0.5), (3, 1.0), (4, 0.0)])
def test_two_gateways_know_the_order_of_a_cache_whoever_placed_what(seed, share, monkeypatch):
    monkeypatch.setattr(evictions_module, "LOOK_UPS", 9)
    rng = random.Random(seed)
    clock = Clock()
    engine = Engine(60, rng)
    one, other = Gateway(engine, clock), Gateway(engine, clock)
    priced = 0
    for step in range(600):
        clock.now += 2.0
        # Few numbers, so that prompts branch everywhere and come again; the last is new, as an answer is.
        keys = chained(*(rng.randrange(3) for _ in range(rng.randrange(9))), 1000 + step)
        (one if rng.random() < share else other).place(keys)
        clock.now += 2.0
        assert one.order == other.order == list(engine.lru), "the very LRU"
        for new in (3, 20):
            # Chances are learned by each from its own; blocks and depths are the same.
            prices = [each.price(new) / each.evictions.reuse.chance(0.0) for each in (one, other)]
            priced += prices[0] > 0
    assert priced > 500


def test_gateways_that_share_what_they_learned_price_alike():
    clock = Clock()
    engine = Engine(60)
    gateways = [Gateway(engine, clock), Gateway(engine, clock)]
    gateways[1].evictions.reuse = gateways[0].evictions.reuse
    for turn in range(40):
        clock.now += 2.0
        gateways[turn % 2].place(chained(turn % 5, *range(turn // 5), 1000 + turn))
    clock.now += 2.0
    for new in (5, 25, 50):
        assert gateways[0].price(new) == pytest.approx(gateways[1].price(new)) != 0


def test_what_a_snapshot_tells_was_not_used_just_now():
    clock = Clock()
    gateway = Gateway(Engine(10), clock)
    keys = chained(1, 2, 3, 4)
    gateway.index.store("a", Tier.HBM, keys, _parents(keys), snapshot=True)
    clock.now = 5.0
    gateway.evictions.catch_up()
    assert gateway.evictions._caches == {}
    longer = chained(1, 2, 5)
    gateway.index.store("a", Tier.HBM, longer[2:], longer[1:2])
    assert set(gateway.order) == set(longer), "of that one it was used"
    cache = gateway.evictions._caches["a"]
    assert (cache.before, cache.since) == (5, 5.0), "at most: the price takes what the order has off"


def test_the_report_of_an_own_placement_changes_nothing_but_when_it_was_used():
    clock = Clock()
    engine = Engine(20)
    gateway = Gateway(engine, clock)
    for number in range(3):
        clock.now += 5.0
        gateway.evictions.used(gateway.view, chained(1, 2, *range(10 * number, 10 * number + 4)))
    before = [(list(segment.keys), segment.depth) for segment in gateway.evictions._caches["a"].order]
    clock.now += 5.0
    for number in range(3):
        engine.run(chained(1, 2, *range(10 * number, 10 * number + 4)))
    clock.now += 5.0
    order = gateway.order
    assert order == list(engine.lru)
    cache = gateway.evictions._caches["a"]
    assert [(list(segment.keys), segment.depth) for segment in cache.order] == before
    assert {segment.at for segment in cache.order} == {clock.now - 5.0}
    assert cache.order.blocks == 2 + 3 * 4


def test_an_answer_takes_room_and_stands_after_its_prompt():
    clock = Clock()
    engine = Engine(10)
    gateway = Gateway(engine, clock)
    gateway.place(chained(1, 2, 3))
    for length in range(4, 7):
        engine.run(chained(*range(1, length + 1)))  # block by block
    clock.now = 2.0
    gateway.place(chained(7, 8))
    clock.now = 4.0
    assert gateway.order == [*reversed(chained(1, 2, 3, 4, 5, 6)), *reversed(chained(7, 8))]
    assert len(gateway.evictions._caches["a"].order.ending(chained(*range(1, 7))[-1])) == 6, "one prompt"


def test_what_is_evicted_is_dropped_whosever_turn_it_was():
    clock = Clock()
    gateway = Gateway(Engine(20), clock)
    there = chained(90, 91)
    gateway.index.store("a", Tier.HBM, there, _parents(there), snapshot=True)
    old, new = chained(1, 2, 3), chained(7, 8, 9)
    for keys in (old, new):
        clock.now += 2.0
        gateway.place(keys)
    cache = gateway.evictions._caches["a"]
    assert (gateway.order, cache.before) == ([*reversed(old), *reversed(new)], 2)
    gateway.index.remove("a", Tier.HBM, [*reversed(new[1:]), there[1]])
    assert (gateway.order, cache.before) == ([*reversed(old), new[0]], 1)
    gateway.index.remove("a", Tier.HBM, [*reversed(old), new[0]])
    assert (gateway.order, cache.before) == ([], 1)
    gateway.place(old)
    gateway.index.clear("a")
    assert gateway.order == [*reversed(old)], "with the reports it is only not known"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_chain_that_is_not_known_whole_is_no_use(lost):
    """Its block number `lost` is not there."""
    gateway = Gateway(Engine(10), Clock())
    keys = chained(1, 2, 3, 4)
    there = [at for at in range(4) if at != lost]
    parents = _parents(keys)
    gateway.index.store("a", Tier.HBM, [keys[at] for at in there], [parents[at] for at in there])
    gateway.evictions.check()
    assert gateway.order == [*reversed(keys[:lost])], "what came before it was"


def test_parents_that_lead_in_a_circle_end():
    clock = Clock()
    gateway = Gateway(Engine(10), clock)
    gateway.index.store("a", Tier.HBM, [5, 6, 7], [7, 5, 6])
    clock.now = 2.0
    gateway.evictions.catch_up()
    assert gateway.evictions._caches["a"].order.blocks == 0


def test_a_replica_that_left_leaves_no_uses():
    clock = Clock()
    gateway = Gateway(Engine(10), clock)
    keys = chained(1, 2, 3)
    gateway.index.store("a", Tier.HBM, keys, _parents(keys))
    gateway.index.remove_replica("a")
    clock.now = 2.0
    gateway.evictions.catch_up()
    gateway.evictions.check()
    assert gateway.evictions._caches == {}


@pytest.mark.parametrize("seed", range(4))
def test_chains_that_are_none_do_no_harm(seed):
    """Reports in which a block comes after one block and then after another, which no chain of hashes can be."""
    rng = random.Random(seed)
    clock = Clock()
    gateway = Gateway(Engine(40), clock)
    index, evictions = gateway.index, gateway.evictions
    blocks = 0
    for _ in range(3000):
        clock.now += rng.random()
        keys = rng.sample(range(1, 60), rng.randrange(1, 9))
        match rng.randrange(5):
            case 0:
                index.remove("a", Tier.HBM, rng.sample(range(1, 60), 20))
            case 1:
                evictions.used(gateway.view, array("Q", keys))
            case 2:
                evictions.fetched(gateway.view, array("Q", keys), rng.randrange(3))
            case _:
                parents = [rng.randrange(60), *keys[:-1]] if rng.random() < 0.8 else rng.sample(range(60), len(keys))
                index.store("a", Tier.HBM, keys, parents)
        gateway.price(rng.randrange(9))
        if (cache := evictions._caches.get("a")) is not None:
            assert cache.order.blocks == sum(len(segment.keys) for segment in cache.order)
            blocks += cache.order.blocks
    assert blocks
