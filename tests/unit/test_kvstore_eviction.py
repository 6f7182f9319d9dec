"""The eviction order against sorting."""

from __future__ import annotations

import random

import pytest

from kvstore.eviction import EvictionOrder


def test_shared_goes_first_then_least_recently_used() -> None:
    order = EvictionOrder()
    order.put(1, shared=False, used=3)
    order.put(2, shared=False, used=2)
    order.put(3, shared=True, used=9)
    order.put(4, shared=True, used=8)
    order.put(2, shared=False, used=4)
    order.discard(4)
    order.discard(5)
    order.check()
    assert (len(order), 4 in order, 3 in order) == (3, False, True)
    assert [order.pop() for _ in range(4)] == [3, 1, 2, None]


@pytest.mark.parametrize("seed", range(3))
def test_stress_against_sorting(seed: int) -> None:
    rng = random.Random(seed)
    order, naive = EvictionOrder(), dict[int, tuple[bool, int, int]]()
    for step in range(2_000):
        slot = rng.randrange(40)
        action = rng.choices(("put", "discard", "pop", "clear"), (60, 20, 25, 0.1))[0]
        if action == "put":
            shared, used = rng.random() < 0.3, rng.randrange(step + 1)
            order.put(slot, shared=shared, used=used)
            naive[slot] = (not shared, used, slot)
        elif action == "discard":
            order.discard(slot)
            naive.pop(slot, None)
        elif action == "pop":
            first = min(naive.values(), default=None)
            assert order.pop() == (first and naive.pop(first[2])[2])
        else:
            order.clear()
            naive.clear()
        order.check()
        assert len(order) == len(naive) and all(slot in order for slot in naive)
