"""Both bounds, against the law written out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.placement.bounds import Bounds
from gateway.placement.placement import Claims, ReplicaView
from gateway.placement.settings import PlacementSettings

SETTINGS = PlacementSettings()


def _view(i: int, queued: int = 0, running: int = 0, speed: float = 1000.0, weight: float = 1.0) -> ReplicaView:
    return ReplicaView(
        id=f"replica-{i}",
        claims=Claims.REPORTS,
        weight=weight,
        queued_prefill_tokens=queued,
        running=running,
        prefill_tokens_per_s=speed,
    )


_views = st.lists(
    st.builds(
        _view,
        st.integers(0, 9),
        st.integers(0, 20_000),
        st.integers(0, 60),
        st.sampled_from([500.0, 1000.0, 4000.0]),
        st.sampled_from([0.5, 1.0, 2.0]),
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=300, deadline=None)
@given(_views, st.floats(0, 30))
def test_within_is_the_law_and_implies_it_for_the_loads_found(views, own):
    bounds = Bounds(views, SETTINGS)
    weight = sum(view.weight for view in views)
    seconds = [view.queued_prefill_tokens / view.prefill_tokens_per_s for view in views]
    for view, queued in zip(views, seconds, strict=True):
        share, floor = 2 * view.weight / weight, 512 / view.prefill_tokens_per_s
        added = min(own, floor)
        law = queued + added <= share * (sum(seconds) + added) + floor + 1e-6
        law = law and view.running + 1 <= share * (sum(v.running for v in views) + 1) + 2
        assert not bounds.within(view, own) or law
        if share <= 1 and bounds.within(view, own):
            assert queued <= share * sum(seconds) + floor + 1e-6
            assert view.running <= share * sum(v.running for v in views) + 2
    if len({view.weight for view in views}) == 1:
        coolest = min(views, key=lambda view: view.running)
        alone = [_view(i, running=view.running) for i, view in enumerate(views)]
        assert Bounds(alone, SETTINGS).within(_view(0, running=coolest.running), own), "one is always within a bound"


def test_an_idle_fleet_is_within_bounds_for_any_prompt():
    for count in (1, 2, 8, 256):
        views = [_view(i) for i in range(count)]
        bounds = Bounds(views, SETTINGS)
        assert all(bounds.within(view, 1000.0) for view in views)


def test_each_bound_alone_keeps_a_replica_out():
    views = [_view(0, running=10), _view(1, queued=9000)] + [_view(i) for i in range(2, 10)]
    bounds = Bounds(views, SETTINGS)
    assert not bounds.within(views[0], 0.1)
    assert not bounds.within(views[1], 0.1)
    assert bounds.within(views[2], 0.1)
    assert bounds.pressure(views[1]) > bounds.pressure(views[2]) == 0


def test_a_heavier_replica_may_carry_more():
    views = [_view(0, running=8, weight=4.0), _view(1, running=8), _view(2, running=2), _view(3, running=2)]
    bounds = Bounds(views, SETTINGS)
    assert bounds.within(views[0], 0.0)
    assert not bounds.within(views[1], 0.0)
