"""HashRing: order, weights, membership."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.placement.ring import HashRing


def _ring(count: int) -> HashRing:
    ring = HashRing()
    for i in range(count):
        ring.add(f"replica-{i}")
    return ring


def test_order_lists_every_replica_once_and_is_the_same_in_every_ring():
    rng = random.Random(1)
    one, other = _ring(16), HashRing()
    for i in reversed(range(16)):
        other.add(f"replica-{i}")
    for _ in range(200):
        key = rng.getrandbits(64)
        order = one.order(key)
        assert sorted(order) == sorted(f"replica-{i}" for i in range(16))
        assert order == other.order(key)


def test_order_wraps_at_the_end_of_the_circle():
    ring = _ring(5)
    assert ring.order(2**64 - 1)[1:] != []
    assert len(ring.order(2**64 - 1)) == 5


def test_an_order_among_some_is_the_order_of_a_ring_without_the_others():
    full, part = _ring(10), HashRing()
    some = [f"replica-{i}" for i in (1, 4, 7)]
    for replica in some:
        part.add(replica)
    rng = random.Random(2)
    for _ in range(300):
        key = rng.getrandbits(64)
        assert full.order(key, some) == part.order(key)
        assert full.first(key, some) == part.order(key)[0]
    assert full.order(7, ["unknown"]) == []
    assert full.first(7, ["unknown"]) is None


def test_shares_follow_weights():
    ring = HashRing()
    ring.add("small", 0.5)
    ring.add("one", 1.0)
    ring.add("big", 2.0)
    rng = random.Random(3)
    firsts = Counter(ring.order(rng.getrandbits(64))[0] for _ in range(7000))
    assert abs(firsts["small"] / 1000 - 1) < 0.25
    assert abs(firsts["one"] / 2000 - 1) < 0.2
    assert abs(firsts["big"] / 4000 - 1) < 0.15


def test_removing_a_replica_moves_only_its_own_keys_and_adding_it_back_restores_them():
    ring = _ring(8)
    rng = random.Random(4)
    keys = [rng.getrandbits(64) for _ in range(2000)]
    before = [ring.order(key)[0] for key in keys]
    ring.remove("replica-3")
    for key, home in zip(keys, before, strict=True):
        assert ring.order(key)[0] == home or home == "replica-3"
    ring.add("replica-3")
    assert [ring.order(key)[0] for key in keys] == before


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from([None, 0.1, 0.5, 1.0, 3.0])), max_size=12))
def test_points_are_those_of_the_last_weights(steps):
    ring = HashRing(virtual_nodes=16)
    weights = {}
    for replica, weight in steps:
        if weight is None:
            ring.remove(replica)
            weights.pop(replica, None)
        else:
            ring.set_weight(replica, weight)
            weights[replica] = weight
        ring.check()
    assert {replica: ring.weight(replica) for replica in weights} == weights
    assert len(ring) == len(weights)
