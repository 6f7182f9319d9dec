"""What is known of one way that KV comes, for as long as something comes."""

from __future__ import annotations

from kvstore.cost import LinkEstimate, LinkEstimator

MEMORY_S = 300.0
"""A link that nothing came over for so long may be another than it was: otherwise one that once was slow is never tried
again, by an agent that fetches only where that pays."""


class Link:
    """Fitted figures of a link, and when something last came over it (seconds of the caller's clock).

    Nothing came for `MEMORY_S`: it is taken to be no slower than the prior, so it is tried. If it takes what it took
    before, all that was known is known again, so that a link which stays slow costs one transfer in that time; else
    what was known is forgotten. Whoever moves KV over it is the only one to mutate it.
    """

    def __init__(self, prior: LinkEstimate) -> None:
        self._prior = prior
        self._estimator = LinkEstimator(prior)
        self._seen: float | None = None

    def fresh(self, now: float) -> bool:
        """Whether something came over it lately."""
        return self._seen is not None and now - self._seen <= MEMORY_S

    def estimate(self, now: float) -> LinkEstimate:
        """What it is expected to take now."""
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

    def check(self) -> None:
        """See `LinkEstimator.check`."""
        self._estimator.check()
