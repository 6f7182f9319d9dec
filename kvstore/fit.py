"""A linear model of durations, fitted as they come in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, combinations
from statistics import median

FADE = 0.98
"""What is left of an observation's weight when the next one comes: about the last fifty count."""

PRIOR_WEIGHT = 4.0
"""Observations that the prior is worth. Like them it fades."""

SURPRISE = 2.0
"""An observation this many times above or below what was expected is an outlier, or the first sign of a change."""

CHANGE = 3
"""Surprises in one direction that are a change: the fit starts over from these."""

ANCHOR = 3e-3
"""How strongly coefficients stay near where they are, relative to the evidence: it decides where observations are so
alike that they cannot tell one coefficient from another."""

_LEAST_S, _MOST_S = 1e-9, 1e6
_LARGEST = 1e24

Vector = list[float]


class DurationFit:
    """duration = sum of coefficient x feature, with coefficients that are never negative.

    Least squares of the relative error, because noise grows with the duration. One outlier counts as `SURPRISE` times
    what was expected; after `CHANGE` in the same direction the past is forgotten, so that a link that became ten times
    slower is known after a few transfers. The constants are chosen by these properties, which the tests hold them to.

    Owns the weighted sums of products of what was observed. Whoever observes is the only one to mutate it; coefficients
    are valid until the next observation.
    """

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        """`prior` coefficients, at least one above 0; `scales` are values of each that would not surprise, above 0."""
        self._scales = tuple(scales)
        self._scaled = [value / scale for value, scale in zip(prior, scales, strict=True)]
        self._surprises: list[tuple[Sequence[float], float]] = []
        self._side = 0
        self._forget()

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature."""
        return tuple(value * scale for value, scale in zip(self._scaled, self._scales, strict=True))

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for these features; more of a feature never takes less. Finite: features count up to 1e24."""
        bounded = (min(max(feature, 0), _LARGEST) for feature in features)
        return sum(value * feature for value, feature in zip(self.coefficients, bounded, strict=True))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """One duration. What cannot be one (not finite, negative, all features 0) is ignored."""
        plausible = _LEAST_S <= seconds <= _MOST_S and all(0 <= feature <= _LARGEST for feature in features)
        if not plausible or not any(features):
            return
        expected = max(self.predict(features), _LEAST_S)
        ratio = seconds / expected
        if self._changed(features, seconds, ratio):
            self._forget()
            # Anchored to what was before, the few observations left could not move it far enough. As far as is known
            # everything takes so many times longer, or less.
            factor = median(seconds / max(self.predict(features), _LEAST_S) for features, seconds in self._surprises)
            self._scaled = [value * factor for value in self._scaled]
            for features, seconds in self._surprises:
                self._add(features, seconds, expected=seconds)
            self._surprises.clear()
        else:
            if not self._weight:
                # What a prior is worth for single coefficients nobody knows: it is like so many observations of this.
                self._add(features, expected, expected, weight=PRIOR_WEIGHT)
            self._add(features, expected * min(max(ratio, 1 / SURPRISE), SURPRISE), expected, keep=FADE)
        self._solve()

    def check(self) -> None:
        """Coefficients are finite and not negative; no more weight is held than fading leaves."""
        assert all(math.isfinite(value) and value >= 0 for value in self._scaled), self._scaled
        assert 0 <= self._weight <= 1 / (1 - FADE) + PRIOR_WEIGHT, self._weight
        assert all(self._products[at][at] >= 0 for at in range(len(self._scaled))), self._products
        assert len(self._surprises) < CHANGE, self._surprises

    def _changed(self, features: Sequence[float], seconds: float, ratio: float) -> bool:
        """Keeps the surprises in one direction; an observation as expected cancels one. True once there are enough."""
        side = (ratio > SURPRISE) - (ratio < 1 / SURPRISE)
        if side:
            if side != self._side:
                self._surprises.clear()
            self._side = side
            self._surprises.append((tuple(features), seconds))
        elif self._surprises:
            self._surprises.pop(0)
        return len(self._surprises) >= CHANGE

    def _forget(self) -> None:
        size = len(self._scales)
        self._products: list[Vector] = [[0.0] * size for _ in range(size)]
        self._targets: Vector = [0.0] * size
        self._weight = 0.0

    def _add(
        self, features: Sequence[float], seconds: float, expected: float, *, weight: float = 1.0, keep: float = 1.0
    ) -> None:
        x = [feature * scale / expected for feature, scale in zip(features, self._scales, strict=True)]
        target = seconds / expected
        for at, row in enumerate(self._products):
            self._products[at] = [value * keep + weight * x[at] * other for value, other in zip(row, x, strict=True)]
            self._targets[at] = self._targets[at] * keep + weight * x[at] * target
        self._weight = self._weight * keep + weight

    def _solve(self) -> None:
        """The best non-negative coefficients: those of the best choice of which are 0, of which there are few."""
        size = len(self._scaled)
        # Anchored in proportion to itself, a coefficient that explains little of what was seen is hardly moved by it.
        anchors = [ANCHOR * self._weight / max(value, 1.0) ** 2 for value in self._scaled]
        products = [list(row) for row in self._products]
        for at, anchor in enumerate(anchors):
            products[at][at] += anchor
        targets = [self._targets[at] + anchors[at] * self._scaled[at] for at in range(size)]
        best, least = self._scaled, math.inf
        for free in chain.from_iterable(combinations(range(size), count) for count in range(1, size + 1)):
            solution = _solve_linear([[products[a][b] for b in free] for a in free], [targets[a] for a in free])
            if solution is None or min(solution) < 0:
                continue
            loss = -sum(targets[a] * value for a, value in zip(free, solution, strict=True))
            if loss < least:
                chosen = dict(zip(free, solution, strict=True))
                least, best = loss, [chosen.get(at, 0.0) for at in range(size)]
        self._scaled = best


def _solve_linear(matrix: list[Vector], vector: Vector) -> Vector | None:
    """Solves a small positive definite system by elimination; None where rounding has made it something else."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for at in range(size):
        pivot = rows[at][at]
        if not 0 < pivot < math.inf:
            return None
        for below in range(at + 1, size):
            factor = rows[below][at] / pivot
            rows[below] = [value - factor * above for value, above in zip(rows[below], rows[at], strict=True)]
    solution = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][other] * solution[other] for other in range(at + 1, size))
        solution[at] = (rows[at][size] - known) / rows[at][at]
    return solution if all(map(math.isfinite, solution)) else None
