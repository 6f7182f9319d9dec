"""How many copies traffic needs: shares against a walk block by block, and the bound."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gateway.duplication.demand import Held, Load, Traffic
from gateway.duplication.ledger import Ledger
from gateway.duplication.prefixes import cut
from gateway.duplication.report import Reporter
from gateway.placement.index import PrefixIndex
from gateway.placement.settings import PlacementSettings
from kvstore.messages import ROOT_PARENT, Tier


class Forest:
    """Random chains on random replicas, in an index and as a plain table: key -> (parent, holders)."""

    def __init__(self, seed: int, replicas: int = 5) -> None:
        rng = random.Random(seed)
        self.names = [f"replica-{at}" for at in range(replicas)]
        self.index = PrefixIndex()
        self.ledger = Ledger(self.index)
        self.blocks: dict[int, tuple[int, set[str]]] = {}
        for name in self.names:
            self.index.add_replica(name)
            self.ledger.register(name, "m", 10, 16)
        chains = [[rng.getrandbits(63) | 1 for _ in range(30)]]
        for _ in range(12):
            base = rng.choice(chains[:3])
            chains.append(base[: rng.randrange(5, len(base))] + [rng.getrandbits(63) | 1 for _ in range(20)])
        for _ in range(60):
            chain, name = rng.choice(chains), rng.choice(self.names)
            chain = chain[: rng.randrange(1, len(chain) + 1)]
            parents = [ROOT_PARENT, *chain[:-1]]
            self.index.store(name, Tier.HBM, chain, parents)
            for key, parent in zip(chain, parents, strict=True):
                self.blocks.setdefault(key, (parent, set()))[1].add(name)

    def arrays(self, least: int) -> tuple[np.ndarray, np.ndarray, list[tuple[int, np.ndarray]], list[int]]:
        """Keys, links and holders of the blocks with so many holders, as a demand is given them."""
        keys = [key for key, (_, holders) in self.blocks.items() if len(holders) >= least]
        links = [keys.index(parent) if (parent := self.blocks[key][0]) in keys else -1 for key in keys]
        masks = [sum(self.index.bit(name) for name in self.blocks[key][1]) for key in keys]
        return np.array(keys, np.uint64), np.array(links, np.int64), [(0, np.array(masks, np.uint64))], keys

    def up(self, key: int) -> list[int]:
        """A block and all before it."""
        found = []
        while key != ROOT_PARENT:
            found.append(key)
            key = self.blocks[key][0]
        return found


@pytest.mark.parametrize("seed", range(3))
def test_the_prompts_that_are_held_through_a_block_are_its_share(seed: int) -> None:
    forest = Forest(seed)
    keys, links, holders, plain = forest.arrays(1)
    through = dict.fromkeys(plain, 0)
    total = 0
    for key, (_, names) in forest.blocks.items():
        followed = {name for parent, others in forest.blocks.values() if parent == key for name in others}
        total += len(names - followed)
        for above in forest.up(key):
            through[above] += len(names - followed)
    assert Held().shares(keys, links, holders).tolist() == pytest.approx([through[key] / total for key in plain])


@pytest.mark.parametrize("seed", range(3))
def test_a_block_has_the_share_of_the_nearest_counted_one_above(seed: int) -> None:
    forest = Forest(seed)
    rng = random.Random(seed)
    keys, links, holders, plain = forest.arrays(2)
    counts = {key: rng.randrange(1, 50) for key in rng.sample(sorted(forest.blocks), 40)}
    expected = [next((counts[each] / 64 for each in forest.up(key) if each in counts), 0.0) for key in plain]
    assert Traffic(counts, 64).shares(keys, links, holders).tolist() == pytest.approx(expected)
    assert set(Traffic({}, 0).shares(keys, links, holders).tolist()) == {0.0}
    nothing = np.zeros(0, np.int64)
    for demand in (Traffic(counts, 64), Held()):
        assert demand.shares(nothing.astype(np.uint64), nothing, []).size == 0


def test_needed_is_what_fills_replicas_up_to_the_bound() -> None:
    load = Load(PlacementSettings(eps=1.0, floor_sequences=2.0), weight=1.0)
    shares = np.array([0.0, 0.1, 0.25, 0.5, 1.0])
    assert load.needed(shares, 8).tolist() == [1] * 5, "nothing has been seen yet"
    load.observe(2)
    assert load.needed(shares, 8).tolist() == [1] * 5, "an idle fleet needs one copy of everything"
    load.observe(800)
    assert load.needed(shares, 8).tolist() == [1, 1, 1, 2, 4]
    assert load.needed(shares, 2).tolist() == [1, 1, 1, 1, 1]
    assert load.needed(shares, 1).tolist() == [1] * 5


def test_load_is_a_moving_average() -> None:
    load = Load(weight=0.25)
    seen = []
    for sequences in (8, 4, 0, 16, 16, 16):
        load.observe(sequences)
        seen.append(load.sequences)
    assert seen[:5] == [8.0, 6.0, 4.0, 7.0, 9.25]
    load.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by", ["requests", "held"])
def test_useful_and_wasted_by_the_definition(seed: int, by: str) -> None:
    """min(c, k) - 1 copies of every prefix are useful, k being what the share of its last block needs."""
    forest = Forest(seed)
    rng = random.Random(seed)
    counts = {key: rng.randrange(1, 64) for key in rng.sample(sorted(forest.blocks), 60)}
    demand = Traffic(counts, 64) if by == "requests" else Held()
    load = Load(PlacementSettings(eps=0.2), weight=1.0)
    load.observe(200)
    top, useful = forest.ledger.shared(10_000, demand, load)
    shares = dict(zip((arrays := forest.arrays(demand.least))[3], demand.shares(*arrays[:3]).tolist(), strict=True))
    for prefix in top:
        needed = int(load.needed(np.array([shares[prefix.key]]), len(forest.names))[0])
        size = prefix.tokens // 16 * 10
        assert prefix.needed == needed
        assert prefix.useful_bytes == (min(prefix.copies, needed) - 1) * size
        assert prefix.useful_bytes + prefix.wasted_bytes == prefix.excess_bytes == (prefix.copies - 1) * size
    assert sum(prefix.useful_bytes for prefix in top) == useful
    assert 0 < useful < forest.ledger.excess
    assert forest.ledger.shared(2, demand, load).useful_bytes == useful, "of all, however few are listed"
    assert forest.ledger.shared().useful_bytes == 0, "without traffic no second copy is needed"


def test_a_forest_stays_as_it_was_while_the_index_changes() -> None:
    """What takes long is done aside, on copies; meanwhile blocks and whole replicas may go."""
    forest, load = Forest(1), Load()
    (before,) = forest.ledger.forests(1)
    expected = forest.ledger.shared(10_000, Held(), load)
    for name in forest.names[1:]:
        forest.index.remove_replica(name)
    forest.index.add_replica("another")
    found = forest.ledger.named([cut(before, 10_000, Held(), load, 5)], 10_000)
    assert found.useful_bytes == expected.useful_bytes
    assert {each.key: (each.holders, each.excess_bytes) for each in found.top} == {
        each.key: (each.holders, each.excess_bytes) for each in expected.top
    }


async def test_a_report_made_aside_is_the_same() -> None:
    forest, load = Forest(2), Load(weight=1.0)
    load.observe(100)
    reporter = Reporter(forest.ledger, load=load)
    assert await reporter.report_aside(50) == reporter.report(50)
