"""Cost terms."""

from __future__ import annotations

import pytest

from gateway.errors import SettingsError
from gateway.placement.cost import CostModel
from gateway.placement.placement import Claims, ReplicaView
from gateway.placement.settings import PlacementSettings


def _view(**fields) -> ReplicaView:
    return ReplicaView(**{"id": "a", "claims": Claims.REPORTS, "prefill_tokens_per_s": 1000.0, **fields})


COST = CostModel(PlacementSettings())


def test_queue_and_prefill_are_tokens_over_speed():
    terms = COST.terms(_view(queued_prefill_tokens=500), 1600, 1200)
    assert terms == pytest.approx((0.5, 0.4, 0.0, 0.5 + 1.5 * 0.4))


def test_only_blocks_without_a_free_place_are_priced():
    # A pool of 250 blocks; a prompt of 1,500 tokens needs 94.
    free = COST.terms(_view(capacity_blocks=250, held_blocks=156), 1500, 0)
    full = COST.terms(_view(capacity_blocks=250, held_blocks=188), 1500, 0)
    assert free.eviction_s == 0
    assert full.eviction_s == pytest.approx(0.5 * (188 + 94 - 250) * 16 / 1000)
    assert COST.terms(_view(capacity_blocks=250, held_blocks=250), 1500, 1488).eviction_s == pytest.approx(0.5 * 0.016)


def test_placed_requests_fill_the_pool_before_they_are_reported():
    assert COST.terms(_view(capacity_blocks=250, held_blocks=94), 1500, 0, 94).eviction_s > 0


def test_unknown_capacity_costs_nothing():
    assert COST.terms(_view(held_blocks=10_000), 1500, 0).eviction_s == 0


def test_a_longer_block_counts_its_own_tokens():
    terms = COST.terms(_view(block_units=4, capacity_blocks=10, held_blocks=10), 128, 64)
    assert terms.eviction_s == pytest.approx(0.5 * 64 / 1000)


@pytest.mark.parametrize(
    ("key", "value"), [("eps", 0), ("band_tokens", -1), ("virtual_nodes", 0), ("learned_ttl_s", 0)]
)
def test_a_bad_setting_names_its_key(key, value):
    with pytest.raises(SettingsError, match=f"placement.{key}"):
        PlacementSettings(**{key: value})
