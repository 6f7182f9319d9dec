"""Formulas and estimators of fetching and recomputing: monotone, finite, and right after a few observations."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cost import LinkEstimate, LinkEstimator, PrefillEstimator, attended, decide, transfer_seconds

PRIOR = LinkEstimate(latency_s=1e-3, bytes_per_s=1e9)
SIZES = (1e4, 1e6, 1e8)
LATENCIES = st.floats(0, 10)
RATES = st.floats(1, 1e13)
DURATIONS = st.floats(allow_nan=True, allow_infinity=True)
LENGTHS = st.integers(-5, 2**62)


def test_a_transfer_is_latency_and_bytes() -> None:
    assert transfer_seconds(1.28e9, 0.0, 50e9) == pytest.approx(25.6e-3)
    assert LinkEstimate(latency_s=2e-3, bytes_per_s=1e9).seconds(1e6) == pytest.approx(3e-3)


@given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 80))
def test_attended_adds_up_token_by_token(tokens: int, context: int, window: int) -> None:
    positions = (min(context + at, window or context + at) for at in range(1, tokens + 1))
    assert attended(tokens, context, window) == sum(positions)


def test_fetch_only_where_it_beats_recomputing_by_the_margin() -> None:
    assert decide(0.5, 0.39, 1.0, margin=0.1)
    assert not decide(0.5, 0.41, 1.0, margin=0.1)
    assert not decide(1.0, 0.0, 1.0, margin=0.0)


@pytest.mark.parametrize(
    ("change", "named"), [({"latency_s": -1.0}, "latency_s"), ({"bytes_per_s": 0.0}, "bytes_per_s")]
)
def test_an_estimate_from_the_wire_is_checked(change: dict[str, float], named: str) -> None:
    wire = msgspec.msgpack.encode({"latency_s": 0.0, "bytes_per_s": 1.0} | change)
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.msgpack.decode(wire, type=LinkEstimate)
    nan = msgspec.msgpack.encode({"latency_s": math.nan, "bytes_per_s": 1.0})
    with pytest.raises(msgspec.ValidationError, match="latency_s"):
        msgspec.msgpack.decode(nan, type=LinkEstimate)


def use(link: LinkEstimator, rng: random.Random, count: int, true: LinkEstimate, noise: float = 0.2) -> None:
    """`count` transfers of 10 kB to 100 MB over a link that is as `true` says, with log-normal noise."""
    for _ in range(count):
        size = 10 ** rng.uniform(4, 8)
        link.observe(size, true.seconds(size) * rng.lognormvariate(0, noise))
        link.check()


def error(link: LinkEstimator, true: LinkEstimate) -> float:
    """The largest factor by which a prediction is wrong."""
    return max(math.exp(abs(math.log(link.estimate.seconds(size) / true.seconds(size)))) for size in SIZES)


@pytest.mark.parametrize("true", [LinkEstimate(1e-3, 1e9), LinkEstimate(2e-2, 1e8), LinkEstimate(1e-5, 4e10)], ids=str)
def test_a_link_is_learned_whatever_was_assumed(true: LinkEstimate) -> None:
    for seed in range(5):
        link = LinkEstimator(PRIOR)
        use(link, random.Random(seed), 200, true)
        assert error(link, true) < 1.25, seed


def test_without_noise_latency_and_bandwidth_are_exact() -> None:
    link, true = LinkEstimator(PRIOR), LinkEstimate(3e-3, 7e9)
    use(link, random.Random(0), 300, true, noise=0.0)
    assert link.estimate.latency_s == pytest.approx(true.latency_s, rel=1e-3)
    assert link.estimate.bytes_per_s == pytest.approx(true.bytes_per_s, rel=1e-2)


def test_the_prior_is_worth_a_few_transfers() -> None:
    link = LinkEstimator(PRIOR)
    assert link.estimate.seconds(1e6) == pytest.approx(2e-3)
    link.observe(1e6, 3e-3)
    assert 2.1e-3 < link.estimate.seconds(1e6) < 2.4e-3
    for _ in range(20):
        link.observe(1e6, 3e-3)
    assert 2.7e-3 < link.estimate.seconds(1e6) < 3.01e-3


def test_one_outlier_changes_little() -> None:
    for factor in (0.1, 10, 1_000):
        link = LinkEstimator(PRIOR)
        use(link, random.Random(1), 100, PRIOR)
        before = [link.estimate.seconds(size) for size in SIZES]
        link.observe(1e7, PRIOR.seconds(1e7) * factor)
        for size, was in zip(SIZES, before, strict=True):
            assert link.estimate.seconds(size) == pytest.approx(was, rel=0.1)


def test_a_link_that_changes_is_known_after_a_few_transfers() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        link = LinkEstimator(PRIOR)
        use(link, rng, 100, PRIOR)
        for true in (LinkEstimate(1e-2, 1e8), LinkEstimate(1e-3, 3e9), LinkEstimate(2e-2, 3e9)):
            use(link, rng, 20, true)
            assert error(link, true) < 2, (seed, true)


@settings(deadline=None)
@given(LATENCIES, RATES, st.lists(st.tuples(LENGTHS, DURATIONS), max_size=12), st.lists(LENGTHS, min_size=2))
def test_a_link_is_monotone_and_finite_whatever_it_is_told(
    latency_s: float, rate: float, told: list[tuple[int, float]], sizes: list[int]
) -> None:
    link = LinkEstimator(LinkEstimate(latency_s, rate))
    for size, seconds in told:
        link.observe(size, seconds)
        link.check()
    found = link.estimate
    assert 0 <= found.latency_s < math.inf and 0 < found.bytes_per_s < math.inf
    predicted = [link.estimate.seconds(max(size, 0)) for size in sorted(sizes)]
    assert all(0 <= each < math.inf for each in predicted)
    assert predicted == sorted(predicted)


@pytest.mark.parametrize(
    "true", [(0.0, 1 / 5_000, 0.0), (0.02, 1 / 400, 0.0), (0.003, 1 / 40_000, 1e-9), (0.0, 1 / 2_000, 2e-7)], ids=str
)
def test_a_replica_is_learned(true: tuple[float, float, float]) -> None:
    """Chunks of a long prompt, and short prompts, in steps that overlap with nothing."""
    for seed in range(5):
        rng = random.Random(seed)
        replica = PrefillEstimator(prior_tokens_per_s=5_000)
        for _ in range(200):
            tokens, context = rng.randint(16, 2_048), rng.choice((0, 0, rng.randint(0, 30_000)))
            seconds = true[0] + true[1] * tokens + true[2] * attended(tokens, context)
            replica.observe(tokens, attended(tokens, context), seconds * rng.lognormvariate(0, 0.1))
            replica.check()
        for tokens, context in ((64, 0), (512, 0), (2_048, 0), (512, 20_000)):
            expected = true[0] + true[1] * tokens + true[2] * attended(tokens, context)
            assert replica.seconds(tokens, context) == pytest.approx(expected, rel=0.25), (seed, tokens, context)
            assert replica.tokens_per_s(tokens, context) == pytest.approx(tokens / expected, rel=0.34)


SMALL_ON_CPU = (0.045, 1.05e-3, 1.8e-7)
LARGE_ON_GPU = (0.008, 1 / 40_000, 1e-9)


class Engine:
    """A replica whose true figures are known, and what is fitted to its steps."""

    def __init__(self, true: tuple[float, float, float], rng: random.Random) -> None:
        self.true = true
        self.fitted = PrefillEstimator(prior_tokens_per_s=8_000)
        self._rng = rng

    def seconds(self, tokens: int, context: int = 0) -> float:
        return self.true[0] + self.true[1] * tokens + self.true[2] * attended(tokens, context)

    def prefills(self, count: int = 5) -> None:
        for tokens in self._rng.sample((128, 256, 512, 1_024, 2_048), count):
            self.step(tokens, 0, 0.05)

    def rests(self, count: int) -> None:
        """What is left to compute after fetches: a few tokens each, 35 to 55 ms where 45 are true."""
        for _ in range(count):
            self.step(5, self._rng.choice((0, 128, 512, 2_048, 4_096)), 0.1)

    def step(self, tokens: int, context: int, noise: float) -> None:
        took = self.seconds(tokens, context) * self._rng.lognormvariate(0, noise)
        self.fitted.observe(tokens, attended(tokens, context), took)
        self.fitted.check()

    def error(self, tokens: int, context: int = 0) -> float:
        return math.exp(abs(math.log(self.fitted.seconds(tokens, context) / self.seconds(tokens, context))))


@pytest.mark.parametrize("true", [SMALL_ON_CPU, LARGE_ON_GPU], ids=["small-on-cpu", "large-on-gpu"])
@pytest.mark.parametrize("rests_first", [False, True])
def test_short_rests_after_fetches_say_nothing_of_long_prefills(
    true: tuple[float, float, float], rests_first: bool
) -> None:
    for seed in range(8):
        for rests in (3, 30):
            engine = Engine(true, random.Random(seed))
            if rests_first:
                engine.rests(rests)
            engine.prefills()
            before = engine.error(4_096)
            if not rests_first:
                engine.rests(rests)
            for tokens, context, most in ((4_096, 0, 1.3), (1_024, 0, 1.3), (5, 2_048, 1.3)):
                assert engine.error(tokens, context) < most, (seed, rests, tokens, before)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_an_engine_that_changes_is_known_after_a_few_steps_of_each_kind(factor: float) -> None:
    for seed in range(8):
        for rests in (0, 30):
            engine = Engine(SMALL_ON_CPU, random.Random(seed))
            engine.prefills()
            engine.rests(rests)
            engine.true = (SMALL_ON_CPU[0] * factor, SMALL_ON_CPU[1] * factor, SMALL_ON_CPU[2] * factor)
            engine.prefills(4)
            for tokens in (512, 1_024, 4_096):
                assert engine.error(tokens) < 1.5, (seed, rests, tokens)


def test_latency_that_was_unknown_says_nothing_of_bandwidth() -> None:
    """Transfers of 47 MB over a link of 1 GB/s, and then of one small block each: 20 ms, which no large one showed."""
    for seed in range(8):
        rng = random.Random(seed)
        link, true = LinkEstimator(PRIOR), LinkEstimate(2e-2, 1e9)
        for _ in range(20):
            size = rng.uniform(2e8, 2e9)
            link.observe(size, true.seconds(size) * rng.lognormvariate(0, 0.05))
        for _ in range(30):
            link.observe(1e4, true.seconds(1e4) * rng.lognormvariate(0, 0.1))
            link.check()
        assert error(link, true) < 1.3, seed
        assert link.estimate.seconds(1e9) == pytest.approx(true.seconds(1e9), rel=0.3), seed


def test_a_replica_begins_with_the_speed_it_is_given() -> None:
    replica = PrefillEstimator(prior_tokens_per_s=4_000)
    assert replica.seconds(1_000, context=9_000) == pytest.approx(0.25)
    assert replica.tokens_per_s(1_000) == pytest.approx(4_000)
    assert replica.tokens_per_s(0) == 0


@settings(deadline=None)
@given(
    st.floats(1e-3, 1e12),
    st.lists(st.tuples(LENGTHS, LENGTHS, DURATIONS), max_size=12),
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1),
)
def test_a_replica_is_monotone_and_finite_whatever_it_is_told(
    prior: float, told: list[tuple[int, int, float]], asked: list[tuple[int, int]]
) -> None:
    replica = PrefillEstimator(prior)
    for tokens, positions, seconds in told:
        replica.observe(tokens, positions, seconds)
        replica.check()
    for tokens, context in asked:
        here = replica.seconds(tokens, context)
        assert 0 <= here < math.inf
        assert here <= replica.seconds(tokens + 1, context)
        assert here <= replica.seconds(tokens, context + 1)
        assert 0 <= replica.tokens_per_s(tokens, context) < math.inf
