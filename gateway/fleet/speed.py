"""How fast replicas prefill, learned from the first tokens that came back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import fmean

from gateway.fleet.decoding import DecodeShare, Decoding

MIN_TOKENS = 64
"""A prefill shorter than this says more about overheads than about speed."""

FLEET_WEIGHT = 0.2
"""Share of a new observation in the fleet's average: about the last ten prefills count."""

KEPT = 200
SURE = 3.0
"""A replica's own speed is that of its last 200 prefills, once it differs from the fleet's by more than 3 standard
errors: little of the difference at first, nearly all of it where that is several times as large.

One machine's prefills vary by a factor of two from one to the next under load. A replica that looks faster than its
equals by chance, if only by a fiftieth, would draw all cold prompts of an idle fleet away from free caches: with speeds
that were half proven, one of four equal replicas got 70 % of them. Replicas that cannot be told apart have exactly one
speed, and the ring decides between them (`tests/behaviours/test_placement_unequal.py`).
"""

SPREAD, DOUBT = 0.5, 10
"""How far a prefill's speed is taken to be from the next one's, in logarithms, and how many prefills it takes to say
otherwise: the first two of a replica may be alike by chance."""


class FleetSpeed:
    """Prefill speeds of all replicas at a prompt's beginning, in tokens per second, and how decoding slows them.

    Owns the fleet's moving average and, per replica, how far its last prefills were from that average at their time,
    and what is proven of that; decoding's share (`DecodeShare`) is taken off first. Observations are wall time to the
    first token of requests that found no prefill queued before them, so queueing is not mistaken for slowness.
    `initial` stands until the first.
    """

    def __init__(self, initial: float) -> None:
        self._fleet = initial
        self._seen = False
        self._deviations: dict[str, deque[float]] = {}
        self._apart: dict[str, float] = {}
        self._decoding = DecodeShare()

    def observe(self, replica: str, effort: float, seconds: float, beside: Decoding | None = None) -> None:
        """A prefill that was worth so many tokens at a prompt's beginning (`gateway.placement.placement.effort`) took
        `seconds` while the replica decoded `beside` it, if anybody knows; ignored when too short to tell anything."""
        if effort < MIN_TOKENS or seconds <= 0:
            return
        speed = effort / seconds / (1 - self.decode_share(beside))
        if beside is not None:
            self._decoding.observe(replica, effort, seconds, beside)
        if not self._seen:
            self._fleet, self._seen = speed, True
        own = self._deviations.setdefault(replica, deque(maxlen=KEPT))
        own.append(math.log(speed / self._fleet))
        self._apart[replica] = _proven(own)
        self._fleet *= math.exp(FLEET_WEIGHT * math.log(speed / self._fleet))

    def decode_share(self, beside: Decoding | None) -> float:
        """The share of time that decoding takes from prefills at a replica that decodes `beside` them, 0 where nobody
        knows."""
        return 0.0 if beside is None else self._decoding.of(beside)

    def of(self, replica: str) -> float:
        """The replica's speed now, while nothing decodes."""
        return self._fleet * math.exp(self._apart.get(replica, 0.0))


def _proven(values: Collection[float]) -> float:
    """The mean, 0 where chance may have made all of it, and nearer to 0 the more of it that may be."""
    count, mean = len(values), fmean(values)
    squares = sum((value - mean) ** 2 for value in values) + DOUBT * SPREAD**2
    error = math.sqrt(squares / (count - 1 + DOUBT) / count)
    return mean * max(0.0, 1 - (SURE * error / mean) ** 2) if mean else 0.0
