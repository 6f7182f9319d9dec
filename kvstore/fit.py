"""A linear model of durations, fitted as they come in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import chain, combinations, repeat
from operator import mul
from statistics import median
from typing import NamedTuple

MEMORY = 100
"""Observations that count, all alike."""

PRIOR_WEIGHT = 4.0
"""Observations that the prior is worth beside the first one; half as many beside each that follows."""

SURPRISE = 2.0
"""An observation this many times above or below what was expected is an outlier, or the first sign of a change."""

CHANGE = 3
"""Surprises in one direction after which either something that was unknown is known now, or the engine or link is
another than it was."""

EXPLAINED = 1.4
"""The former, if there are coefficients for the past and the surprises by which these, in the median, take less than
so many times what is expected, and more than its inverse."""

ANCHOR = 3e-3
"""How strongly coefficients stay near where they are, relative to the evidence: it decides where observations are so
alike that they cannot tell one coefficient from another."""

_LEAST_S, _MOST_S = 1e-9, 1e6
_LARGEST = 1e24
_SOLUTIONS = 10

Vector = list[float]


class Observation(NamedTuple):
    """What took how long."""

    features: Sequence[float]
    seconds: float


class DurationFit:
    """duration = sum of coefficient x feature, with coefficients that are never negative.

    Least squares of the relative error, because noise grows with the duration. One outlier counts as `SURPRISE` times
    what was expected. Surprises are set aside until one comes that is as expected, or until `CHANGE` in the same
    direction have come. Then, if there are coefficients for these and the past, nothing has changed: something had been
    unknown, the fixed part of a step, say, where only long ones had been seen. If there are none the past is forgotten,
    so that a link that became ten times slower is known after a few transfers. The constants are chosen by these
    properties, which the tests hold them to.

    Observations are kept as they came, not in sums: what an outlier counts as depends on what is known later.

    Owns what was observed. Whoever observes is the only one to mutate it; coefficients are valid until the next
    observation.
    """

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        """`prior` coefficients, at least one above 0; `scales` are values of each that would not surprise, above 0."""
        self._scales = tuple(scales)
        self._scaled = [value / scale for value, scale in zip(prior, scales, strict=True)]
        self._seen: deque[Observation] = deque(maxlen=MEMORY)
        self._surprises: list[Observation] = []
        self._side = 0
        # What a prior is worth for single coefficients nobody knows: it is like so many observations of the first one.
        self._prior: Observation | None = None
        self._prior_weight = 2 * PRIOR_WEIGHT

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature."""
        return tuple(value * scale for value, scale in zip(self._scaled, self._scales, strict=True))

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for these features; more of a feature never takes less. Finite: features count up to 1e24."""
        bounded = (min(max(feature, 0), _LARGEST) for feature in features)
        return sum(map(mul, self.coefficients, bounded), 0.0)

    def expects(self, features: Sequence[float], seconds: float) -> bool:
        """Whether it would be no surprise that these features take so long."""
        return not self._surprising(Observation(features, seconds))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """One duration. What cannot be one (not finite, negative, all features 0) is ignored."""
        plausible = _LEAST_S <= seconds <= _MOST_S and all(0 <= feature <= _LARGEST for feature in features)
        if not plausible or not any(features):
            return
        seen = Observation(tuple(features), seconds)
        side = self._surprising(seen)
        if not side:
            # One as expected cancels one surprise.
            self._learn([*self._surprises[:1], seen])
            del self._surprises[:1]
            return
        if self._surprises and side != self._side:
            self._learn(self._surprises)
            self._surprises.clear()
        self._side = side
        self._surprises.append(seen)
        if len(self._surprises) == CHANGE:
            self._change()
            self._surprises.clear()

    def check(self) -> None:
        """Coefficients are finite and not negative, and no more is kept than counts."""
        assert all(math.isfinite(value) and value >= 0 for value in self._scaled), self._scaled
        assert len(self._seen) <= MEMORY, self._seen
        assert len(self._surprises) < CHANGE, self._surprises
        assert 0 <= self._prior_weight <= 2 * PRIOR_WEIGHT, self._prior_weight

    def _surprising(self, seen: Observation) -> int:
        """1 where it took far longer than is expected, -1 where it took far less, else 0."""
        ratio = self._ratio(seen)
        return (ratio > SURPRISE) - (ratio < 1 / SURPRISE)

    def _ratio(self, seen: Observation) -> float:
        """What it took over what is expected."""
        return seen.seconds / max(self.predict(seen.features), _LEAST_S)

    def _learn(self, observed: Sequence[Observation]) -> None:
        for seen in observed:
            if self._prior is None:
                self._prior = Observation(seen.features, max(self.predict(seen.features), _LEAST_S))
            self._prior_weight /= 2
            self._seen.append(seen)
        self._scaled = self._solution(self._scaled)

    def _change(self) -> None:
        before, known = self._scaled, bool(self._seen)
        self._learn(self._surprises)
        if known:
            # What counts as an outlier depends on the solution, and any coefficient may be the one that was unknown:
            # as large, then, as leaves nothing to the others.
            largest = [
                min(seen.seconds / max(seen.features[at] * scale, _LEAST_S) for seen in self._seen)
                for at, scale in enumerate(self._scales)
            ]
            for _ in range(_SOLUTIONS):
                self._scaled = self._solution([max(pair) for pair in zip(self._scaled, largest, strict=True)])
            if 1 / EXPLAINED < median(map(self._ratio, self._surprises)) < EXPLAINED:
                return
        # Anchored to what was before, the few observations left could not move it far enough. As far as is known
        # everything takes so many times longer, or less.
        self._scaled = before
        factor = median(map(self._ratio, self._surprises))
        self._scaled = [value * factor for value in before]
        self._seen.clear()
        self._seen.extend(self._surprises)
        self._prior_weight = 0.0
        self._scaled = self._solution(self._scaled)

    def _solution(self, likely: Sequence[float]) -> Vector:
        """The best non-negative coefficients: those of the best choice of which are 0, of which there are few. Each may
        as well change by as much as is `likely`: in proportion to itself, one that explains little of what was seen is
        hardly moved by it."""
        size = len(self._scaled)
        counted = [*self._seen, *([self._prior] if self._prior is not None else [])]
        weights = [*repeat(1.0, len(self._seen)), *([self._prior_weight] if self._prior is not None else [])]
        values = self.coefficients
        expected = [max(sum(map(mul, values, seen.features)), _LEAST_S) for seen in counted]
        # A relative error is one of rows divided by what is expected; columns, because sums over them are quick.
        aims = [min(max(seen.seconds / by, 1 / SURPRISE), SURPRISE) for seen, by in zip(counted, expected, strict=True)]
        columns = [
            [seen.features[at] * scale / by for seen, by in zip(counted, expected, strict=True)]
            for at, scale in enumerate(self._scales)
        ]
        weighted = [list(map(mul, column, weights)) for column in columns]
        products = [[sum(map(mul, one, other)) for other in columns] for one in weighted]
        targets = [sum(map(mul, one, aims)) for one in weighted]
        total = sum(weights)
        for at, (value, step) in enumerate(zip(self._scaled, likely, strict=True)):
            anchor = ANCHOR * total / max(step, 1.0) ** 2
            products[at][at] += anchor
            targets[at] += anchor * value
        best, least = self._scaled, math.inf
        for free in chain.from_iterable(combinations(range(size), count) for count in range(1, size + 1)):
            solution = _solve_linear([[products[a][b] for b in free] for a in free], [targets[a] for a in free])
            if solution is None or min(solution) < 0:
                continue
            loss = -sum(targets[a] * value for a, value in zip(free, solution, strict=True))
            if loss < least:
                chosen = dict(zip(free, solution, strict=True))
                least, best = loss, [chosen.get(at, 0.0) for at in range(size)]
        return best


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
