"""AdaptiveKey: where a prompt leaves the crowd."""

from __future__ import annotations

import random
from array import array

import pytest

from gateway.placement.adaptive_key import BOUNDARIES, AdaptiveKey, Split, boundary_at_most
from gateway.placement.settings import PlacementSettings


def _keys(*parts: tuple[str, int]) -> array:
    """Chained keys: `("system", 10)` adds ten units that depend on everything before them."""
    keys, seed = array("Q"), ""
    for name, units in parts:
        for i in range(units):
            seed = f"{hash((seed, name, i))}"
            keys.append(random.Random(seed).getrandbits(64))
    return keys


def test_boundaries_grow_by_half_and_a_third_in_turn():
    assert BOUNDARIES[:13] == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    assert [boundary_at_most(n) for n in (1, 5, 6, 23, 24, 100)] == [1, 4, 6, 16, 24, 96]


def test_a_prompt_without_a_whole_unit_has_no_key():
    assert AdaptiveKey().split(array("Q"), 8) == Split(0, 0, 0)


def test_a_new_prompt_is_keyed_by_its_first_unit():
    assert AdaptiveKey().split(_keys(("a", 40)), 8) == Split(1, 0, 0)


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_a_system_prompt_that_all_share_is_left_behind_within_a_few_requests(replicas):
    traffic = AdaptiveKey()
    depths = []
    for i in range(40):
        keys = _keys(("system", 10), (f"question {i}", 20))
        depths.append(traffic.split(keys, replicas).depth)
        traffic.observe(keys)
        traffic.check()
    assert depths[0] == 1
    assert all(depth == 12 for depth in depths[30:]), "the first boundary after ten shared units is 12"
    split = traffic.split(_keys(("system", 10), ("new", 20)), replicas)
    assert split.hot == 8


def test_a_hot_prefix_needs_more_replicas_the_more_traffic_it_has():
    needed = []
    for share in (0.1, 0.25, 0.5, 1.0):
        traffic = AdaptiveKey()
        for i in range(1000):
            hot = i % 20 < 20 * share
            traffic.observe(_keys(("system" if hot else f"other {i}", 4), (f"tail {i}", 4)))
        needed.append(traffic.split(_keys(("system", 4), ("new", 4)), 8).hot_replicas)
    assert needed == sorted(needed)
    assert needed[0] == 2, "10 % of the traffic of 8 replicas is 0.8 of one's mean: two at half of it"
    assert needed[-1] == 8


def test_identical_prompts_end_at_their_last_unit():
    traffic = AdaptiveKey()
    keys = _keys(("same", 21))
    for _ in range(100):
        traffic.observe(keys)
    assert traffic.split(keys, 8) == Split(21, 16, 8)


def test_traffic_that_is_gone_is_forgotten_and_memory_is_bounded():
    traffic = AdaptiveKey(PlacementSettings(window_requests=100))
    hot = _keys(("system", 10), ("x", 10))
    for _ in range(500):
        traffic.observe(hot)
    assert traffic.split(hot, 8).depth > 1
    for i in range(100):
        traffic.observe(_keys((f"other {i}", 30)))
        traffic.check()
    assert traffic.split(hot, 8) == Split(1, 0, 0)
    assert len(traffic._counts) <= 100 * len(BOUNDARIES)
