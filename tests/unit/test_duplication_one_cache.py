"""One endless cache and one of bounded size, against plain ones: exact, but for what was used very long ago."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict

import pytest

from gateway.duplication.one_cache import OneCache
from kvstore.identity import Namespace, token_keys

ROOT = Namespace("m").root(0)


class Plain:
    """The same with a set and a dict, block by block."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.lru: OrderedDict[int, None] = OrderedDict()

    def feed(self, keys: list[int], usable: int, capacity: int) -> tuple[int, int]:
        endless = next((at for at, key in enumerate(keys) if key not in self.seen), len(keys))
        bounded = next((at for at, key in enumerate(keys) if key not in self.lru), len(keys))
        self.seen |= set(keys)
        for key in reversed(keys):
            self.lru[key] = None
            self.lru.move_to_end(key)
        while len(self.lru) > capacity:
            self.lru.popitem(last=False)
        return min(endless, usable), min(bounded, usable)


def conversations(rng: random.Random, count: int, recent: int = 30) -> list[array[int]]:
    """Prompts that grow from others' beginnings, as chats and documents do."""
    prompts = [[rng.randrange(1 << 30) for _ in range(40)]]
    for _ in range(count):
        base = rng.choice(prompts[-recent:])
        grown = base[: rng.randrange(len(base) + 1)] + [rng.randrange(1 << 30) for _ in range(rng.randrange(60))]
        prompts.append(grown[:150])
    return [token_keys(ROOT, [token for unit in prompt for token in [unit] * 16]) for prompt in prompts]


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_a_plain_cache_as_long_as_all_fits(seed: int) -> None:
    rng = random.Random(seed)
    cache, plain = OneCache(1 << 16), Plain()
    capacity = rng.choice([7, 100, 400, 3_000])
    hits = 0.0
    for at, keys in enumerate(conversations(rng, 400)):
        if rng.random() < 0.02:
            capacity = rng.choice([7, 100, 400, 3_000])
        usable = rng.choice([len(keys), max(0, len(keys) - 1), len(keys) // 2])
        found = cache.feed(keys, usable, capacity)
        assert (found.endless, found.bounded) == plain.feed(list(keys), usable, capacity), at
        hits += found.bounded
        if at % 50 == 0:
            cache.check()
    cache.check()
    assert cache.share == 1.0
    assert len(cache) == len(plain.seen)
    assert hits > 0


def test_without_a_capacity_nothing_is_said_of_a_bounded_cache() -> None:
    cache = OneCache(1 << 10)
    keys = token_keys(ROOT, range(64))
    assert cache.feed(keys, 4) == (0.0, None)
    assert cache.feed(keys, 4) == (4.0, None)
    assert cache.feed(keys, 3, 2) == (3.0, 3)
    assert cache.feed(keys, 3, 2) == (3.0, 2), "the tail was evicted"
    assert cache.feed(array("Q"), 0, 100) == (0.0, 0.0)
    cache.check()


def test_a_sample_tells_the_rates_within_its_bound() -> None:
    """A sixteenth of the keys fit: the bounded cache is exact, the endless one's rate within two points."""
    rng = random.Random(1)
    sampled, plain = OneCache(1 << 13), Plain()
    sums = [0.0] * 4
    blocks = 0
    for keys in conversations(rng, 4_000, recent=400):
        found = sampled.feed(keys, len(keys), 4_000)
        exact = plain.feed(list(keys), len(keys), 4_000)
        sums = [total + each for total, each in zip(sums, (*found, *exact), strict=True)]
        blocks += len(keys)
        assert found.bounded == exact[1]
        assert len(sampled) <= 1 << 13
    sampled.check()
    assert sampled.share <= 1 / 16
    endless, bounded, exact_endless, _ = (total / blocks for total in sums)
    assert endless == pytest.approx(exact_endless, abs=0.02)
    assert 0.2 < bounded < exact_endless - 0.03, "both rates mean something here"
    assert sampled.nbytes < 40 * (1 << 13), "as its docstring says"
