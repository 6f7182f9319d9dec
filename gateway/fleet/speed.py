"""How fast a replica prefills, learned from the first tokens that came back."""

from __future__ import annotations

MIN_TOKENS = 64
"""A prefill shorter than this says more about overheads than about speed."""

WEIGHT = 0.2
"""Share of a new observation in the average: about the last ten prefills count."""


class PrefillSpeed:
    """Exponentially weighted prefill speed of one replica, in tokens per second.

    Starts from `initial`; the first observation replaces it. Observations are wall time to first token of requests that
    found no prefill queued before them, so queueing is not mistaken for slowness.
    """

    def __init__(self, initial: float) -> None:
        self.tokens_per_s = initial
        self.observations = 0

    def observe(self, uncached_tokens: int, seconds: float) -> None:
        """One prefill of `uncached_tokens` took `seconds`; ignored when too short to tell anything."""
        if uncached_tokens < MIN_TOKENS or seconds <= 0:
            return
        speed = uncached_tokens / seconds
        self.tokens_per_s = speed if not self.observations else (1 - WEIGHT) * self.tokens_per_s + WEIGHT * speed
        self.observations += 1
