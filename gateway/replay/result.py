"""What a replay came to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.replay.fleet import Choice, Fleet, Outcome

GIB = 1 << 30


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one fleet; what `replay --json` prints a line of.

    `hit_rate` is the share of prompt tokens that the chosen replica had cached, `fetched_share` of those that came from
    a peer. TTFT in seconds. A block that n replicas hold has n copies, n - 1 of them in excess; `copies` is their mean
    and `excess_gib_*` the KV of those in excess, over time. `work_max_over_mean` compares the replicas' prefill time.
    """

    policy: str
    replicas: int
    cache_tokens: int
    seed: int
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    copies: float
    excess_gib_mean: float
    excess_gib_max: float
    work_max_over_mean: float
    spill_rate: float
    fetched_share: float


class Tally:
    """Gathers the figures of one replay. Owns its sums; `add` is called once for each request, in order of time.

    `watched` is a block whose copies are counted, too.
    """

    def __init__(self, fleet: Fleet, watched: int | None = None) -> None:
        self._fleet = fleet
        self._watched = watched
        self._watched_copies = 0
        self._watched_s = 0.0
        self._ttft_s: list[float] = []
        self._spills = self._cached = self._fetched = self._tokens = 0
        self._since = 0.0
        self._copies = self._distinct = 0
        self._copy_s = self._distinct_s = self._span_s = 0.0
        self._excess_most = 0

    def add(self, choice: Choice, outcome: Outcome) -> None:
        """One request has been placed."""
        self._until(outcome.at)
        caches = self._fleet.caches
        self._copies, self._distinct = caches.copies, caches.distinct
        self._excess_most = max(self._excess_most, caches.copies - caches.distinct)
        if self._watched is not None:
            self._watched_copies = caches.held[self._watched].bit_count()
        self._ttft_s.append(outcome.task.prefill_end - outcome.at)
        self._spills += choice.spilled
        self._cached += outcome.cached
        self._fetched += outcome.fetched
        self._tokens += outcome.task.context

    def result(self, policy: str) -> Result:
        """The figures of all that was added."""
        self._until(self._since + 1e-9)  # so that the last state counts, too, and one request is enough
        scenario, workload = self._fleet.scenario, self._fleet.workload
        gib = workload.block * scenario.physics.token_bytes / GIB
        ttft_s = self.ttft_s()
        busy_s = self._fleet.busy_s
        return Result(
            policy=policy,
            replicas=scenario.replicas,
            cache_tokens=scenario.cache_tokens,
            seed=scenario.seed,
            hit_rate=self._cached / self._tokens,
            ttft_mean=sum(ttft_s) / len(ttft_s),
            ttft_p50=percentile(ttft_s, 50),
            ttft_p90=percentile(ttft_s, 90),
            ttft_p99=percentile(ttft_s, 99),
            copies=self._copy_s / self._distinct_s if self._distinct_s else 0.0,
            excess_gib_mean=(self._copy_s - self._distinct_s) / self._span_s * gib,
            excess_gib_max=self._excess_most * gib,
            work_max_over_mean=max(busy_s) / (sum(busy_s) / len(busy_s)),
            spill_rate=self._spills / len(ttft_s),
            fetched_share=self._fetched / self._tokens,
        )

    @property
    def watched_copies(self) -> float:
        """How many replicas held the watched block, over time."""
        return self._watched_s / self._span_s if self._span_s else 0.0

    def ttft_s(self) -> list[float]:
        """Every request's, ascending."""
        return sorted(self._ttft_s)

    def _until(self, now: float) -> None:
        span_s = now - self._since
        self._copy_s += self._copies * span_s
        self._distinct_s += self._distinct * span_s
        self._watched_s += self._watched_copies * span_s
        if self._ttft_s:
            self._span_s += span_s
        self._since = now


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, between its neighbours in proportion."""
    place = (len(ascending) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)
