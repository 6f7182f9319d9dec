"""The parts of the simulated fleet against naive twins of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from replay_support import LLAMA

from gateway.replay.caches import Caches, match
from gateway.replay.hashing import Ring, stable_hash
from gateway.replay.load import Load, Task
from gateway.replay.physics import read_physics
from gateway.replay.result import percentile


class NaiveCache:
    """Blocks of one replica, the next to go first, each with the prompt that used it last; found by looking."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: list[int] = []
        self.users: dict[int, int] = {}
        self.prompts = 0

    def store(self, chain: list[int]) -> None:
        self.prompts += 1
        for block in reversed(chain[: self.capacity]):
            if block in self.order:
                self.order.remove(block)
            self.order.append(block)
            self.users[block] = self.prompts
        del self.order[: max(0, len(self.order) - self.capacity)]

    def give_up(self, blocks: list[int]) -> None:
        alone = []
        while blocks and self.users[blocks[-1]] == self.users[[*alone, blocks[-1]][0]]:
            alone.append(blocks.pop())
        for block in alone:
            self.users[block] = 0
        self.order = alone + [block for block in self.order if block not in alone]

    def match(self, chain: list[int]) -> int:
        return next((i for i, block in enumerate(chain) if block not in self.order), len(chain))


@pytest.mark.parametrize("seed", range(5))
def test_caches_are_lru_with_tails_first_and_what_was_given_up_before_all(seed: int) -> None:
    rng = random.Random(seed)
    caches, naive = Caches(3, 12, 200), [NaiveCache(12) for _ in range(3)]
    trie = {(): -1}
    prompts: list[list[int]] = []
    given = 0
    for now in range(400):
        names = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 7)))
        chain = [trie.setdefault(names[: n + 1], len(trie)) for n in range(len(names))]
        prompts.append(chain)
        for at, twin in enumerate(naive):
            assert match(caches.held, chain, 3)[at] == twin.match(chain)
        replica = rng.randrange(3)
        if reach := naive[replica].match(chain) * (rng.random() < 0.4):
            keep = rng.randrange(2)
            order = list(naive[replica].order)
            caches.give_up(replica, chain[keep:reach])
            naive[replica].give_up(chain[keep:reach])
            given += order != naive[replica].order
            chain = prompts[rng.randrange(len(prompts))]
        before = set(naive[replica].order)
        stored = caches.store(replica, chain, float(now))
        naive[replica].store(chain)
        after = set(naive[replica].order)
        assert set(stored.added) - set(stored.evicted) == after - before
        assert set(stored.evicted) - set(stored.added) == before - after
        caches.check()
    assert given > 20
    assert caches.copies == sum(len(twin.order) for twin in naive)


def test_a_prompt_longer_than_a_cache_keeps_its_head() -> None:
    caches = Caches(1, 3, 5)
    caches.store(0, [0, 1, 2, 3, 4], 0.0)
    assert match(caches.held, [0, 1, 2, 3, 4], 1) == [3]


def test_what_a_peer_has_read_goes_first_but_what_others_use() -> None:
    caches = Caches(2, 6, 20)
    caches.store(0, [0, 1, 2, 3], 1.0)
    caches.store(0, [10, 11], 2.0)
    caches.give_up(0, [1, 2, 3])
    assert caches.store(0, [12], 3.0).evicted == [3]
    assert caches.store(0, [13, 14], 4.0).evicted == [2, 1]
    assert caches.store(0, [15], 5.0).evicted == [0], "from here on by age"
    caches.store(1, [0, 1, 2, 3], 1.0)
    caches.store(1, [0, 1], 2.0)
    caches.give_up(1, [])
    caches.give_up(1, [0, 1, 2, 3])
    caches.store(1, [10, 11, 12, 13], 3.0)
    assert match(caches.held, [0, 1, 2, 3], 2)[1] == 2, "the shorter prompt has used its part since"


@pytest.mark.parametrize("seed", range(5))
def test_load_is_what_a_list_of_requests_says(seed: int) -> None:
    rng = random.Random(seed)
    load, tasks, now = Load(3), [], 0.0
    for _ in range(300):
        now += rng.expovariate(1.0)
        begin = now + rng.expovariate(0.3)
        task = Task(rng.randrange(3), begin, rng.randrange(100), rng.randrange(100, 200), begin + rng.expovariate(0.2))
        if late := rng.random() < 0.3:
            load.add_later(now + 0.5, task)
        else:
            load.add(task)
        tasks.append((now + 0.5 * late, task))
        now += rng.expovariate(1.0)
        load.advance(now)
        load.check()
        known = [each for at, each in tasks if at <= now]
        for replica in range(3):
            mine = [each for each in known if each.replica == replica and each.end > now]
            waiting = [each for each in mine if each.prefill_end > now]
            assert load.outstanding[replica] == len(mine)
            assert load.context[replica] == sum(each.context for each in mine)
            assert load.queued_tokens[replica] == sum(each.new for each in waiting)
            assert load.decoding[replica] == len(mine) - len(waiting)


def test_a_ring_walk_meets_every_replica_once_and_is_the_same_everywhere() -> None:
    ring = Ring(5)
    orders = {tuple(ring.walk(stable_hash(key))) for key in range(200)}
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders) and len(orders) > 50
    assert [next(Ring(5).walk(stable_hash(key))) for key in range(8)] == [
        next(ring.walk(stable_hash(key))) for key in range(8)
    ]


def test_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    for count in (1, 2, 7, 100):
        values = sorted(rng.random() for _ in range(count))
        for percent in (0, 50, 90, 99, 100):
            assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-12)


def test_physics_of_a_model_described_by_its_config() -> None:
    read = read_physics("llama-3-8b")
    assert read.token_bytes == LLAMA.token_bytes and read.pair_flops == LLAMA.pair_flops
    assert read.weight_flops == pytest.approx(LLAMA.weight_flops, rel=0.15), "8e9 is round, embeddings are no work"
    assert read_physics("llama-3.1-8b", flops_per_s=300e12).prefill_s(1_000, 0) == 2 * LLAMA.prefill_s(1_000, 0)


def test_decoding_takes_its_share_of_a_replica() -> None:
    assert LLAMA.decode_share(0, 0) == 0
    assert LLAMA.decode_share(1, 0) == pytest.approx(16e9 / 4.8e12 / 0.02)
    assert LLAMA.decode_share(99, 10**9) == 0.8
