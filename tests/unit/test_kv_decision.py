"""What fetching and recomputing are expected to take, and which is done."""

from __future__ import annotations

import random

import pytest

from kvstore.cost import attended
from replica_agent.kv import decision, link
from replica_agent.kv.decision import COPY_PRIOR, LINK_PRIOR, PREFILL_PRIOR, Estimates, Prompt

MIB = 2**20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(blocks: int, *, cached: int = 0, tail: int = 1, size: int = MIB) -> Prompt:
    return Prompt((cached + blocks) * 16 + tail, cached, 16, size)


def test_before_anything_is_known_the_priors_stand() -> None:
    subject = Estimates(margin=0.1)
    expected = subject.predict(prompt(100), 20, 80, "a")
    assert expected.fetch_s == pytest.approx(LINK_PRIOR.seconds(80 * MIB) + COPY_PRIOR.seconds(100 * MIB))
    assert expected.rest_s == pytest.approx(1 / PREFILL_PRIOR)
    assert expected.recompute_s == pytest.approx(1601 / PREFILL_PRIOR)
    assert subject.predict(prompt(100), 0, 0, "a")[:2] == (0.0, expected.recompute_s)
    assert (subject.prefill_tokens_per_s, subject.links) == (None, {})
    assert subject.link.bytes_per_s == pytest.approx(LINK_PRIOR.bytes_per_s)
    subject.check()


def test_the_last_token_is_always_computed() -> None:
    assert Prompt(32, 0, 16, 1).rest(2) == (1, 31)
    assert Prompt(33, 1, 16, 1).rest(1) == (1, 32)
    assert Prompt(100, 1, 16, 1).rest(0) == (84, 16)
    assert Prompt(0, 0, 16, 1).rest(0) == (0, 0)


def test_a_slow_engine_fetches_and_a_fast_one_computes() -> None:
    for tokens_per_s, fetches in ((500.0, True), (500_000.0, False)):
        subject = Estimates(margin=0.1)
        for _ in range(60):
            subject.prefilled(1_000, attended(1_000), 1_000 / tokens_per_s)
            subject.fetched("a", 100 * MIB, 0.05)
        assert subject.worth_fetching(prompt(100), 0, 100, "a") is fetches
        assert subject.prefill_tokens_per_s == pytest.approx(tokens_per_s, rel=0.2)


def test_a_fetch_must_beat_what_the_own_pool_gives() -> None:
    subject = Estimates(margin=0.1)
    assert subject.worth_fetching(prompt(100, size=4_096), 0, 100, "a")
    # With 99 of 100 blocks at hand, the last one is not worth an exchange.
    assert not subject.worth_fetching(prompt(100, size=4_096), 99, 1, "a")
    assert subject.worth_copying(prompt(100, size=4_096), 99)


def test_the_margin_is_a_share_of_the_alternative() -> None:
    eager, shy = Estimates(margin=0.0), Estimates(margin=0.9)
    assert eager.worth_fetching(prompt(100), 0, 100, "a")
    assert not shy.worth_fetching(prompt(100), 0, 100, "a")


def test_each_source_is_known_by_itself_and_forgotten() -> None:
    clock = Clock()
    subject = Estimates(margin=0.1, clock=clock)
    for _ in range(50):
        subject.fetched("slow", 100 * MIB, 10.0)
    for _ in range(50):
        subject.fetched("fast", 100 * MIB, 0.02)
    assert subject.links["slow"].seconds(100 * MIB) == pytest.approx(10.0, rel=0.2)
    assert subject.links["fast"].seconds(100 * MIB) == pytest.approx(0.02, rel=0.2)
    # One that nothing came from is like the others were lately.
    assert subject.predict(prompt(100), 0, 100, "new").fetch_s < 1
    assert not subject.worth_fetching(prompt(100), 0, 100, "slow")
    clock.now = link.MEMORY_S
    subject.fetched("fast", 100 * MIB, 0.02)
    clock.now += 1
    assert list(subject.links) == ["fast"]
    assert subject.worth_fetching(prompt(100), 0, 100, "slow")
    subject.check()


def test_where_all_links_were_slow_one_fetch_tells_whether_they_are() -> None:
    """Two replicas, and a network that was congested: nothing is fetched, so nothing else would be heard of it."""
    clock = Clock()
    subject = Estimates(margin=0.1, clock=clock)

    def after_a_while() -> bool:
        clock.now += link.MEMORY_S + 1
        return subject.worth_fetching(prompt(100), 0, 100, "a")

    for _ in range(50):
        subject.fetched("a", 100 * MIB, 10.0)
    assert not subject.worth_fetching(prompt(100), 0, 100, "a")
    slow = subject.links["a"]
    for _ in range(3):
        assert after_a_while()
        assert subject.link.seconds(100 * MIB) < 1, "gateways are told so, or they would not name a source"
        assert not subject.links
        subject.fetched("a", 100 * MIB, 9.0)
        # As it was: known at once, with all that was known of it.
        assert not subject.worth_fetching(prompt(100), 0, 100, "a")
        assert subject.links["a"].bytes_per_s == pytest.approx(slow.bytes_per_s, rel=0.1)
        subject.check()
    assert after_a_while()
    subject.fetched("a", 100 * MIB, 0.05)
    assert subject.worth_fetching(prompt(100), 0, 100, "a")
    for _ in range(10):
        subject.fetched("a", 100 * MIB, 0.05)
    assert after_a_while()
    assert subject.link.seconds(100 * MIB) == pytest.approx(0.05, rel=0.2)
    subject.check()


def test_a_link_that_was_fast_is_not_forgotten() -> None:
    clock = Clock()
    subject = Estimates(margin=0.1, clock=clock)
    for _ in range(50):
        subject.fetched("a", 100 * MIB, 0.01)
    clock.now = link.MEMORY_S + 1
    assert subject.moving("a", 100 * MIB) == pytest.approx(0.01, rel=0.2)
    assert subject.moving("b", 100 * MIB) == pytest.approx(0.01, rel=0.2)


def test_an_engine_that_copied_slowly_is_asked_to_copy_again() -> None:
    """What it copies is its own pool's blocks as well: without a try nothing would come of the pool any more."""
    clock = Clock()
    subject = Estimates(margin=0.1, clock=clock)
    for _ in range(50):
        subject.copied(100 * MIB, 10.0)
    assert not subject.worth_copying(prompt(100), 100)
    clock.now = link.MEMORY_S + 1
    assert subject.worth_copying(prompt(100), 100)
    subject.copied(100 * MIB, 10.0)
    assert not subject.worth_copying(prompt(100), 100)
    clock.now += link.MEMORY_S + 1
    for _ in range(3):
        subject.copied(100 * MIB, 0.01)
    assert subject.worth_copying(prompt(100), 100)


def test_a_source_whose_fetches_fail_at_once_is_held_back_until_one_brings_something() -> None:
    clock = Clock()
    subject = Estimates(margin=0.1, clock=clock)

    def fails(began: float | None = None) -> bool:
        clock.now += 1
        subject.failed("a", clock.now - 0.01 if began is None else began)
        subject.check()
        return subject.held_back("a")

    assert [fails() for _ in range(link.FAILURES)] == [False, False, True]
    assert not subject.worth_fetching(Prompt(1 << 20, 0, 16, 1), 0, 1 << 16, "a"), "not for the longest of prompts"
    assert subject.links == {"a": link.HELD_BACK}, "gateways are told"
    assert subject.worth_fetching(prompt(100), 0, 100, "b") and not subject.held_back("b")
    assert subject.link.latency_s == pytest.approx(LINK_PRIOR.latency_s), "nothing is known of the others by it"
    clock.now += link.HELD_BACK_S
    assert subject.worth_fetching(prompt(100), 0, 100, "a") and not subject.links, "it is tried again"
    assert fails(), "one more is enough now"
    clock.now += link.HELD_BACK_S
    subject.fetched("a", 100 * MIB, 0.1)
    assert [fails() for _ in range(link.FAILURES - 1)] == [False, False]
    assert subject.links["a"].seconds(100 * MIB) < 1
    assert fails()
    clock.now += link.HELD_BACK_S
    assert subject.links["a"].seconds(100 * MIB) < 1, "what was known before is known again"


def test_fetches_that_fail_together_count_as_one() -> None:
    clock = Clock()
    subject = Estimates(margin=0.1, clock=clock)
    for _ in range(100):
        clock.now += 0.01
        subject.failed("a", 0.0)
    assert not subject.held_back("a")


@pytest.mark.parametrize("seed", range(3))
def test_stress_who_is_held_back_is_known_from_the_whole_past(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    subject = Estimates(margin=0.1, clock=clock)
    past: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in "abc"}

    def naive(name: str) -> bool:
        ends: list[float] = []
        for began, ended, brought in past[name]:
            if brought:
                ends.clear()
            elif began >= max((end for _, end, ok in past[name] if not ok and end < ended), default=-1.0):
                ends.append(ended)
        return len(ends) >= link.FAILURES and clock.now - ends[-1] < link.HELD_BACK_S

    seen = set()
    for _ in range(600):
        clock.now += rng.choice((0.1, 1.0, 20.0))
        name, brought = rng.choice("abc"), rng.random() < 0.2
        began = clock.now - rng.choice((0.05, 0.5))
        past[name].append((began, clock.now, brought))
        if brought:
            subject.fetched(name, MIB, 0.01)
        else:
            subject.failed(name, began)
        for each in "abc":
            assert subject.held_back(each) == naive(each)
            assert (subject.links.get(each) == link.HELD_BACK) == naive(each)
            seen.add(naive(each))
        subject.check()
    assert seen == {True, False}


def test_links_are_bounded() -> None:
    subject = Estimates(margin=0.1)
    for number in range(decision._MAX_LINKS + 10):
        subject.fetched(str(number), MIB, 0.01)
    assert len(subject.links) == decision._MAX_LINKS
    assert "0" not in subject.links
    subject.check()


def test_the_speed_is_told_once_it_is_known() -> None:
    subject = Estimates(margin=0.1)
    for count in range(decision.TRUSTED_AFTER):
        assert subject.prefill_tokens_per_s is None, count
        subject.prefilled(512, attended(512), 0.5)
    assert subject.prefill_tokens_per_s is not None


def test_deciding_costs_little_where_neither_way_is_always_best() -> None:
    """SmolLM2's figures (benchmarks/README.md), and links on which fetching pays always, for long prompts, and never.
    Told of what it did alone, as an agent is, with noise."""
    rng = random.Random(0)
    totals = dict.fromkeys(("best", "decided", "fetched", "recomputed"), 0.0)
    size = 23_040 * 16
    for rate in (50e6, 15e6, 8e6):
        subject = Estimates(margin=0.1)

        def compute(tokens: int, context: int) -> float:
            took = 0.045 + 1.05e-3 * tokens + 1.8e-7 * attended(tokens, context)
            return took * rng.lognormvariate(0, 0.05)

        for at in range(70):
            blocks = rng.choice((8, 32, 64, 128, 256))
            asked = prompt(blocks, tail=5, size=size)
            move_s = (0.003 + blocks * size / rate) * rng.lognormvariate(0, 0.05)
            rest_s, recompute_s = compute(*asked.rest(blocks)), compute(*asked.rest(0))
            ways = {True: move_s + rest_s, False: recompute_s}
            # The first ten are no choices: nothing was known.
            fetches = subject.worth_fetching(asked, 0, blocks, "a") if at >= 10 else at % 2 == 0
            if fetches:
                subject.fetched("a", blocks * size, move_s)
            tokens, context = asked.rest(blocks if fetches else 0)
            subject.prefilled(tokens, attended(tokens, context), rest_s if fetches else recompute_s)
            if at >= 10:
                totals["best"] += min(ways.values())
                totals["decided"] += ways[fetches]
                totals["fetched"] += ways[True]
                totals["recomputed"] += ways[False]
    assert totals["decided"] < 1.05 * totals["best"], totals
    assert totals["fetched"] > 1.1 * totals["best"], totals
    assert totals["recomputed"] > 1.1 * totals["best"], totals
