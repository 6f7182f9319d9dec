"""How fast replicas prefill, learned from the first tokens that came back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, median

from gateway.fleet.decoding import DecodeShare, Decoding

MIN_TOKENS = 64
"""A prefill shorter than this says more about overheads than about speed."""

FLEET_WEIGHT, OUTLIER = 0.2, math.log(3)
"""Share of a new observation in the fleet's average: about the last ten prefills count. One that is more than three
times off counts as three times: an engine that froze for a minute says nothing of the others."""

KEPT = 200
SURE = 3.0
"""A replica's own speed is that of its last 200 prefills, once it differs from the others' by more than 3 standard
errors: little of the difference at first, nearly all of it where that is several times as large.

One machine's prefills vary by a factor of two from one to the next under load. A replica that looks faster than its
equals by chance, if only by a fiftieth, would draw all cold prompts of an idle fleet away from free caches: with speeds
that were half proven, one of four equal replicas got 70 % of them. Replicas that cannot be told apart have exactly one
speed, and the ring decides between them (`tests/behaviours/test_placement_unequal.py`).
"""

CHANGED, AGREE, APART = 8, 7, math.log(1.5)
"""Where seven of a replica's last eight prefills were each more than 1.5 times faster, or slower, than it is taken to
be, that is no chance: it is not the machine that it was (throttled, say, or alone on its host again), and older ones
say nothing. With noise as above, and without a change, that happens once in a million prefills."""

MEMORY_S = 300.0
"""A replica that computed nothing for so long may be another than it was, and counts as usual: one that was slow is
given cold prompts by nobody, and would not be measured again. The first prefill after it tells which it is."""

LEAST = 3
"""So many prefills of a replica must have been seen: the first one may have waited for a compiler."""

SPREAD, DOUBT = 0.5, 10
"""How far a prefill's speed is taken to be from the next one's, in logarithms, and how many prefills it takes to say
otherwise: the first two of a replica may be alike by chance."""


class _Own:
    """How far one replica's last prefills were from the fleet's average at their time, in logarithms."""

    __slots__ = ("_error", "_last", "_surprises", "mean", "seen")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT)
        self._surprises: deque[int] = deque(maxlen=CHANGED)
        self.mean = 0.0
        self._error = math.inf
        self.seen = -math.inf

    def fresh(self, now: float) -> bool:
        """Whether it computed anything lately."""
        return now - self.seen <= MEMORY_S

    def add(self, deviation: float, usual: float, now: float) -> None:
        """One more."""
        off = deviation - self._proven(usual)
        if not self.fresh(now) and abs(deviation) < abs(off):
            # It is nearer to the others than to what it was.
            self._last.clear()
            self._surprises.clear()
        self.seen = now
        self._last.append(deviation)
        self._surprises.append((off > APART) - (off < -APART))
        if abs(sum(self._surprises)) >= AGREE:
            self._last = deque(list(self._last)[-CHANGED:], maxlen=KEPT)
            self._surprises.clear()
        count, self.mean = len(self._last), fmean(self._last)
        squares = sum((value - self.mean) ** 2 for value in self._last) + DOUBT * SPREAD**2
        self._error = math.sqrt(squares / (count - 1 + DOUBT) / count)

    def beyond(self, usual: float, now: float) -> float:
        """How far it is beyond what is usual, as far as that is proven and may still be so."""
        return self._proven(usual) if self.fresh(now) else 0.0

    def check(self) -> None:
        """Asserts that no more is kept than counts, and that what is known is finite once anything is."""
        assert len(self._last) <= KEPT and len(self._surprises) <= CHANGED
        assert math.isfinite(self.mean) and (not self._last or 0 < self._error < math.inf)

    def _proven(self, usual: float) -> float:
        """0 where chance may have made all of the distance, and nearer to 0 the more of it that may be."""
        distance = self.mean - usual
        if not distance or len(self._last) < LEAST:
            return 0.0
        doubt = SURE * self._error / distance
        return distance * max(0.0, 1 - doubt * doubt)


class FleetSpeed:
    """Prefill speeds of all replicas at a prompt's beginning, in tokens per second, and how decoding slows them.

    Owns the fleet's moving average and, per replica, how far its last prefills were from that average at their time. A
    replica is apart by what is proven of its distance from the median of that over the replicas, so that one slow
    machine makes no favourites among its equals. The average follows what is left of a prefill when that is taken off:
    it is the speed of all that are not apart. Decoding's share (`DecodeShare`) is taken off first.

    Observations are wall time to the first token of requests that found no prefill queued before them, so queueing is
    not mistaken for slowness. `initial` stands until the first.
    """

    def __init__(self, initial: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._average = initial
        self._seen = False
        self._usual = 0.0
        self._own: dict[str, _Own] = {}
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
            self._average, self._seen = speed, True
        own = self._own.get(replica)
        if own is None:
            own = self._own[replica] = _Own()
        deviation, now = math.log(speed / self._average), self._clock()
        own.add(deviation, self._usual, now)
        self._usual = median(each.mean for each in self._own.values() if each.fresh(now))
        left = deviation - own.beyond(self._usual, now)
        self._average *= math.exp(FLEET_WEIGHT * max(-OUTLIER, min(OUTLIER, left)))

    def busy(self, replica: str, effort: float) -> None:
        """A prefill of so many tokens whose time tells nothing, as it waited for others or for KV."""
        if effort >= MIN_TOKENS and (own := self._own.get(replica)) is not None:
            now = self._clock()
            if own.fresh(now):
                own.seen = now

    def decode_share(self, beside: Decoding | None) -> float:
        """The share of time that decoding takes from prefills at a replica that decodes `beside` them, 0 where nobody
        knows."""
        return 0.0 if beside is None else self._decoding.of(beside)

    def of(self, replica: str) -> float:
        """The replica's speed now, while nothing decodes."""
        own = self._own.get(replica)
        return self._average * math.exp(own.beyond(self._usual, self._clock())) if own else self._average

    def check(self) -> None:
        """Asserts that there is a speed, that what is usual lies between what replicas do, and what these assert."""
        assert 0 < self._average < math.inf
        self._decoding.check()
        for own in self._own.values():
            own.check()
        means = [own.mean for own in self._own.values()]
        assert not means or min(means) <= self._usual <= max(means)
