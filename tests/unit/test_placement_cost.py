"""Cost terms."""

from __future__ import annotations

import msgspec
import pytest

from gateway.errors import SettingsError
from gateway.placement.cost import CostModel
from gateway.placement.placement import Claims, FetchPlan, ReplicaView
from gateway.placement.settings import PlacementSettings
from kvstore.cost import LinkEstimate
from kvstore.messages import FetchState


def _view(**fields) -> ReplicaView:
    return ReplicaView(**{"id": "a", "claims": Claims.REPORTS, "prefill_tokens_per_s": 1000.0, **fields})


COST = CostModel(PlacementSettings())


def _fetching(speed: float = 1000.0, acts: bool = True, **links: LinkEstimate) -> ReplicaView:
    """A block of 1,000 bytes; any peer can be read at 100,000 bytes/s after 10 ms: 10 ms a block."""
    state = FetchState(namespace="n", acts=acts, slots=1_000, link=LinkEstimate(0.01, 100_000.0), links=links)
    return _view(prefill_tokens_per_s=speed, block_bytes=1000, fetch=state)


def test_queue_and_prefill_are_tokens_over_speed():
    terms = COST.terms(_view(queued_prefill_tokens=500), 1600, 1200)
    assert terms == pytest.approx((0.5, 0.0, 0.4, 0.0, 0.5 + 1.5 * 0.4))


def test_what_is_evicted_weighs_twice():
    terms = COST.terms(_view(), 1500, 1500, 300.0)
    assert (terms.eviction_s, terms.total_s) == (0.6, 0.6)


def test_prefill_grows_with_what_is_before_and_with_what_decodes():
    view = _view(attention=0.001, decode_share=0.5)
    assert COST.terms(view, 1600, 1200).prefill_s == pytest.approx(0.4 * (1 + 0.001 * 1400) / 0.5)
    assert COST.terms(view, 1600, 200, fetched_tokens=1000).prefill_s == pytest.approx(0.4 * (1 + 0.001 * 1400) / 0.5)


def test_a_fetch_is_what_it_moves_over_the_link():
    assert COST.fetch(_fetching(), 1000, 160, ["b"], 960) == FetchPlan(
        source="b",
        blocks=60,
        tokens=800,
        bytes=50_000,
        seconds=pytest.approx(0.01 + 0.5),
        deadline_s=pytest.approx(0.8),
        counted=True,
    )


def test_the_nearest_source_is_asked_and_the_first_of_equals_never_oneself():
    near, far = LinkEstimate(0.01, 200_000.0), LinkEstimate(0.01, 90_000.0)
    view = _fetching(b=far, d=near)
    assert COST.fetch(view, 1000, 0, ["a", "b", "c", "d"], 960).source == "d"
    assert COST.fetch(view, 1000, 0, ["a", "b", "c"], 960).source == "c"
    assert COST.fetch(_fetching(), 1000, 0, ["c", "b"], 960).source == "c"
    assert COST.fetch(view, 1000, 0, ["a"], 960) is None


def test_a_fetch_must_beat_recomputing_by_the_margin():
    # 60 blocks in 0.61 s, and 40 tokens more, against 1,000 tokens.
    for speed, pays in ((1000.0, True), (1400.0, True), (1420.0, False), (5000.0, False)):
        assert (0.61 + 40 / speed < 0.9 * 1000 / speed) == pays
        assert (COST.fetch(_fetching(speed), 1000, 0, ["b"], 960) is not None) == pays
    eager = CostModel(PlacementSettings(fetch_margin=0.0))
    assert eager.fetch(_fetching(1420.0), 1000, 0, ["b"], 960) is not None


def test_there_is_nothing_to_fetch_without_a_pool_bytes_or_more_than_is_held():
    assert COST.fetch(_view(block_bytes=1000), 1000, 0, ["b"], 960) is None
    assert COST.fetch(msgspec.structs.replace(_fetching(), block_bytes=0), 1000, 0, ["b"], 960) is None
    assert COST.fetch(_fetching(), 1000, 960, ["b"], 960) is None
    assert COST.fetch(_fetching(), 1000, 0, [], 960) is None


def test_no_more_is_fetched_than_the_replicas_own_pool_has_room_for():
    small = msgspec.structs.replace(_fetching(), fetch=msgspec.structs.replace(_fetching().fetch, slots=20))
    plan = COST.fetch(small, 1000, 160, ["b"], 960)
    assert (plan.blocks, plan.tokens, plan.bytes) == (30, 320, 20_000)


def test_a_fetch_may_take_as_long_as_recomputing_what_it_brings_within_bounds():
    link = LinkEstimate(0.0, 1e12)
    for speed, seconds in ((1000.0, 0.96), (100_000.0, 0.05), (10.0, 30.0)):
        assert COST.fetch(_fetching(speed, b=link), 1000, 0, ["b"], 960).deadline_s == pytest.approx(seconds)


def test_a_replica_that_only_keeps_records_is_asked_to_but_not_counted_on():
    assert not COST.fetch(_fetching(acts=False), 1000, 0, ["b"], 960).counted


def test_fetched_tokens_cost_the_fetch_beyond_the_queue_and_the_band():
    idle = COST.terms(_view(), 1000, 160, fetched_tokens=800, fetch_s=0.2)
    assert idle == pytest.approx((0.0, 0.2, 0.04, 0.0, 0.2 + 0.128 + 1.5 * 0.04))
    busy = COST.terms(_view(queued_prefill_tokens=500), 1000, 160, fetched_tokens=800, fetch_s=0.2)
    assert busy.total_s == pytest.approx(0.5 + 0.128 + 1.5 * 0.04)
    full = COST.terms(_view(), 1000, 160, 100.0, fetched_tokens=800, fetch_s=0.2)
    assert full.total_s == pytest.approx(idle.total_s + 0.2), "fetched blocks need a place, too"


def test_a_fetch_never_makes_a_replica_look_worse_than_computing():
    terms = COST.terms(_view(), 200, 0, fetched_tokens=64, fetch_s=0.02)
    assert terms.total_s == COST.terms(_view(), 200, 0).total_s == pytest.approx(0.3)
    assert terms.prefill_s == pytest.approx(0.136)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eps", 0),
        ("band_tokens", -1),
        ("virtual_nodes", 0),
        ("learned_ttl_s", 0),
        ("fetch_margin", 1),
        ("fetch_max_deadline_s", 0),
    ],
)
def test_a_bad_setting_names_its_key(key, value):
    with pytest.raises(SettingsError, match=f"placement.{key}"):
        PlacementSettings(**{key: value})
