"""A stream's use of the event loop: by clocks of the test, and against an account that is kept from the start."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from gateway.fleet import turns
from gateway.fleet.turns import AHEAD_S, SHARE, TURN_S, Turns


class Times:
    """Two clocks: `work` moves both, a rest or another's turn that of the wall alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = 100.0
        self.turns = Turns(lambda: self.now, lambda: self.cpu)
        self.rests: list[float] = []
        monkeypatch.setattr(turns.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += max(seconds, 0.000_1)

    def work(self, seconds: float, elapsed: float | None = None) -> None:
        self.cpu += seconds
        self.now += seconds if elapsed is None else elapsed


async def test_a_turn_lasts_a_millisecond_however_many_arrivals_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    for _ in range(30):
        times.turns.begin()
        for _ in range(5):
            times.work(TURN_S / 10)
            await times.turns.pass_on()
        times.turns.end()
        times.now += 1.0
    assert times.rests == [0.0] * 15, "half a turn each time"


async def test_who_never_stops_gets_a_fifth_after_two_seconds_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    times.turns.begin()
    began = times.now
    while not any(times.rests):
        times.work(0.002)
        await times.turns.pass_on()
    assert times.cpu - 100.0 == pytest.approx(AHEAD_S / (1 - SHARE), rel=0.1)
    began, worked = times.now, times.cpu
    for _ in range(2_000):
        times.work(0.002)
        await times.turns.pass_on()
    assert (times.cpu - worked) / (times.now - began) == pytest.approx(SHARE, rel=0.05)
    assert max(times.rests) < 0.02, "in small pieces"
    times.turns.end()
    times.now += AHEAD_S / SHARE
    times.turns.begin()
    times.rests.clear()
    times.work(0.5)
    await times.turns.pass_on()
    assert times.rests == [0.0], "what it was ahead is forgotten in time"


async def test_time_that_is_not_its_own_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was suspended for an hour in the middle of the work, or others have its cores."""
    times = Times(monkeypatch)
    times.turns.begin()
    times.work(0.001, elapsed=3_600.0)
    await times.turns.pass_on()
    for _ in range(10_000):
        times.work(0.001, elapsed=0.05)
        await times.turns.pass_on()
    assert set(times.rests) == {0.0}


@pytest.mark.parametrize("seed", range(5))
async def test_the_account_is_that_of_its_twin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin replays everything that happened: what was used, less what was due, never below nothing."""
    rng, times = random.Random(seed), Times(monkeypatch)
    heavy = rng.random()
    happened: list[tuple[float, float]] = []  # when, and how much work until then
    for _ in range(200):
        times.turns.begin()
        for _ in range(rng.randrange(1, 20)):
            seconds = rng.expovariate(1 / 0.004) * heavy
            times.work(seconds)
            happened.append((times.now, seconds))
            before = len(times.rests)
            await times.turns.pass_on()
            if len(times.rests) == before:
                continue
            ahead, seen = 0.0, 100.0
            for at, worked in happened:
                ahead, seen = max(0.0, ahead - SHARE * (at - seen)) + worked, at
            assert times.rests[-1] == pytest.approx(max(0.0, ahead - AHEAD_S) / SHARE, abs=0.02)
        times.turns.end()
        times.turns.check()
        times.now += rng.expovariate(1 / 0.05) * rng.choice((0, 0, 1))
    worked = sum(seconds for _, seconds in happened)
    assert worked <= AHEAD_S + SHARE * (times.now - 100.0) + 0.1


async def test_two_that_never_stop_take_turns() -> None:
    """By the real clocks: neither works twice without the other in between."""
    order: list[str] = []

    async def flood(name: str) -> None:
        mine: Any = Turns()
        mine.begin()
        for _ in range(50):
            while mine._turn_s + mine._clock() - mine._resumed < TURN_S:
                pass
            order.append(name)
            await mine.pass_on()
        mine.end()

    await asyncio.gather(flood("a"), flood("b"))
    assert order == ["a", "b"] * 50
