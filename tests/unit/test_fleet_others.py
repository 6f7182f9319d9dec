"""The load that is not this gateway's: whose it is, what is news, and what is assumed where nothing is known."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest
from path_support import BEAT, MODEL, Clock, Parts

from gateway.fleet.inflight import InFlight
from gateway.fleet.others import NOTHING, OUTSIDE_S, STALE_S, GatewayId, Lasting, Load, Others
from gateway.identity.prompt import IdentityMode
from kvstore.messages import GatewayLoad, Heartbeat

ME = GatewayId("me", 7)


def load(gateway: str, sequences: int, tokens: int = 0, epoch: int = 7) -> GatewayLoad:
    return GatewayLoad(gateway=gateway, epoch=epoch, prefill_tokens=tokens, sequences=sequences)


def beat(*loads: GatewayLoad, running: int = 0, queued: int | None = None) -> Heartbeat:
    return msgspec.structs.replace(BEAT, gateways=list(loads), running=running, queued_prefill_tokens=queued)


def test_its_own_share_is_not_counted_but_that_of_its_namesake_is() -> None:
    others = Others(ME, Clock())
    others.told(beat(load("me", 5, 50), load("you", 2, 20), load("me", 1, 3, epoch=6)), InFlight())
    assert others.load == others.announced == Load(3, 23)
    assert [each.gateway for each in others.gateways] == ["you", "me"]
    others.told(beat(load("me", 5, 50)), InFlight())
    assert others.load == NOTHING
    others.check()


def test_what_was_heard_a_second_ago_is_no_news() -> None:
    clock = Clock()
    others = Others(ME, clock)
    assert others.load is None
    others.told(beat(load("you", 2)), InFlight())
    clock.now += STALE_S
    assert others.load == Load(2, 0)
    clock.now += 0.01
    assert others.load is None


def test_what_an_engine_does_for_nobody_counts_once_it_lasts() -> None:
    clock = Clock()
    others, own = Others(ME, clock), InFlight()
    own.admit(100)

    def pass_time(seconds: float, running: int, queued: int | None) -> None:
        until = clock.now + seconds
        while clock.now < until:
            clock.now += 0.25
            others.told(beat(load("you", 2, 50), running=running, queued=queued), own)

    pass_time(OUTSIDE_S / 2, running=9, queued=900)
    assert others.outside == NOTHING, "an engine's figures may still hold what has just ended"
    pass_time(2 * OUTSIDE_S, running=9, queued=900)
    assert others.outside == Load(9 - 3, 900 - 150)
    assert others.load == Load(2 + 6, 50 + 750)
    pass_time(0.25, running=3, queued=150)
    assert others.outside == NOTHING, "gone at once"
    pass_time(4 * OUTSIDE_S, running=0, queued=0)
    assert others.load == Load(2, 50), "an engine that has not begun yet takes nothing off"
    others.check()


@pytest.mark.parametrize("seed", range(3))
def test_lasting_is_never_more_than_the_least_of_the_last_window(seed: int) -> None:
    rng, now, seen = random.Random(seed), 0.0, []
    lasting = Lasting(1.0)
    level = positive = 0
    for _ in range(3_000):
        now += rng.choice([0.05, 0.2, 0.2, 3.0 if rng.random() < 0.05 else 0.1])
        if rng.random() < 0.05:
            level = rng.randrange(-3, 10)
        value = level + rng.randrange(2)
        lasting.see(value, now)
        seen.append((now, value))
        recent = [v for at, v in seen if now - at < 1.0]
        assert 0 <= lasting.value <= max(0, min(recent))
        whole = [v for at, v in seen if now - at < 3.0]
        steady = all(b - a <= 1.0 for (a, _), (b, _) in zip(seen[-60:], seen[-59:], strict=False) if b > now - 3.0)
        if steady and len(whole) > 15:
            assert lasting.value >= min(whole), "what has been there for three windows is counted"
            positive += lasting.value > 0
    assert positive > 50


def _told(parts: Parts, loads: Iterable[int | None]) -> None:
    for replica, sequences in zip(parts.fleet.replicas.values(), loads, strict=True):
        if sequences is not None:
            replica.others.told(beat(load("you", sequences, 100 * sequences)), replica.load)


def _running(parts: Parts) -> list[tuple[int, int]]:
    views = parts.fleet.views(MODEL, IdentityMode.EXACT)
    return [(view.running, view.queued_prefill_tokens) for view in views]


async def test_placement_is_told_of_all_load_and_of_the_mean_where_it_is_not_known() -> None:
    parts = Parts(3)
    parts.fleet.replicas["replica-1"].load.admit(40)
    assert _running(parts) == [(0, 0), (1, 40), (0, 0)], "nothing is known of any"
    _told(parts, [4, 8, None])
    assert _running(parts) == [(4, 400), (9, 840), (6, 600)]
    _told(parts, [4, 8, 0])
    assert _running(parts) == [(4, 400), (9, 840), (0, 0)]


async def test_the_mean_is_taken_by_weight() -> None:
    parts = Parts(3)
    parts.fleet.replicas["replica-0"].weight = 2.0
    parts.fleet.replicas["replica-2"].weight = 0.5
    _told(parts, [8, 4, None])
    assert _running(parts)[2] == (2, 200)
