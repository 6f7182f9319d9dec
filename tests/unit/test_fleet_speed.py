"""Prefill speeds: pooled over the fleet, own figures only as far as they are proven."""

from __future__ import annotations

import random

import pytest

from gateway.fleet.speed import KEPT, MEMORY_S, MIN_TOKENS, FleetSpeed


def test_the_first_prefill_replaces_the_guess() -> None:
    speed = FleetSpeed(2_000.0)
    assert speed.of("a") == 2_000.0
    speed.observe("a", 1_000, 2.0)
    assert speed.of("a") == speed.of("b") == pytest.approx(500.0)


@pytest.mark.parametrize(("tokens", "seconds"), [(MIN_TOKENS - 1, 1.0), (-5, 1.0), (1_000, 0.0), (1_000, -1.0)])
def test_what_tells_nothing_is_ignored(tokens: int, seconds: float) -> None:
    speed = FleetSpeed(2_000.0)
    speed.observe("a", tokens, seconds)
    assert speed.of("a") == 2_000.0


@pytest.mark.parametrize("seed", range(5))
def test_equal_replicas_have_one_speed_in_spite_of_noise(seed: int) -> None:
    """Single prefills differ by a factor of two. Nearly always nothing is learned of equals, and never much."""
    rng = random.Random(seed)
    speed = FleetSpeed(1.0)
    apart = 0
    for turn in range(400):
        for replica in "abcd":
            speed.observe(replica, 1_000, rng.uniform(0.7, 1.4))
        learned = [speed.of(replica) for replica in "abcd"]
        assert turn < 10 or max(learned) / min(learned) < 1.1
        apart += turn >= 10 and len(set(learned)) > 1
    assert apart < 40
    assert all(700 < each < 1_400 for each in learned)


def test_a_few_prefills_of_one_replica_say_nothing() -> None:
    speed = FleetSpeed(1.0)
    for _ in range(30):
        for replica in "abc":
            speed.observe(replica, 1_000, 1.0)
    for seconds in (0.5, 0.9, 0.6, 1.1):
        speed.observe("d", 1_000, seconds)
        assert speed.of("d") == speed.of("a")


def test_a_slower_machine_is_found_out() -> None:
    speed = FleetSpeed(1.0)
    for _ in range(KEPT):
        for replica, seconds in (("a", 1.0), ("b", 1.0), ("slow", 4.0)):
            speed.observe(replica, 1_000, seconds)
    assert speed.of("a") / speed.of("slow") == pytest.approx(4.0, rel=0.25)
    assert speed.of("a") == pytest.approx(speed.of("b"), rel=0.15), (
        "equals, but for who was seen just after the slow one"
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("times", [2.5, 5.0])
def test_a_machine_that_changes_is_known_after_some_prefills(seed: int, times: float) -> None:
    """Throttled after hundreds of prefills, and well again after hundreds more."""
    rng = random.Random(seed)
    speed = FleetSpeed(1.0)

    def known_after(slow: float) -> int:
        """Rounds of one prefill on each replica, until a quarter is what is missing."""
        known = 0
        for turn in range(1, 301):
            for replica in rng.sample("abcd", 4):
                factor = slow if replica == "d" else 1.0
                speed.observe(replica, 1_000, factor * rng.lognormvariate(0, 0.25))
            speed.check()
            ratio = speed.of("a") / speed.of("d")
            if not known and 0.75 < ratio / slow < 1.33:
                known = turn
            assert turn < 40 or 0.75 < ratio / slow < 1.33, "and it stays known"
            assert turn < 40 or max(map(speed.of, "abc")) / min(map(speed.of, "abc")) < 1.05, "of equals"
            assert turn < 40 or 650 < speed.of("a") < 1_500, "which is what it was"
        return known

    assert known_after(1.0) == 1
    assert known_after(times) <= 30
    assert known_after(1.0) <= 30


class Known(FleetSpeed):
    """Three replicas of which `c` is ten times slower, as 40 prefills of each have shown."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(1.0, clock=lambda: self.now)
        for _ in range(40):
            for replica, seconds in (("a", 1.0), ("b", 1.0), ("c", 10.0)):
                self.observe(replica, 1_000, seconds)
        assert self.slower() == pytest.approx(10, rel=0.2)

    def slower(self) -> float:
        """How much slower `c` is taken to be."""
        return self.of("a") / self.of("c")

    def later(self) -> None:
        """The others go on, and nothing comes to `c`."""
        for _ in range(10):
            self.now += MEMORY_S / 8
            self.observe("a", 1_000, 1.0)
            self.observe("b", 1_000, 1.0)


def test_who_computed_nothing_for_long_counts_as_usual_and_one_prefill_tells_which_it_is() -> None:
    same, other = Known(), Known()
    for speed, seconds, slower in ((same, 10.0, 10.0), (same, 8.0, 10.0), (other, 1.0, 1.0), (other, 1.2, 1.0)):
        speed.later()
        assert speed.slower() == 1.0, "else nothing would come to it, ever"
        speed.observe("c", 1_000, seconds)
        assert speed.slower() == pytest.approx(slower, rel=0.25)
        speed.check()


def test_what_is_known_of_a_replica_that_is_never_without_a_queue_stays_known() -> None:
    speed = Known()
    for _ in range(10):
        speed.now += MEMORY_S / 2
        speed.busy("c", 1_000)
        speed.busy("d", 1_000)
        assert speed.slower() == pytest.approx(10, rel=0.2)
    speed.now += MEMORY_S / 2
    speed.busy("c", MIN_TOKENS - 1)
    speed.now += MEMORY_S / 2 + 1
    assert speed.slower() == 1.0, "a hit tells nothing of its speed"


@pytest.mark.parametrize("times", [5.0, 20.0])
def test_one_prefill_makes_no_slow_replica(times: float) -> None:
    """The first one after a gateway has started, say, which waited for a compiler."""
    speed = FleetSpeed(1.0)
    for replica in "abc":
        speed.observe(replica, 1_000, 1.0)
    speed.observe("d", 1_000, times)
    assert speed.of("d") == speed.of("a")


def test_one_frozen_engine_says_little_of_the_others() -> None:
    speed = FleetSpeed(1.0)
    for _ in range(30):
        for replica in "abc":
            speed.observe(replica, 1_000, 1.0)
    speed.observe("c", 1_000, 60.0)
    assert speed.of("a") == speed.of("c") == pytest.approx(1_000, rel=0.25)


def test_a_slow_period_common_to_all_changes_no_ratio() -> None:
    """Everything takes three times as long for a while, and the replicas do not report equally often meanwhile."""
    speed = FleetSpeed(1.0)
    for _ in range(40):
        for replica in "abc":
            speed.observe(replica, 1_000, 1.0)
    for turn in range(30):
        for replica in "abc"[: 1 + turn % 3]:
            speed.observe(replica, 1_000, 3.0)
    assert speed.of("a") == pytest.approx(333, rel=0.15)
    assert speed.of("a") == pytest.approx(speed.of("c"), rel=0.15)
