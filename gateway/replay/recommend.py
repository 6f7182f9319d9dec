"""Which settings of the gateway suit recorded traffic, and by what evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gateway.replay.scenario import Scenario
from gateway.replay.sweep import EPSILONS, Player, with_placement
from gateway.replay.workload import Workload

MARGINS = (0.0, 0.1, 0.25, 0.5)

WITHIN = 0.02
"""Means that differ by less count as equal: about what the draws of another seed change."""


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of settings and what came of it; names as in `Result`."""

    epsilon: float
    fetch_margin: float
    ttft_mean: float
    ttft_p99: float
    excess_gib_mean: float
    work_max_over_mean: float
    spill_rate: float
    fetched_share: float


class Hot(msgspec.Struct, frozen=True, kw_only=True):
    """The longest prefix that one replica's share of the requests has, and how many replicas held it over time."""

    tokens: int
    requests: float
    copies: float


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """What `replay --recommend` found. `copies` is the mean of a block's, `hot` None where no prefix is; the margin is
    None where replicas cannot fetch. `least_loaded_ttft_mean` is what the same fleet does without any of it."""

    epsilon: float
    copies: float
    hot: Hot | None
    fetch_margin: float | None
    ttft_mean: float
    least_loaded_ttft_mean: float
    tried: list[Try]


class _Attempt(NamedTuple):
    tried: Try
    copies: float
    hot_copies: float


class HotPrefix(NamedTuple):
    """Its last block, how many blocks it has, and how many requests have it."""

    block: int
    blocks: int
    requests: int


def recommend(workload: Workload, scenario: Scenario, play: Player, watched: HotPrefix | None) -> Recommendation:
    """Tries values of epsilon, and then margins. `play` watches the last block of `watched`.

    Of settings whose mean TTFT is within `WITHIN` of the least, the one with the least duplication wins.
    """

    def attempt(epsilon: float, margin: float) -> _Attempt:
        label = f"epsilon {epsilon:g}" + (f", margin {margin:g}" if scenario.link else "")
        tally = play(with_placement(scenario, eps=epsilon, fetch_margin=margin), "ours", label)
        result = tally.result("ours")
        fields = {name: getattr(result, name) for name in Try.__struct_fields__ if hasattr(result, name)}
        return _Attempt(Try(epsilon=epsilon, fetch_margin=margin, **fields), result.copies, tally.watched_copies)

    margin = scenario.placement.fetch_margin
    attempts = [attempt(epsilon, margin) for epsilon in EPSILONS]
    best = _best(attempts)
    if scenario.link is not None:
        others = [attempt(best.tried.epsilon, other) for other in MARGINS if other != margin]
        attempts += others
        best = _best([best, *others])
    hot = None
    if watched is not None:
        share = watched.requests / len(workload)
        hot = Hot(tokens=watched.blocks * workload.block, requests=share, copies=best.hot_copies)
    return Recommendation(
        epsilon=best.tried.epsilon,
        copies=best.copies,
        hot=hot,
        fetch_margin=best.tried.fetch_margin if scenario.link is not None else None,
        ttft_mean=best.tried.ttft_mean,
        least_loaded_ttft_mean=play(scenario, "least-loaded", "least-loaded").result("least-loaded").ttft_mean,
        tried=[each.tried for each in attempts],
    )


def hot_prefix(workload: Workload, replicas: int) -> HotPrefix | None:
    """The longest prefix of at least one request in `replicas`, None where there is none."""
    counts = Counter(block for chain in workload.chains for block in chain)
    found: HotPrefix | None = None
    for chain in workload.chains:
        depth = found.blocks if found else 0
        # Counts only fall along a chain, so what is hot at some depth is hot above it.
        while depth < len(chain) and counts[chain[depth]] * replicas >= len(workload):
            depth += 1
            found = HotPrefix(chain[depth - 1], depth, counts[chain[depth - 1]])
    return found


def _best(attempts: Sequence[_Attempt]) -> _Attempt:
    most = min(each.tried.ttft_mean for each in attempts) * (1 + WITHIN)
    return min((each for each in attempts if each.tried.ttft_mean <= most), key=lambda each: each.tried.excess_gib_mean)
