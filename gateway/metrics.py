"""Counts of the gateway's requests and fetches, for Prometheus.

Labels are bounded: replicas, reasons, modes, outcomes and models of the fleet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

if TYPE_CHECKING:
    from gateway.path.account import Receipt
    from kvstore.messages import FetchRecord

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter, which nobody asked for

FETCH_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """Counters fed by finished requests and fetches.

    Owns its registry, so that several gateways can live in one process.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Counter(
            "prefix_gateway_requests",
            "Requests by where they went, why, how they were identified and how they ended.",
            ["replica", "reason", "identity", "outcome"],
            registry=self.registry,
        )
        self._retries = Counter("prefix_gateway_retries", "Attempts beyond a request's first.", registry=self.registry)
        self._fallbacks = Counter(
            "prefix_gateway_identity_fallbacks",
            "Prompts not identified exactly, by reason.",
            ["why"],
            registry=self.registry,
        )
        self._identified = Counter(
            "prefix_gateway_identified_prompts",
            "Prompts by model and by how they were identified: exact, text or hash.",
            ["model", "mode"],
            registry=self.registry,
        )
        self._prompt = Counter("prefix_gateway_prompt_tokens", "Prompt tokens.", ["replica"], registry=self.registry)
        self._cached = Counter(
            "prefix_gateway_cached_tokens",
            "Prompt tokens taken from the replica's cache, as the engine says.",
            ["replica"],
            registry=self.registry,
        )
        self._predicted = Counter(
            "prefix_gateway_predicted_cached_tokens",
            "Prompt tokens expected to be cached, where the engine's own figure is known too.",
            ["replica"],
            registry=self.registry,
        )
        self._error = Histogram(
            "prefix_gateway_prediction_error_tokens",
            "Absolute difference between predicted and actual cached tokens.",
            buckets=(0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384),
            registry=self.registry,
        )
        self._ttft = Histogram(
            "prefix_gateway_ttft_seconds",
            "Time to the first byte of a streamed answer.",
            ["replica"],
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self._fetches = Counter(
            "prefix_gateway_fetches",
            "Fetches that agents reported, whichever gateway asked for them, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self._fetch_bytes = Counter(
            "prefix_gateway_fetch_bytes", "KV that was read from peers, in bytes.", registry=self.registry
        )
        self._fetch_seconds = Histogram(
            "prefix_gateway_fetch_seconds",
            "From the hint to the last block in the engine, where blocks came from a peer.",
            buckets=FETCH_BUCKETS,
            registry=self.registry,
        )

    def fetch_done(self, record: FetchRecord) -> None:
        """Count one fetch that ended."""
        self._fetches.labels(record.outcome).inc()
        self._fetch_bytes.inc(record.moved * record.block_bytes)
        if record.moved and record.loaded:
            self._fetch_seconds.observe(record.total_s)

    def request_done(self, receipt: Receipt) -> None:
        """Count one finished request."""
        replica = receipt.replica or ""
        self._requests.labels(replica, receipt.reason or "", receipt.identity or "", receipt.outcome).inc()
        if len(receipt.tried) > 1:
            self._retries.inc(len(receipt.tried) - 1)
        if receipt.identity is not None:
            self._identified.labels(receipt.model, receipt.identity).inc()
        if receipt.identity_fallback:
            self._fallbacks.labels(receipt.identity_fallback).inc()
        if receipt.stream and receipt.ttft_s is not None:
            self._ttft.labels(replica).observe(receipt.ttft_s)
        if receipt.cached_tokens is None or receipt.prompt_tokens is None:
            return
        predicted = receipt.predicted_cached_tokens or 0
        self._prompt.labels(replica).inc(receipt.prompt_tokens)
        self._cached.labels(replica).inc(receipt.cached_tokens)
        self._predicted.labels(replica).inc(predicted)
        self._error.observe(abs(predicted - receipt.cached_tokens))
