"""Results as drawings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gateway.plan.plot import Series, line_chart, path_chart
from gateway.replay.result import percentile

_STEPS = 60


class Traded(Protocol):
    """What one value of epsilon led to; names as in `Result`."""

    @property
    def work_max_over_mean(self) -> float: ...

    @property
    def excess_gib_mean(self) -> float: ...


def waits(policies: Iterable[tuple[str, Sequence[float]]]) -> str:
    """Time to first token of each policy, given all of them in ascending order: from the median to the slowest."""
    return line_chart(
        "Time to first token",
        "one request in so many waits longer",
        "seconds",
        [Series(name, _tail(ttft_s)) for name, ttft_s in policies],
    )


def tradeoff(points: Iterable[tuple[float, Traded]]) -> str:
    """Duplication against imbalance, by epsilon."""
    names: dict[tuple[float, float], str] = {}
    for epsilon, found in points:
        place = found.work_max_over_mean, found.excess_gib_mean
        names[place] = f"{names[place]}, {epsilon:g}" if place in names else f"{epsilon:g}"
    return path_chart(
        "Duplication against imbalance, by epsilon",
        "prefill work of the busiest replica over the mean",
        "KV held more than once, GiB",
        [(work, excess_gib, name) for (work, excess_gib), name in names.items()],
    )


def _tail(ttft_s: Sequence[float]) -> list[tuple[float, float]]:
    last = max(2, len(ttft_s))
    places = [2 * (last / 2) ** (step / _STEPS) for step in range(_STEPS + 1)]
    return [(place, percentile(ttft_s, 100 * (1 - 1 / place))) for place in places]
