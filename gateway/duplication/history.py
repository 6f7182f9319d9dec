"""Duplication over time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from gateway.duplication.ledger import Ledger


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Excess bytes at the end of one interval, and the most there was in it. `at_s` is in the history's clock."""

    at_s: float
    excess_bytes: int
    peak_bytes: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Mean (by time) and maximum of the excess bytes over the last `seconds`."""

    seconds: float
    mean_bytes: float
    max_bytes: int


class History:
    """Samples of a ledger's excess, oldest first; call `sample` at a steady pace, such as every 10 s.

    Owns at most `samples` of them (360: an hour at 10 s) and takes over the ledger's `peak_excess`, so that a peak
    between two samples is not lost.
    """

    def __init__(self, ledger: Ledger, samples: int = 360, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=samples)

    def sample(self) -> Sample:
        """Takes one sample now."""
        taken = Sample(at_s=self._clock(), excess_bytes=self._ledger.excess, peak_bytes=self._ledger.peak_excess)
        self._ledger.peak_excess = taken.excess_bytes
        self._samples.append(taken)
        return taken

    def now(self) -> float:
        """The time by its clock, which samples are stamped with."""
        return self._clock()

    def samples(self) -> list[Sample]:
        """All samples kept, oldest first."""
        return list(self._samples)

    def window(self, seconds: float) -> Window:
        """Mean and maximum of the last `seconds`, up to now; the excess holds from one sample to the next."""
        now = self._clock()
        start = now - seconds
        area, span = 0.0, 0.0
        most = self._ledger.peak_excess
        until = now
        for sample in reversed(self._samples):
            begin = max(sample.at_s, start)
            if until > begin:
                area += sample.excess_bytes * (until - begin)
                span += until - begin
            most = max(most, sample.excess_bytes)
            until = sample.at_s
            if until <= start:
                break
            most = max(most, sample.peak_bytes)
        return Window(seconds=seconds, mean_bytes=area / span if span else float(self._ledger.excess), max_bytes=most)
