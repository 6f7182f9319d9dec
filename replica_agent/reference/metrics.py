"""Prometheus metrics under vLLM's names, so that whatever reads a vLLM reads this engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from replica_agent.reference.sequence import FinishReason

if TYPE_CHECKING:
    from replica_agent.reference.engine import Load

_LABELS = ("model_name", "engine")
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)


class BlockCounts(NamedTuple):
    """Blocks that went to the agent's pool and came from it, in sum."""

    saved: int
    shed: int
    loaded: int
    failed: int


_BLOCK_COUNTS = {
    "kv_saved_blocks": "KV blocks saved in the agent's pool.",
    "kv_shed_blocks": "KV blocks not saved: queue full, reused before they were copied, or the agent went.",
    "kv_loaded_blocks": "KV blocks loaded from the agent's pool.",
    "kv_failed_load_blocks": "KV blocks that the agent promised and that did not come.",
}


class Metrics:
    """Owns one registry. Counters are moved by the compute thread; gauges are read from the engine when scraped."""

    def __init__(self, model: str, block_size: int, num_blocks: int, dtype: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        labels = (model, "0")

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(*labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, _LABELS, registry=self._registry).labels(*labels)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=_SECONDS).labels(*labels)

        self._running = gauge("vllm:num_requests_running", "Sequences being computed.")
        self._waiting = gauge("vllm:num_requests_waiting", "Sequences waiting for blocks or a place in the batch.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use by running sequences, 0 to 1.")
        self._queued = gauge("reference_engine:queued_prefill_tokens", "Prompt tokens to be computed and not cached.")
        self._dropped = gauge("reference_engine:kv_event_batches_dropped", "KV event batches dropped, queue full.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._generation = counter("generation_tokens", "Tokens generated.")
        self._preemptions = counter("num_preemptions", "Sequences preempted for want of blocks.")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._success = Counter(
            "vllm:request_success",
            "Sequences ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._labels = labels
        self._seen = (0, 0, 0)
        info = {
            "block_size": str(block_size),
            "num_gpu_blocks": str(num_blocks),
            "cache_dtype": dtype,
            "enable_prefix_caching": "True",
            "prefix_caching_hash_algo": "sha256",
            "model_name": model,
            "engine": "0",
        }
        Gauge("vllm:cache_config_info", "The KV cache's configuration.", tuple(info), registry=self._registry).labels(
            *info.values()
        ).set(1)

    def watch(self, load: Callable[[], Load], dropped: Callable[[], int]) -> None:
        """Read the gauges from these whenever scraped."""
        self._running.set_function(lambda: load().running)
        self._waiting.set_function(lambda: load().waiting)
        self._usage.set_function(lambda: load().usage)
        self._queued.set_function(lambda: load().queued_prefill_tokens)
        self._dropped.set_function(dropped)

    def watch_blocks(self, counts: Callable[[], BlockCounts]) -> None:
        """Read the counters of saved and loaded blocks from this whenever scraped."""
        self._registry.register(_BlockCollector(counts, self._labels))

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        """A sequence got its first token."""
        self._prompt.inc(prompt_tokens)
        self._ttft.observe(seconds)

    def generated(self) -> None:
        """A token was generated."""
        self._generation.inc()

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """A sequence ended."""
        self._success.labels(*self._labels, reason).inc()
        if reason in ("stop", "length"):
            self._latency.observe(seconds)

    def cache(self, queried: int, hit: int, preemptions: int) -> None:
        """Totals of the scheduler since its start."""
        before, self._seen = self._seen, (queried, hit, preemptions)
        for counter, now, then in zip((self._queries, self._hits, self._preemptions), self._seen, before, strict=True):
            counter.inc(now - then)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)


class _BlockCollector(Collector):
    def __init__(self, counts: Callable[[], BlockCounts], labels: tuple[str, str]) -> None:
        self._counts = counts
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for (name, text), count in zip(_BLOCK_COUNTS.items(), self._counts(), strict=True):
            family = CounterMetricFamily(f"reference_engine:{name}", text, labels=_LABELS)
            family.add_metric(self._labels, count)
            yield family
