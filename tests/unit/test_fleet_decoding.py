"""Decoding's share of a replica's time, learned from prefills of engines whose decoding costs what is known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from replay_support import LLAMA

from gateway.fleet.decoding import DOUBT, KEEP, MEAN_WEIGHT, MOST_SHARE, OUTLIER, DecodeShare, Decoding
from gateway.fleet.others import Load
from gateway.fleet.replica import Replica
from gateway.fleet.speed import FleetSpeed
from gateway.placement.placement import Claims
from gateway.settings import ReplicaSettings

CHUNK = 512


class Engine:
    """Computes prompts in steps of a chunk; each step decodes one token of every sequence, too."""

    def __init__(self, tokens_per_s: float = 40_000.0, each_s: float = 2e-5, token_s: float = 1.5e-8) -> None:
        self.tokens_per_s = tokens_per_s
        self.each_s = each_s
        self.token_s = token_s

    def prefill_s(self, new: int, beside: Decoding) -> float:
        return new / self.tokens_per_s + -(-new // CHUNK) * self.decode_s(beside)

    def decode_s(self, beside: Decoding) -> float:
        return beside.sequences * self.each_s + beside.context * self.token_s

    def share(self, beside: Decoding) -> float:
        return self.decode_s(beside) / (self.decode_s(beside) + CHUNK / self.tokens_per_s)


def traffic(rng: random.Random, count: int, most: int = 128) -> list[tuple[int, Decoding]]:
    """Prompts, and what decodes beside them: more and less in turn, of short conversations and of long ones."""
    at, sequences = [], most // 2
    for _ in range(count):
        sequences = min(max(sequences + rng.randrange(-8, 9), 0), most)
        at.append((CHUNK * rng.randrange(1, 16), Decoding(sequences, sequences * rng.uniform(1_000, 5_000))))
    return at


STATES = [Decoding(20, 60_000), Decoding(64, 200_000), Decoding(64, 60_000), Decoding(128, 400_000)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("noise", "outliers", "within"), [(0.0, 0.0, 0.05), (0.3, 0.05, 0.12)])
def test_the_share_is_that_of_an_engine_whose_cost_is_known(
    seed: int, noise: float, outliers: float, within: float
) -> None:
    rng, engine, speed = random.Random(seed), Engine(), FleetSpeed(2_000.0)
    for turn, (new, beside) in enumerate(traffic(rng, 2_000)):
        seconds = engine.prefill_s(new, beside) * rng.lognormvariate(0, noise)
        if rng.random() < outliers:
            seconds *= rng.uniform(3, 30)
        speed.observe(f"replica-{turn % 4}", new, seconds, beside)
    learned = [speed.decode_share(state) for state in STATES]
    assert learned == pytest.approx([engine.share(state) for state in STATES], abs=within)
    assert engine.share(STATES[-1]) > 0.35
    if not noise:
        assert speed.of("replica-0") == pytest.approx(engine.tokens_per_s, rel=0.05), "and the speed is that without it"


@pytest.mark.parametrize("by", ["sequences", "context"])
def test_whichever_of_the_two_it_is_is_found(by: str) -> None:
    engine = Engine(each_s=1e-4, token_s=0.0) if by == "sequences" else Engine(each_s=0.0, token_s=4e-8)
    rng, share = random.Random(1), DecodeShare()
    for new, beside in traffic(rng, 1_500):
        share.observe("a", new, engine.prefill_s(new, beside), beside)
    assert [share.of(state) for state in STATES] == pytest.approx([engine.share(state) for state in STATES], abs=0.08)


def test_the_share_of_the_replays_physics_is_followed() -> None:
    """There it is not a slope but a step and 1 / (1 - u); what is learned of it is near."""
    rng, share = random.Random(2), DecodeShare()
    for new, beside in traffic(rng, 2_000, most=40):
        true = LLAMA.decode_share(beside.sequences, round(beside.context))
        share.observe("a", new, LLAMA.prefill_s(new, 0) / (1 - true) * rng.lognormvariate(0, 0.3), beside)
    for state in (Decoding(10, 30_000), Decoding(20, 60_000), Decoding(40, 120_000)):
        assert share.of(state) == pytest.approx(LLAMA.decode_share(state.sequences, round(state.context)), abs=0.15)


def test_a_slow_replica_and_a_slow_hour_are_not_decoding() -> None:
    """A replica of half the speed has always twice as much to decode, and an hour in which all is slow has more, too;
    decoding itself costs nothing here."""
    rng, share = random.Random(3), DecodeShare()
    for turn in range(4_000):
        hour = 2.0 if turn > 2_000 else 1.0
        for replica, slow in (("fast", 1.0), ("slow", 2.0)):
            sequences = rng.randrange(20, 30) * slow * hour
            share.observe(replica, 1_000, 0.025 * slow * hour * rng.uniform(0.8, 1.25), Decoding(sequences, 0))
    assert share.of(Decoding(100, 0)) < 0.15
    believed = DecodeShare()
    for _ in range(1_000):
        for slow in (1.0, 2.0):
            believed.observe("one name", 1_000, 0.025 * slow, Decoding(25 * slow, 0))
    assert believed.of(Decoding(100, 0)) > 0.5, "which it would be taken for, were the two not told apart"


def test_nothing_is_believed_without_evidence() -> None:
    share, beside = DecodeShare(), Decoding(50, 100_000)
    assert share.of(beside) == 0.0
    for _ in range(1_000):
        share.observe("a", 1_000, 1.0, beside)
    assert share.of(beside) == share.of(Decoding(500, 10**6)) == 0.0, "what never changes shows nothing"
    share.observe("a", 1_000, 100.0, Decoding(60, 120_000))
    assert share.of(beside) < 0.15, "one prefill is not much"
    for _ in range(50):
        share.observe("a", 1_000, 1.0, Decoding(60, 120_000))
    assert share.of(beside) < 0.05
    assert share.of(Decoding(0, 0)) == 0.0


def test_what_nobody_knows_of_teaches_nothing() -> None:
    """A replica whose agent is away decodes as before; taken for none, that would say that decoding is free."""
    rng, engine, speed = random.Random(5), Engine(), FleetSpeed(2_000.0)
    for turn, (new, beside) in enumerate(traffic(rng, 1_500)):
        speed.observe("a", new, engine.prefill_s(new, beside), beside if turn % 2 else None)
    assert speed.decode_share(None) == 0.0
    assert [speed.decode_share(state) for state in STATES] == pytest.approx(
        [engine.share(state) for state in STATES], abs=0.08
    )


def test_prefills_that_are_faster_beside_decoding_are_no_share() -> None:
    rng, share = random.Random(4), DecodeShare()
    for new, beside in traffic(rng, 500):
        share.observe("a", new, new / 40_000 / (1 + beside.sequences), beside)
    assert share.of(Decoding(128, 400_000)) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_seen_the_share_is_one(seed: int) -> None:
    rng, share = random.Random(seed), DecodeShare()
    for _ in range(3_000):
        scale = 10 ** rng.uniform(-6, 6)
        beside = Decoding(rng.randrange(1 << rng.randrange(1, 20)), rng.random() * 10 ** rng.uniform(0, 9))
        share.observe(rng.choice("abc"), rng.uniform(64, 1e6), scale, beside)
        share.check()
        assert 0 <= share.of(beside) <= MOST_SHARE
        assert 0 <= share.of(Decoding(10**9, 1e15)) <= MOST_SHARE


class Naive:
    """The same from all that was ever seen, by a library's least squares."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, Decoding]] = []

    def slopes(self) -> np.ndarray:
        usual: dict[str, np.ndarray] = {}
        counts: dict[str, int] = {}
        rows, ratios = [], []
        for replica, pace_s, beside in self.seen:
            if replica in usual:
                ratio = min(pace_s / usual[replica][0], OUTLIER)
                rows.append(np.array(beside) - usual[replica][1:])
                ratios.append(ratio - 1)
                pace_s = ratio * usual[replica][0]
            for name, of in ((replica, usual), ("", usual)):
                counts[name] = counts.get(name, 0) + 1
                weight = max(MEAN_WEIGHT, 1 / counts[name])
                of[name] = of.get(name, np.zeros(3)) * (1 - weight) + weight * np.array([pace_s, *beside])
        fade = np.sqrt(KEEP ** np.arange(len(rows))[::-1])
        doubt = np.diag(np.sqrt(DOUBT) * np.maximum(usual[""][1:], 1) / 4)
        rows = np.vstack([np.array(rows).reshape(-1, 2) * fade[:, None], doubt])
        ratios = np.concatenate([np.array(ratios) * fade, [0, 0]])

        def fitted(columns: list[int]) -> np.ndarray:
            found = np.zeros(2)
            found[columns] = np.linalg.lstsq(rows[:, columns], ratios, rcond=None)[0]
            return found

        both = fitted([0, 1])
        if both.min() < 0:
            both = np.maximum(fitted([1] if both[0] < 0 else [0]), 0)
        return both


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_as_good_as_everything_ever_seen(seed: int) -> None:
    rng, share, naive = random.Random(seed), DecodeShare(), Naive()
    engine = Engine(each_s=rng.choice([0, 1e-4]), token_s=rng.choice([-1e-8, 0, 2e-8]))
    for turn, (new, beside) in enumerate(traffic(rng, 300)):
        replica = rng.choice("abc")
        seconds = max(engine.prefill_s(new, beside), 1e-3) * rng.lognormvariate(0, 0.5)
        share.observe(replica, new, seconds, beside)
        naive.seen.append((replica, seconds / new, beside))
        if turn % 37 == 0:
            assert share._slopes == pytest.approx(naive.slopes(), rel=1e-6, abs=1e-12)


def test_nothing_decodes_where_nothing_is_known_to_run() -> None:
    """An old heartbeat must not send the next cold prompt away from an idle home."""
    replica = Replica(ReplicaSettings(id="r", engine="http://127.0.0.1:1"))
    assert replica.view(Claims.REPORTS, 0, 1000.0, decode_share=0.5).decode_share == 0
    ticket = replica.load.admit(10)
    assert replica.view(Claims.REPORTS, 0, 1000.0, decode_share=0.5).decode_share == 0.5
    ticket.finish()
    assert replica.view(Claims.REPORTS, 0, 1000.0, decode_share=0.5).decode_share == 0
    assert replica.view(Claims.REPORTS, 0, 1000.0, Load(1, 0), decode_share=0.5).decode_share == 0.5
