"""One replica while a decision is made."""

from __future__ import annotations

from typing import NamedTuple

from gateway.placement.cost import Terms
from gateway.placement.placement import Candidate, Claims, FetchPlan, ReplicaView


class Reported(NamedTuple):
    """Tokens of the prompt that a replica with a pool reports, in whole blocks; see `gateway.placement.walk.Runs`."""

    resident: int
    usable: int
    served: int


NO_POOL = Reported(0, 0, 0)


class Option:
    """A replica that may be chosen; lives for one decision. `rank_s` is what replicas are compared by; see `placer`.

    `cached` tokens need no computing there, as far as is known; what `fetch` brings, if anything, comes after them.
    `reported_tokens` are in HBM by the replica's own word; all else is what that is worth.
    `evicted` is what making room costs, in tokens of prefill.
    """

    __slots__ = (
        "cached",
        "claims",
        "evicted",
        "fetch",
        "rank_s",
        "reported",
        "reported_tokens",
        "terms",
        "units",
        "usable",
        "view",
        "within",
    )

    def __init__(
        self, view: ReplicaView, claims: Claims, units: int, cached: int, evicted: float, terms: Terms
    ) -> None:
        self.view = view
        self.claims = claims
        self.units = units
        self.cached = cached
        self.reported = NO_POOL
        self.reported_tokens = 0
        self.fetch: FetchPlan | None = None
        self.evicted = evicted
        self.terms = terms
        self.rank_s = terms.total_s
        self.usable = True
        self.within = False

    @property
    def predicted(self) -> int:
        """Tokens of the prompt that will not be computed there."""
        if self.fetch is not None and self.fetch.counted:
            return self.reported.usable + self.fetch.tokens
        return self.cached

    @property
    def pooled(self) -> int:
        """Tokens reported that are in the pool of the replica's own agent and not in its HBM."""
        return self.reported.usable - self.reported.resident

    def candidate(self, position: int) -> Candidate:
        """What is told of it, at this position of the walk."""
        terms, fetch = self.terms, self.fetch
        return Candidate(
            replica=self.view.id,
            ring_position=position,
            claims=self.claims,
            reported_tokens=self.reported_tokens,
            trust=self.view.trust,
            cached_tokens=self.cached,
            pool_tokens=0 if self.reported is NO_POOL else self.pooled,
            fetch_source=fetch.source if fetch else "",
            fetch_tokens=fetch.tokens if fetch else 0,
            fetch_s=fetch.seconds if fetch else 0.0,
            queue_s=terms.queue_s,
            prefill_s=terms.prefill_s,
            eviction_s=terms.eviction_s,
            cost_s=terms.total_s,
            within_bound=self.within,
        )
