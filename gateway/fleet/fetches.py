"""What fetches between replicas were expected to cost, and what came of them, as the agents tell it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

import msgspec

from kvstore.messages import FetchOutcome, FetchRecord

KEPT = 1_000

_USED = frozenset({FetchOutcome.FETCHED, FetchOutcome.LOCAL})
_LOST = frozenset({FetchOutcome.MISSED, FetchOutcome.REFUSED, FetchOutcome.FAILED, FetchOutcome.LATE})


def regret_s(record: FetchRecord) -> float | None:
    """Seconds by which computing everything would have been quicker, 0 when it would not; None where that is unknown.

    A fetch that brought nothing cost the request all the time it took.
    """
    if record.outcome in _USED:
        return max(0.0, record.total_s + record.predicted_rest_s - record.predicted_recompute_s)
    return record.total_s if record.outcome in _LOST else None


class FetchTotals(msgspec.Struct, kw_only=True):
    """Sums over fetches. `regrets` of them have a known `regret_s`; `predicted_s` and `measured_s` are over those that
    ended as they were predicted, so that their quotient says how good the predictions are."""

    count: int = 0
    bytes: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    regrets: int = 0
    regret_s: float = 0.0

    @property
    def predicted_over_measured(self) -> float | None:
        """1 where the predictions are right on average, None before the first."""
        return self.predicted_s / self.measured_s if self.measured_s else None

    def add(self, record: FetchRecord) -> None:
        """Count one more."""
        self.count += 1
        self.bytes += record.moved * record.block_bytes
        if record.outcome in _USED:
            self.predicted_s += record.predicted_fetch_s
            self.measured_s += record.total_s
        regret = regret_s(record)
        if regret is not None:
            self.regrets += 1
            self.regret_s += regret


class Fetches:
    """The last records, newest last, and totals of all.

    Owns at most `limit` records and, for the receipts, which of them belongs to which request of a gateway; a request
    that was fetched for twice (a retry) has its last one. Totals by link are kept for pairs of known `replicas` only:
    the source is a name that somebody sent. Fed by the report streams, on the event loop.
    """

    def __init__(
        self,
        replicas: Collection[str],
        on_record: Callable[[FetchRecord], None] = lambda record: None,
        limit: int = KEPT,
    ) -> None:
        self._replicas = frozenset(replicas)
        self._on_record = on_record
        self._limit = limit
        self._kept: OrderedDict[int, FetchRecord] = OrderedDict()
        self._newest: dict[str, int] = {}
        self._count = 0
        self.by_outcome: dict[FetchOutcome, FetchTotals] = {}
        self.by_link: dict[tuple[str, str], FetchTotals] = {}

    def add(self, record: FetchRecord) -> None:
        """One fetch has ended."""
        self._count += 1
        self._kept[self._count] = record
        if record.gateway_request:
            self._newest[record.gateway_request] = self._count
        if len(self._kept) > self._limit:
            number, oldest = self._kept.popitem(last=False)
            if self._newest.get(oldest.gateway_request) == number:
                del self._newest[oldest.gateway_request]
        self.by_outcome.setdefault(record.outcome, FetchTotals()).add(record)
        if record.source in self._replicas and record.replica in self._replicas:
            self.by_link.setdefault((record.source, record.replica), FetchTotals()).add(record)
        self._on_record(record)

    def of(self, request_id: str) -> FetchRecord | None:
        """The last fetch for a request of this gateway, None when there was none, or it was dropped."""
        number = self._newest.get(request_id)
        return None if number is None else self._kept[number]

    def failed_tokens(self, request_id: str) -> int:
        """Tokens of a request that its engine counted as cached and then could not load."""
        record = self.of(request_id)
        return record.failed * record.block_tokens if record is not None else 0

    def newest(self) -> Iterator[FetchRecord]:
        """All that are kept, newest first; not to be used over an `add`."""
        return reversed(self._kept.values())

    def check(self) -> None:
        """Asserts the bound, that requests name kept records of their own, and that totals count every record once."""
        assert len(self._kept) <= self._limit
        assert all(self._kept[number].gateway_request == request for request, number in self._newest.items())
        assert sum(totals.count for totals in self.by_outcome.values()) == self._count
