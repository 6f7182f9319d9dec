"""How fast replicas prefill, learned from the first tokens that came back."""

from __future__ import annotations

import math
from collections import deque

from gateway.fleet.decoding import NO_DECODING, DecodeShare, Decoding

MIN_TOKENS = 64
"""A prefill shorter than this says more about overheads than about speed."""

FLEET_WEIGHT = 0.2
"""Share of a new observation in the fleet's average: about the last ten prefills count."""

KEPT = 200
PRIOR = 50
"""A replica's own speed is the mean of its last 200 prefills, mixed with 50 at the fleet's speed.

One machine's prefills vary by a factor of two from one to the next under load, and a replica that looks faster than its
equals by chance would draw cold prompts away from free caches. With a few prefills seen, replicas of equal hardware
count as equal. The two numbers are chosen by that argument, not by a measurement of their own.
"""


class FleetSpeed:
    """Prefill speeds of all replicas at a prompt's beginning, in tokens per second, and how decoding slows them.

    Owns the fleet's moving average and, per replica, how far its last prefills were from that average at their time;
    decoding's share (`DecodeShare`) is taken off first.
    Observations are wall time to the first token of requests that found no prefill queued before them, so queueing is
    not mistaken for slowness. `initial` stands until the first.
    """

    def __init__(self, initial: float) -> None:
        self._fleet = initial
        self._seen = False
        self._deviations: dict[str, deque[float]] = {}
        self._decoding = DecodeShare()

    def observe(self, replica: str, effort: float, seconds: float, beside: Decoding = NO_DECODING) -> None:
        """A prefill that was worth so many tokens at a prompt's beginning (`gateway.placement.placement.effort`) took
        `seconds` while the replica decoded `beside` it; ignored when too short to tell anything."""
        if effort < MIN_TOKENS or seconds <= 0:
            return
        speed = effort / seconds / (1 - self.decode_share(beside))
        self._decoding.observe(replica, effort, seconds, beside)
        if not self._seen:
            self._fleet, self._seen = speed, True
        self._deviations.setdefault(replica, deque(maxlen=KEPT)).append(math.log(speed / self._fleet))
        self._fleet *= math.exp(FLEET_WEIGHT * math.log(speed / self._fleet))

    def decode_share(self, beside: Decoding) -> float:
        """The share of time that decoding takes from prefills at a replica that decodes `beside` them."""
        return self._decoding.of(beside)

    def of(self, replica: str) -> float:
        """The replica's speed now, while nothing decodes."""
        own = self._deviations.get(replica)
        return self._fleet * math.exp(sum(own) / (len(own) + PRIOR)) if own else self._fleet
