"""A replica that has just come up counts for less in the load bounds, and for more every second."""

from __future__ import annotations

import random

import pytest
from path_support import MODEL, Clock, Parts

from gateway.fleet.slow_start import LEAST, WARM, SlowStart
from gateway.identity.prompt import IdentityMode
from gateway.placement.bounds import Bounds
from gateway.placement.placement import Claims, ReplicaView
from gateway.placement.settings import PlacementSettings
from kvstore.messages import Tier


def test_it_grows_to_all_of_its_weight() -> None:
    clock = Clock()
    start = SlowStart(30.0, clock)
    assert start.warmth("a") == 1.0, "nothing is known of it"
    start.came_up("a", 0, 1_000)
    seen = []
    for _ in range(32):
        seen.append(start.warmth("a"))
        clock.now += 1.0
    assert seen[:4] == [LEAST] * 4
    assert seen[15] == pytest.approx(0.5)
    assert seen == sorted(seen)
    assert seen[30:] == [1.0, 1.0]
    assert start.warmth("b") == 1.0


def test_it_starts_again_when_it_comes_back_empty_and_goes_on_with_its_cache() -> None:
    clock = Clock()
    start = SlowStart(30.0, clock)
    start.came_up("a", 0, 1_000)
    clock.now += 29.0
    start.came_up("a", int(1_000 * WARM) - 1, 1_000)
    assert start.warmth("a") == LEAST
    clock.now += 60.0
    start.came_up("a", int(1_000 * WARM), 1_000)
    assert start.warmth("a") == 1.0, "it was silent for a while, and has kept its cache"
    start.came_up("a", 0, 0)
    assert start.warmth("a") == LEAST, "without an agent nobody says that it has anything"


def test_what_is_reported_at_first_says_whether_it_is_new() -> None:
    clock = Clock()
    start = SlowStart(30.0, clock)
    for replica in "ab":
        start.came_up(replica, 0, 0)
    start.reported("a", 600, 1_000)
    start.reported("b", 3, 1_000)
    assert (start.warmth("a"), start.warmth("b")) == (1.0, LEAST)


def test_no_time_is_no_slow_start() -> None:
    start = SlowStart(0.0, Clock())
    start.came_up("a", 0, 1_000)
    assert start.warmth("a") == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_it_is_as_warm_as_its_last_start_says(seed: int) -> None:
    """Against a twin that keeps all that happened, and looks through it."""
    rng, clock = random.Random(seed), Clock()
    start = SlowStart(10.0, clock)
    happened: list[tuple[float, str, bool]] = []
    for _ in range(500):
        clock.now += rng.choice([0.0, 0.5, 3.0, 12.0])
        replica, held = rng.choice("abc"), rng.choice([0, 10, 125, 1_000])
        if rng.random() < 0.3:
            start.came_up(replica, held, 1_000)
            happened.append((clock.now, replica, held < 125))
        elif rng.random() < 0.3:
            start.reported(replica, held, 1_000)
            if held >= 125:
                happened.append((-1e9, replica, True))
        start.check()
        for name in "abc":
            cold = [at for at, of, began in happened if of == name and began]
            expected = min(max((clock.now - cold[-1]) / 10.0, LEAST), 1.0) if cold else 1.0
            assert start.warmth(name) == pytest.approx(expected)


def test_the_bounds_count_warmth_as_weight() -> None:
    def takes(warmth: float) -> int:
        """Sequences that a new one takes while three others have eight each."""

        def view(name: str, running: int, warmth: float = 1.0) -> ReplicaView:
            return ReplicaView(
                id=name, claims=Claims.REPORTS, warmth=warmth, running=running, prefill_tokens_per_s=10_000.0
            )

        others = [view(f"replica-{at}", 8) for at in range(3)]
        running = 0
        while Bounds([*others, new := view("new", running, warmth)], PlacementSettings()).within(new, 0.0):
            running += 1
        return running

    assert (takes(LEAST), takes(0.5), takes(1.0)) == (3, 12, 28), "a few more than the floor, and never nothing"


async def test_a_replica_of_the_fleet_is_told_from_one_that_was_only_silent() -> None:
    parts = Parts()
    clock = parts.fleet.slow_start._clock = Clock()
    new, silent, _ = parts.fleet.replicas.values()
    for replica in (new, silent):
        parts.tell(replica.id, capacity_blocks=16)
    parts.hold(silent.id, range(1, 9))
    for replica in (new, silent):
        parts.health.on_up(replica)
    views = parts.fleet.views(MODEL, IdentityMode.EXACT)
    assert [view.warmth for view in views] == [LEAST, 1.0, 1.0]
    assert [view.weight for view in views] == [1.0, 1.0, 1.0], "its keys are its own at once"
    clock.now += 15.0
    assert parts.fleet.views(MODEL, IdentityMode.EXACT)[0].warmth == pytest.approx(0.5)
    parts.hold(new.id, range(11, 19), Tier.HBM)
    parts.fleet.streams[new.id]._on_reporting(new)
    assert parts.fleet.views(MODEL, IdentityMode.EXACT)[0].warmth == 1.0
