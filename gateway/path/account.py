"""Last step, in a `finally`: whatever happened, give back what was taken and note what came of it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from gateway.duplication.hit_rates import HitRates
from gateway.fleet.fleet import Fleet
from gateway.fleet.model_profiles import ModelProfiles
from gateway.identity.prompt import IdentityMode
from gateway.metrics import GatewayMetrics
from gateway.path.exchange import Exchange
from gateway.path.place import Place
from gateway.path.request_log import RequestLog
from gateway.placement.placement import FetchPlan, effort


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided about a request and what came of it. Times are seconds, `at` is Unix time.

    `reported_tokens` were in HBM by the replica's own reports, whose worth was `trust`. `cached_tokens` is the engine's
    own figure, None where it gave none; `ttft_s` is the first byte of the body. `fetch`
    is what the placement asked for; what came of it the replica's agent reports (`gateway.fleet.fetches`).
    """

    request_id: str
    at: float
    model: str
    path: str
    stream: bool
    status: int
    outcome: str
    identity: IdentityMode | None
    identity_fallback: str
    replica: str | None
    reason: str | None
    home: str | None
    ring: list[str]
    tried: list[str]
    prompt_tokens: int | None
    predicted_cached_tokens: int | None
    reported_tokens: int | None
    trust: float | None
    cached_tokens: int | None
    fetch: FetchPlan | None
    predicted_ttft_s: float | None
    ttft_s: float | None
    duration_s: float


class Receipts:
    """The last receipts by request id. Owns at most `limit`; the oldest go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Receipt] = OrderedDict()

    def add(self, receipt: Receipt) -> None:
        """Keep one; a repeated request id replaces the one before."""
        self._kept[receipt.request_id] = receipt
        self._kept.move_to_end(receipt.request_id)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def get(self, request_id: str) -> Receipt | None:
        """The receipt, None when unknown or dropped."""
        return self._kept.get(request_id)


class Account:
    """Ends an exchange: frees its place, feeds fitted speed, hit rates, metrics, receipts and the request log."""

    def __init__(
        self,
        fleet: Fleet,
        place: Place,
        profiles: ModelProfiles,
        metrics: GatewayMetrics,
        receipts: Receipts,
        hit_rates: HitRates,
        request_log: RequestLog | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._place = place
        self._profiles = profiles
        self._metrics = metrics
        self._receipts = receipts
        self._hit_rates = hit_rates
        self._request_log = request_log
        self._now = now

    def close(self, exchange: Exchange) -> Receipt:
        """Call once, when the client has been answered or is gone."""
        self._place.unplace(exchange, answered=exchange.outcome == "ok")
        receipt = self._receipt(exchange)
        if exchange.outcome == "ok":
            self._learn(exchange, receipt)
        self._receipts.add(receipt)
        self._metrics.request_done(receipt)
        if self._request_log is not None:
            self._request_log.add(exchange, receipt.at - receipt.duration_s)
        return receipt

    def _learn(self, exchange: Exchange, receipt: Receipt) -> None:
        assert receipt.replica is not None
        replica = self._fleet.replicas[receipt.replica]
        placement = exchange.placement
        assert placement is not None
        moved = placement.fetch is not None or placement.predicted_pool_tokens  # and so not all the time was prefill
        alone = exchange.queue_free and len(exchange.tried) == 1 and exchange.stream and not moved
        if receipt.cached_tokens is not None and receipt.ttft_s is not None:
            uncached = (receipt.prompt_tokens or 0) - receipt.cached_tokens
            work = effort(uncached, receipt.cached_tokens, replica.attention)
            if alone:
                self._fleet.speed.observe(replica.id, work, receipt.ttft_s, exchange.beside)
            else:
                self._fleet.speed.busy(replica.id, work)
        if exchange.fed is not None and receipt.cached_tokens is not None:
            cached = max(0, receipt.cached_tokens - self._fleet.failed_tokens(exchange.request_id))
            self._hit_rates.answered(exchange.model, exchange.fed, receipt.prompt_tokens or 0, cached)
        if exchange.identity is not None and exchange.identity.mode is IdentityMode.EXACT:
            assert exchange.prompt is not None
            self._profiles.sample(replica, exchange.prompt)

    def _receipt(self, exchange: Exchange) -> Receipt:
        identity, placement, usage = exchange.identity, exchange.placement, exchange.usage
        return Receipt(
            request_id=exchange.request_id,
            at=self._now(),
            model=exchange.model,
            path=exchange.path,
            stream=exchange.stream,
            status=exchange.status,
            outcome=exchange.outcome,
            identity=identity.mode if identity else None,
            identity_fallback=identity.fallback if identity else "",
            replica=placement.replica if placement else None,
            reason=placement.reason if placement else None,
            home=placement.home if placement else None,
            ring=placement.ring if placement else [],
            tried=exchange.tried,
            prompt_tokens=usage.prompt_tokens if usage else (identity.tokens if identity else None),
            predicted_cached_tokens=placement.predicted_cached_tokens if placement else None,
            reported_tokens=placement.reported_tokens if placement else None,
            trust=placement.trust if placement else None,
            cached_tokens=usage.cached_tokens if usage else None,
            fetch=placement.fetch if placement else None,
            predicted_ttft_s=placement.predicted_ttft_s if placement else None,
            ttft_s=exchange.first_byte_s,
            duration_s=exchange.elapsed(),
        )
