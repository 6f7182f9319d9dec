"""What is known of one way that KV comes, for as long as something comes."""

from __future__ import annotations

import math

from kvstore.cost import LinkEstimate, LinkEstimator

MEMORY_S = 300.0
"""A link that nothing came over for so long may be another than it was: otherwise one that once was slow is never tried
again, by an agent that fetches only where that pays."""

FAILURES = 3
"""So many attempts in a row at which nothing came, without taking long: then the next are expected to fail as well."""

HELD_BACK_S = 30.0
"""How long that is expected, from the last of them on; then one attempt tells. As long as a refusal of what only an
operator changes is remembered (`peers.REFUSED_FOR_S`)."""

HELD_BACK = LinkEstimate(latency_s=3_600.0, bytes_per_s=1e9)
"""What a link is told to take that nothing is expected to come over: longer than computing any prompt, so that neither
an agent nor a gateway counts on it."""


class Link:
    """Fitted figures of a link, when something last came over it (seconds of the caller's clock), and whether it fails.

    Nothing came for `MEMORY_S`: it is taken to be no slower than the prior, so it is tried. If it takes what it took
    before, all that was known is known again, so that a link which stays slow costs one transfer in that time; else
    what was known is forgotten. Whoever moves KV over it is the only one to mutate it.

    `FAILURES` attempts in a row failed at once: it is `HELD_BACK` for `HELD_BACK_S`, and again after each further one
    until something comes.
    """

    def __init__(self, prior: LinkEstimate) -> None:
        self._prior = prior
        self._estimator = LinkEstimator(prior)
        self._seen: float | None = None
        self._failures = 0
        self._failed = -math.inf

    def fresh(self, now: float) -> bool:
        """Whether something came over it lately."""
        return self._seen is not None and now - self._seen <= MEMORY_S

    def held_back(self, now: float) -> bool:
        """Whether nothing is expected to come over it."""
        return self._failures >= FAILURES and now - self._failed < HELD_BACK_S

    def known(self, now: float) -> bool:
        """Whether there is more to say of it than of any other."""
        return self.held_back(now) or self.fresh(now)

    def estimate(self, now: float) -> LinkEstimate:
        """What it is expected to take now."""
        if self.held_back(now):
            return HELD_BACK
        fitted = self._estimator.estimate
        if self.fresh(now):
            return fitted
        return LinkEstimate(
            min(fitted.latency_s, self._prior.latency_s), max(fitted.bytes_per_s, self._prior.bytes_per_s)
        )

    def observe(self, size: float, seconds: float, now: float, prior: LinkEstimate) -> None:
        """`size` bytes came in `seconds`; `prior` is what would be expected of a link nothing is known of."""
        if not self.fresh(now) and not self._estimator.expects(size, seconds):
            self._estimator = LinkEstimator(prior)
        self._estimator.observe(size, seconds)
        self._prior, self._seen = prior, now
        self._failures = 0

    def failed(self, began: float, now: float) -> None:
        """Nothing came of an attempt that `began` then, and it was over soon. Those under way at once count as one."""
        if began >= self._failed:
            self._failures += 1
            self._failed = now

    def check(self) -> None:
        """See `LinkEstimator.check`; and what failed, failed at some time."""
        assert (self._failures == 0) or math.isfinite(self._failed)
        self._estimator.check()
