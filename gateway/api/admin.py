"""The operator's application: replicas and their draining, receipts, fetches, explain, duplication, metrics."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from gateway.api.errors import error_response
from gateway.api.explain import Explain
from gateway.api.replica_state import describe
from gateway.duplication.history import History
from gateway.duplication.report import DuplicationReport, Reporter
from gateway.errors import RequestError
from gateway.fleet.fetches import Fetches, FetchTotals, regret_s
from gateway.fleet.fleet import Fleet
from gateway.path.account import Receipts
from gateway.path.identify import Identify
from gateway.placement.index import PrefixIndex
from kvstore.messages import FetchRecord

log = logging.getLogger(__name__)

MOST_LISTED = 1_000


class AdminApp(FastAPI):
    """Served on the admin port, never to clients. Answers are JSON; bytes are bytes and seconds are seconds."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        identify: Identify,
        reporter: Reporter,
        history: History,
        receipts: Receipts,
        fetches: Fetches,
        explain: Explain,
        registry: CollectorRegistry,
    ) -> None:
        super().__init__(title="prefix-gateway admin", docs_url=None, redoc_url=None, openapi_url=None)
        self._fleet = fleet
        self._index = index
        self._identify = identify
        self._reporter = reporter
        self._history = history
        self._receipts = receipts
        self._fetches = fetches
        self._explain = explain
        self._registry = registry
        self.add_api_route("/health", _health)
        self.add_api_route("/metrics", self._metrics)
        self.add_api_route("/admin/replicas", self._replicas)
        # Not POST: a web page that an operator has open could send one here without asking.
        self.add_api_route("/admin/replicas/{replica_id}/drain", self._drain, methods=["PUT"])
        self.add_api_route("/admin/replicas/{replica_id}/drain", self._undrain, methods=["DELETE"])
        self.add_api_route("/admin/receipts/{request_id:path}", self._receipt)
        self.add_api_route("/admin/fetches", self._fetched)
        self.add_api_route("/admin/explain", self._explained, methods=["POST"])
        self.add_api_route("/admin/duplication", self._duplication)
        self.add_api_route("/admin/duplication/prefixes", self._prefixes)
        self.add_api_route("/admin/duplication/replicas", self._shared)
        self.add_api_route("/admin/duplication/history", self._over_time)
        self.add_exception_handler(RequestError, _request_error)

    async def _metrics(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _replicas(self) -> Response:
        replicas = [describe(replica, self._fleet, self._index) for replica in self._fleet.replicas.values()]
        index = {
            "bytes": self._index.nbytes,
            "limit_bytes": self._index.limit_bytes,
            "blocks": len(self._index),
            "evicted_blocks": self._index.evicted_blocks,
        }
        me = self._fleet.me._asdict()
        return _json({"gateway": me, "replicas": replicas, "identity": self._identify.modes(), "index": index})

    async def _drain(self, replica_id: str) -> Response:
        return self._set_draining(replica_id, True)

    async def _undrain(self, replica_id: str) -> Response:
        return self._set_draining(replica_id, False)

    def _set_draining(self, replica_id: str, draining: bool) -> Response:
        """What is true already is done again without effect. Answers the replica's entry of `/admin/replicas`."""
        replica = self._fleet.replicas.get(replica_id)
        if replica is None:
            raise RequestError(404, f"no replica {replica_id!r} is configured", code="not_found")
        if replica.draining != draining:
            replica.draining = draining
            log.info("replica %s %s", replica_id, "takes nothing new" if draining else "takes requests again")
        return _json(describe(replica, self._fleet, self._index))

    async def _receipt(self, request_id: str) -> Response:
        receipt = self._receipts.get(request_id)
        if receipt is None:
            raise RequestError(
                404, f"no receipt for {request_id!r}: unknown, or dropped for newer ones", code="not_found"
            )
        told = msgspec.to_builtins(receipt)
        record = self._fetches.of(request_id)
        if record is not None and record.failed and receipt.cached_tokens is not None:
            told["cached_tokens"] = max(0, receipt.cached_tokens - record.failed * record.block_tokens)
        return _json(told | {"fetched": _record(record) if record is not None else None})

    async def _fetched(self, limit: int = 100) -> Response:
        found = self._fetches
        return _json(
            {
                "fetches": [_record(record) for record in itertools.islice(found.newest(), max(0, limit))],
                "totals": {
                    "by_outcome": {outcome: _totals(totals) for outcome, totals in found.by_outcome.items()},
                    "by_link": [
                        {"source": source, "replica": replica} | _totals(totals)
                        for (source, replica), totals in sorted(found.by_link.items())
                    ],
                },
            }
        )

    async def _explained(self, request: Request) -> Response:
        return _json(await self._explain(await request.body()))

    async def _duplication(self, top: int = 20) -> Response:
        return _json(await self._report(top))

    async def _report(self, top: int) -> DuplicationReport:
        return await self._reporter.report_aside(max(0, min(top, MOST_LISTED)))

    async def _prefixes(self, top: int = 100) -> Response:
        """The shared prefixes alone, as many as are asked for."""
        report = await self._report(top)
        return _json({name: getattr(report, name) for name in ("useful_bytes", "wasted_bytes", "demand", "prefixes")})

    async def _shared(self) -> Response:
        """What each replica holds, and what every two of them both hold."""
        report = await self._report(MOST_LISTED)
        return _json({"replicas": report.replicas, "pairs": report.pairs})

    async def _over_time(self) -> Response:
        """The excess at the end of every interval of the last hour, and the most there was in it; oldest first."""
        now = self._history.now()
        return _json(
            {
                "samples": [
                    {"ago_s": now - each.at_s, "excess_bytes": each.excess_bytes, "peak_bytes": each.peak_bytes}
                    for each in self._history.samples()
                ]
            }
        )


def _record(record: FetchRecord) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(record)
    return told | {"bytes": record.moved * record.block_bytes, "regret_s": regret_s(record)}


def _totals(totals: FetchTotals) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(totals)
    return told | {"predicted_over_measured": totals.predicted_over_measured}


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    status, headers, body = error_response(error)
    return Response(body, status, headers={name.decode(): value.decode() for name, value in headers})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
