"""Replicas of unequal weight and speed get work in proportion; equal ones are equal, whatever chance says of them."""

from __future__ import annotations

import random

import msgspec
import pytest
from placement_fleet import Fleet, Request, prompt

from gateway.fleet.speed import FleetSpeed
from gateway.placement.placement import Placement, Reason, ReplicaView


class Fitted(Fleet):
    """What is known of an engine's speed is fitted to its prefills, which take half as long or twice by chance."""

    def __init__(self, replicas: int, *, speed: float, seed: int) -> None:
        super().__init__(replicas, speed=speed)
        self.fitted = FleetSpeed(2_000.0, clock=lambda: self.now)
        self.rng = random.Random(seed)

    def views(self) -> list[ReplicaView]:
        return [msgspec.structs.replace(view, prefill_tokens_per_s=self.fitted.of(view.id)) for view in super().views()]

    def start(self, placement: Placement, request: Request, placer: object) -> None:
        engine, tokens = self.engines[placement.replica], request.identity.tokens
        if not engine.queued:
            self.fitted.observe(engine.id, tokens, tokens / engine.speed * self.rng.lognormvariate(0, 0.4))
        super().start(placement, request, self.placer)


def cold(fleet: Fleet, utilization: float, *, count: int = 400, tokens: int = 2_000, seed: int = 0) -> dict[str, float]:
    """Each replica's part of the work, of prompts that have nothing in common."""
    rng, speed = random.Random(seed), sum(engine.speed for engine in fleet.engines.values())
    at = 0.0
    for each in range(count):
        at += rng.expovariate(utilization * speed / tokens)
        fleet.submit(Request(at, prompt(each, round(tokens * rng.uniform(0.5, 1.5))), 10))
    work = {engine.id: engine.work for engine in fleet.engines.values()}
    return {replica: tokens / sum(work.values()) for replica, tokens in work.items()}


def one_and_three(fleet: Fleet) -> Fleet:
    fleet.add()
    fleet.add(weight=3.0)
    return fleet


@pytest.mark.parametrize("tokens", [400, 4_000])
def test_work_is_in_proportion_where_all_are_busy(tokens: int) -> None:
    fleet = one_and_three(Fleet(0, speed=5_000.0))
    assert cold(fleet, 1.2, tokens=tokens)["replica-1"] == pytest.approx(0.75, abs=0.03)
    assert fleet.reasons[Reason.SPILL] == 0, "it is the queues' seconds that share it out, not the bounds"


def test_so_it_is_where_speeds_are_learned() -> None:
    fleet = one_and_three(Fitted(0, speed=5_000.0, seed=0))
    assert cold(fleet, 1.2)["replica-1"] == pytest.approx(0.75, abs=0.04)


def test_on_an_idle_fleet_the_ring_shares_it_out_by_weight_and_speed_goes_first() -> None:
    by_weight = one_and_three(Fleet(0, speed=5_000.0))
    for engine in by_weight.engines.values():
        engine.speed = 10_000.0
    assert cold(by_weight, 0.02)["replica-1"] == pytest.approx(0.75, abs=0.06)
    fast = one_and_three(Fleet(0, speed=5_000.0))
    assert cold(fast, 0.02)["replica-1"] > 0.95, "whoever waits for the slower one waits three times as long"


@pytest.mark.parametrize("seed", range(3))
def test_chance_makes_no_favourite_of_equals(seed: int) -> None:
    fleet = Fitted(4, speed=10_000.0, seed=seed)
    shares = cold(fleet, 0.05, seed=seed)
    assert all(0.15 < share < 0.36 for share in shares.values()), shares


@pytest.mark.parametrize("utilization", [0.05, 0.3])
@pytest.mark.parametrize("times", [3, 10])
def test_a_replica_that_was_slow_gets_its_part_again(times: int, utilization: float) -> None:
    """Cold prompts go elsewhere while it is, so that nobody sees when it no longer is."""
    fleet = Fitted(4, speed=10_000.0, seed=1)
    slow = fleet.engines["replica-0"]

    def share(first: int, count: int, at: float) -> float:
        rng, before = random.Random(first), slow.work
        others = sum(engine.work for engine in fleet.engines.values()) - before
        for each in range(first, first + count):
            at += rng.expovariate(utilization * 40_000.0 / 2_000)
            fleet.submit(Request(at, prompt(each, round(2_000 * rng.uniform(0.5, 1.5))), 10))
        own = slow.work - before
        return own / (own + sum(engine.work for engine in fleet.engines.values()) - slow.work - others)

    assert share(0, 400, 0.0) == pytest.approx(0.25, abs=0.08)
    slow.speed /= times
    assert share(1_000, 400, 1_000.0) < 0.12
    slow.speed *= times
    assert share(2_000, 1_000, 2_000.0) == pytest.approx(0.25, abs=0.08)


def test_a_hot_prefix_spreads_by_weight_within_the_bounds() -> None:
    """Two replicas of weight 1 and two of 3, and requests for nothing but one document, more than one of them takes."""
    fleet = Fleet(0)
    weights = [1.0, 1.0, 3.0, 3.0]
    for weight in weights:
        fleet.add(weight=weight)
    engines = list(fleet.engines.values())
    hot = prompt(0, 4_000)
    fleet.submit(Request(0.0, hot, 10))
    running = dict.fromkeys(fleet.engines, 0)
    for each in range(600):
        request = Request(20.0 + each * 0.1, hot, 500)
        engine = fleet.engines[fleet.submit(request).replica]
        total = sum(other.running for other in engines)
        assert engine.running <= 2 * engine.weight / sum(weights) * total + 2
        if each >= 200:
            for other in engines:
                running[other.id] += other.running
    heavy = sum(running[engine.id] for engine in engines if engine.weight == 3.0)
    assert heavy / sum(running.values()) > 0.6
    for engine in engines:
        share = running[engine.id] / sum(running.values())
        assert share <= 2 * engine.weight / sum(weights) + 0.03
