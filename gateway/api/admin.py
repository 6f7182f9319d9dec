"""The operator's application: replicas, receipts, fetches, explain, duplication, metrics."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from gateway.api.errors import error_response
from gateway.api.explain import Explain
from gateway.duplication.history import History
from gateway.duplication.ledger import Ledger
from gateway.duplication.report import build_report
from gateway.errors import RequestError
from gateway.fleet.fetches import Fetches, FetchTotals, regret_s
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.identity.identifier import Identifier
from gateway.path.account import Receipts
from gateway.placement.index import PrefixIndex
from kvstore.messages import FetchRecord, Tier


class AdminApp(FastAPI):
    """Served on the admin port, never to clients. Answers are JSON; bytes are bytes and seconds are seconds."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        ledger: Ledger,
        identifier: Identifier,
        history: History,
        receipts: Receipts,
        fetches: Fetches,
        explain: Explain,
        registry: CollectorRegistry,
    ) -> None:
        super().__init__(title="prefix-gateway admin", docs_url=None, redoc_url=None, openapi_url=None)
        self._fleet = fleet
        self._index = index
        self._ledger = ledger
        self._identifier = identifier
        self._history = history
        self._receipts = receipts
        self._fetches = fetches
        self._explain = explain
        self._registry = registry
        self.add_api_route("/health", _health)
        self.add_api_route("/metrics", self._metrics)
        self.add_api_route("/admin/replicas", self._replicas)
        self.add_api_route("/admin/receipts/{request_id:path}", self._receipt)
        self.add_api_route("/admin/fetches", self._fetched)
        self.add_api_route("/admin/explain", self._explained, methods=["POST"])
        self.add_api_route("/admin/duplication", self._duplication)
        self.add_exception_handler(RequestError, _request_error)

    async def _metrics(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _replicas(self) -> Response:
        replicas = [self._describe(replica) for replica in self._fleet.replicas.values()]
        return _json({"replicas": replicas, "identity": self._identifier.modes()})

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
        return _json(build_report(self._ledger, top=max(0, min(top, 1_000)), history=self._history))

    def _describe(self, replica: Replica) -> dict[str, Any]:
        beat = replica.heartbeat
        return {
            "id": replica.id,
            "engine": str(replica.engine),
            "engine_up": replica.engine_up,
            "engine_error": replica.engine_error,
            "models": list(replica.models),
            "agent": str(replica.agent) if replica.agent else None,
            "reporting": replica.reporting,
            "agent_error": replica.agent_error,
            "routed_by": _routed_by(replica),
            "epoch": beat.epoch if beat and replica.reporting else None,
            "held_blocks": self._index.held_blocks(replica.id, Tier.HBM),
            "pool_blocks": self._index.held_blocks(replica.id, Tier.DRAM),
            "fetch": _fetch_state(replica, self._fleet),
            "capacity_blocks": replica.capacity_blocks,
            "block_size": replica.block_size,
            "block_bytes": replica.block_bytes,
            "running_sequences": replica.load.sequences,
            "queued_prefill_tokens": replica.load.prefill_tokens,
            "prefill_tokens_per_s": self._fleet.speed.of(replica.id),
            "engine_load": beat if replica.reporting else None,
        }


def _routed_by(replica: Replica) -> str:
    """What placement knows of this replica, in a word: reports, its own placements (agent lost), or the ring alone."""
    if replica.reporting:
        return "reports"
    return "learned" if replica.agent else "ring"


def _fetch_state(replica: Replica, fleet: Fleet) -> dict[str, Any]:
    """What moving KV to and from this replica is like; `state` says it in words."""
    state = replica.fetch
    if state is None:
        why = "its agent has none, or no engine is connected to it" if replica.reporting else "no reports"
        return {"state": f"no pool: {why}"}
    others = [other.fetch for other in fleet.replicas.values() if other is not replica]
    if not state.acts:
        words = "serves its peers, but only keeps records of what it would fetch"
    elif any(other is not None and other.namespace == state.namespace for other in others):
        words = "fetches from its peers"
    else:
        words = "nothing to fetch from: no other pool has KV of its namespace"
    told: dict[str, Any] = msgspec.to_builtins(state)
    return {"state": words} | told


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
