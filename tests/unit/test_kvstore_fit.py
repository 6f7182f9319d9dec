"""DurationFit against a twin that keeps every observation and solves from scratch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
import pytest

from kvstore.fit import ANCHOR, CHANGE, FADE, PRIOR_WEIGHT, SURPRISE, DurationFit


class Twin:
    """The same model, said plainly: a list of weighted observations, and least squares of it at every step."""

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        self.scales = np.array(scales)
        self.values = np.array(prior) / self.scales
        self.seen: list[tuple[float, np.ndarray, float]] = []
        self.surprises: list[tuple[Sequence[float], float]] = []
        self.side = 0

    def predict(self, features: Sequence[float]) -> float:
        return float(np.dot(self.values * self.scales, features))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        expected = max(self.predict(features), 1e-9)
        side = int(seconds / expected > SURPRISE) - int(seconds / expected < 1 / SURPRISE)
        if side:
            self.surprises = [*(self.surprises if side == self.side else []), (features, seconds)]
            self.side = side
        else:
            self.surprises = self.surprises[1:]
        if len(self.surprises) == CHANGE:
            self.values = self.values * np.median([s / max(self.predict(f), 1e-9) for f, s in self.surprises])
            self.seen = [(1.0, np.array(f) * self.scales / s, 1.0) for f, s in self.surprises]
            self.surprises = []
        else:
            x = np.array(features) * self.scales / expected
            if not self.seen:
                self.seen = [(PRIOR_WEIGHT, x, 1.0)]
            self.seen = [(weight * FADE, *rest) for weight, *rest in self.seen]
            self.seen.append((1.0, x, float(np.clip(seconds / expected, 1 / SURPRISE, SURPRISE))))
        self.solve()

    def solve(self) -> None:
        size = len(self.values)
        total = sum(weight for weight, *_ in self.seen)
        anchors = np.sqrt(ANCHOR * total) / np.maximum(self.values, 1)
        matrix = np.vstack([*(math.sqrt(w) * x for w, x, _ in self.seen), np.diag(anchors)])
        target = np.array([*(math.sqrt(w) * y for w, _, y in self.seen), *(anchors * self.values)])
        best, least = self.values, math.inf
        for free in chain.from_iterable(combinations(range(size), count) for count in range(1, size + 1)):
            part, *_ = np.linalg.lstsq(matrix[:, free], target, rcond=None)
            values = np.zeros(size)
            values[list(free)] = part
            loss = float(np.square(matrix @ values - target).sum())
            if part.min() >= 0 and loss < least * (1 - 1e-12):
                best, least = values, loss
        self.values = best


@pytest.mark.parametrize("seed", range(4))
def test_the_sums_are_those_of_all_observations(seed: int) -> None:
    """Links that change, outliers, and lengths that are all alike for a while."""
    rng = random.Random(seed)
    prior, scales = (1e-3, 1e-4, 0.0), (1e-3, 1e-4, 1e-8)
    fit, twin = DurationFit(prior, scales), Twin(prior, scales)
    true = (0.0, 0.0, 0.0)
    alike = 1.0
    for step in range(300):
        if step % 60 == 0:
            true = (10 ** rng.uniform(-4, -1), 10 ** rng.uniform(-5, -3), rng.choice((0.0, 1e-8, 1e-7)))
            alike = rng.choice((1.0, 30.0))
        tokens = rng.uniform(500, 500 * alike)
        features = (1.0, tokens, tokens * rng.uniform(0, 4_000))
        seconds = sum(a * b for a, b in zip(true, features, strict=True)) * rng.lognormvariate(0, 0.2)
        if rng.random() < 0.05:
            seconds *= rng.choice((0.1, 10))
        fit.observe(features, seconds)
        twin.observe(features, seconds)
        fit.check()
        for tokens in (100.0, 1_000.0, 10_000.0):
            asked = (1.0, tokens, tokens * tokens / 2)
            assert fit.predict(asked) == pytest.approx(twin.predict(asked), rel=1e-6)


@pytest.mark.parametrize("factor", [0.001, 0.02, 50.0, 1_000.0])
def test_a_change_by_orders_of_magnitude_is_known_after_a_few(factor: float) -> None:
    fit = DurationFit((3e-3, 1e-9), (3e-3, 1e-9))
    for size in (1e6, 1.2e6, 0.9e6):
        fit.observe((1.0, size), factor * (3e-3 + 1e-9 * size))
    assert fit.predict((1.0, 1e6)) == pytest.approx(factor * 4e-3, rel=0.1)


def test_nonsense_is_ignored() -> None:
    fit = DurationFit((1e-3, 1e-9), (1e-3, 1e-9))
    before = fit.coefficients
    for features, seconds in [
        ((1.0, 5.0), math.nan),
        ((1.0, 5.0), math.inf),
        ((1.0, 5.0), 0.0),
        ((1.0, 5.0), -1.0),
        ((1.0, -5.0), 1.0),
        ((1.0, math.inf), 1.0),
        ((1.0, math.nan), 1.0),
        ((0.0, 0.0), 1.0),
        ((1.0, 10**400), 1.0),
    ]:
        fit.observe(features, seconds)
        fit.check()
    assert fit.coefficients == before


def test_check_finds_what_must_not_be() -> None:
    fit = DurationFit((1.0,), (1.0,))
    fit.observe((1.0,), 1.0)
    fit.check()
    fit._scaled = [-1.0]
    with pytest.raises(AssertionError):
        fit.check()
