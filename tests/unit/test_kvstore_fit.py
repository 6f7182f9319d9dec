"""DurationFit against a twin that keeps every observation and solves from scratch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
import pytest

from kvstore.fit import ANCHOR, CHANGE, EXPLAINED, MEMORY, PRIOR_WEIGHT, SURPRISE, DurationFit


class Twin:
    """The same model, said plainly: weighted rows, and numpy's least squares of them."""

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        self.scales = np.array(scales)
        self.values = np.array(prior) / self.scales
        self.seen: list[tuple[np.ndarray, float]] = []
        self.prior: tuple[np.ndarray, float] | None = None
        self.learned = 0
        self.aside: list[tuple[np.ndarray, float]] = []
        self.side = 0

    def predict(self, features: Sequence[float] | np.ndarray) -> float:
        return float(np.dot(self.values * self.scales, features))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        one = (np.array(features), seconds)
        ratio = seconds / self.predict(features)
        side = int(ratio > SURPRISE) - int(ratio < 1 / SURPRISE)
        if side == 0:
            self.learn([*self.aside[:1], one])
            self.aside = self.aside[1:]
            return
        if self.aside and side != self.side:
            self.learn(self.aside)
            self.aside = []
        self.aside, self.side = [*self.aside, one], side
        if len(self.aside) == CHANGE:
            self.change(self.aside)
            self.aside = []

    def learn(self, those: list[tuple[np.ndarray, float]]) -> None:
        for features, seconds in those:
            self.prior = self.prior or (features, self.predict(features))
            self.learned += 1
            self.seen = [*self.seen, (features, seconds)][-MEMORY:]
        self.solve(self.values)

    def factor(self, those: list[tuple[np.ndarray, float]]) -> float:
        return float(np.median([seconds / self.predict(features) for features, seconds in those]))

    def change(self, those: list[tuple[np.ndarray, float]]) -> None:
        before, first = self.values, not self.seen
        self.learn(those)
        if not first:
            largest = np.min([s / np.maximum(f * self.scales, 1e-9) for f, s in self.seen], axis=0)
            for _ in range(10):
                self.solve(np.maximum(self.values, largest))
            if 1 / EXPLAINED < self.factor(those) < EXPLAINED:
                return
        self.values = before
        self.values = before * self.factor(those)
        self.seen = those
        self.learned = 10_000
        self.solve(self.values)

    def solve(self, steps: np.ndarray) -> None:
        size = len(self.values)
        rows = [(1.0, *one) for one in self.seen]
        if self.prior:
            rows.append((2 * PRIOR_WEIGHT * 0.5**self.learned, *self.prior))
        total = sum(weight for weight, *_ in rows)
        matrix, target = [], []
        for weight, features, seconds in rows:
            expected = self.predict(features)
            matrix.append(math.sqrt(weight) * features * self.scales / expected)
            target.append(math.sqrt(weight) * float(np.clip(seconds / expected, 1 / SURPRISE, SURPRISE)))
        anchors = np.sqrt(ANCHOR * total) / np.maximum(steps, 1)
        a, y = np.vstack([*matrix, np.diag(anchors)]), np.array([*target, *(anchors * self.values)])
        best, least = self.values, math.inf
        for free in chain.from_iterable(combinations(range(size), count) for count in range(1, size + 1)):
            part, *_ = np.linalg.lstsq(a[:, free], y, rcond=None)
            values = np.zeros(size)
            values[list(free)] = part
            loss = float(np.square(a @ values - y).sum())
            if part.min() >= 0 and loss < least * (1 - 1e-12):
                best, least = values, loss
        self.values = best


@pytest.mark.parametrize("seed", range(4))
def test_it_is_as_the_twin_says(seed: int) -> None:
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
