"""What came of each search for blocks: the last ones in full, all of them in sum."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from kvstore.bounds import MAX_TEXT, clipped
from kvstore.messages import FetchOutcome, FetchRecord
from replica_agent.kv.decision import Prediction

KEPT = 1_000

BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram of fetch durations."""


NOTHING = Prediction(0.0, 0.0, 0.0)


@dataclass
class Steps:
    """Seconds of each step of a fetch; 0 for one that was not reached."""

    lease_s: float = 0.0
    move_s: float = 0.0
    verify_s: float = 0.0
    confirm_s: float = 0.0

    @property
    def total_s(self) -> float:
        """From asking for the lease to the owner's word that it held."""
        return self.lease_s + self.move_s + self.verify_s + self.confirm_s


@dataclass
class Account:
    """What one search has learned so far; becomes a FetchRecord when it is over."""

    request: str
    gateway_request: str
    source: str
    block_tokens: int
    block_bytes: int
    began: float
    transport: str = ""
    asked: int = 0
    own: int = 0
    moved: int = 0
    failed: int = 0
    predicted: Prediction = NOTHING
    decide_s: float = 0.0


class FetchLog:
    """Owns the last records and the sums over all of them, and tells `listener` of each; used on one event loop."""

    def __init__(
        self,
        replica: str,
        listener: Callable[[FetchRecord], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.outcomes: Counter[FetchOutcome] = Counter(dict.fromkeys(FetchOutcome, 0))
        self.bytes_moved = 0
        self.blocks_loaded = 0
        self.seconds = 0.0
        self._replica = replica
        self._listener = listener
        self._clock = clock
        self._wall_clock = wall_clock
        self._records: deque[FetchRecord] = deque(maxlen=KEPT)
        self._durations = [0] * (len(BUCKETS_S) + 1)

    def add(
        self, account: Account, steps: Steps, outcome: FetchOutcome, reason: str, loaded: int = 0, copy_s: float = 0.0
    ) -> FetchRecord:
        """Ends a search. `reason` is one of a bounded set of words; `loaded` blocks were copied in `copy_s` seconds."""
        record = FetchRecord(
            request=clipped(account.request),
            gateway_request=clipped(account.gateway_request),
            at=self._wall_clock(),
            replica=self._replica,
            source=account.source,
            transport=account.transport,
            outcome=outcome,
            reason=clipped(reason, MAX_TEXT),
            block_tokens=account.block_tokens,
            block_bytes=account.block_bytes,
            asked=account.asked,
            own=account.own,
            moved=account.moved,
            loaded=loaded,
            failed=account.failed,
            predicted_fetch_s=account.predicted.fetch_s,
            predicted_rest_s=account.predicted.rest_s,
            predicted_recompute_s=account.predicted.recompute_s,
            decide_s=account.decide_s,
            lease_s=steps.lease_s,
            move_s=steps.move_s,
            verify_s=steps.verify_s,
            confirm_s=steps.confirm_s,
            copy_s=copy_s,
            total_s=self._clock() - account.began,
        )
        self._records.append(record)
        self.outcomes[outcome] += 1
        self.blocks_loaded += loaded
        self._listener(record)
        return record

    def moved(self, size: int, seconds: float) -> None:
        """A fetch brought `size` bytes; it counts once, however many requests waited for it."""
        self.bytes_moved += size
        self.seconds += seconds
        self._durations[sum(seconds > bound for bound in BUCKETS_S)] += 1

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """Fetches by duration, cumulated as Prometheus has them: upper bound, count."""
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        return list(zip(bounds, accumulate(self._durations), strict=True))

    def page(self) -> dict[str, Any]:
        """`GET /v1/fetches`: the last records, newest first, and the sums since the agent's start."""
        return {
            "fetches": [msgspec.to_builtins(record) for record in reversed(self._records)],
            "totals": {
                "records": sum(self.outcomes.values()),
                "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
                "transfers": sum(self._durations),
                "bytes_moved": self.bytes_moved,
                "transfer_seconds": self.seconds,
                "blocks_loaded": self.blocks_loaded,
            },
        }

    def check(self) -> None:
        """Asserts that what is kept is the end of what was counted."""
        kept = len(self._records)
        assert kept == min(KEPT, sum(self.outcomes.values()))
        assert min(self.outcomes.values()) >= 0
