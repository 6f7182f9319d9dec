"""What an engine's `/metrics` says about its load.

Only the few names that routing needs are looked for; a vLLM answer is some 100 kB of histograms. No prefill speed is
fitted here: `request_prefill_time_seconds` overlaps between requests that are prefilled in one step, and busy time is
not exposed, so tokens over seconds would understate a loaded engine by an unknown factor. Only an engine that tells of
its steps over the KV pool's socket makes `Heartbeat.prefill_tokens_per_s` known; for others gateways fit the speed from
the TTFT they see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_FIELDS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",  # before 0.10
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:cache_config_info": "cache_config",
    "reference_engine:queued_prefill_tokens": "queued_prefill_tokens",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
    "process_start_time_seconds": "start_time",
    "http_requests_total": "resets",
}
_RESETTING = frozenset({"/reset_prefix_cache", "/sleep"})
"""Paths of vLLM that empty its prefix cache; `http_requests_total` counts calls by path."""

_MOST = float(1 << 53)
"""No count that a report can tell is larger."""

_LINE = re.compile(
    rf"^({'|'.join(map(re.escape, _FIELDS))})(?:\{{(.*)\}})? +(\S+)".encode(),
    re.MULTILINE,
)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One look at `/metrics`. Counts are of sequences, `kv_usage` a share, `start_time` a Unix time in seconds;
    `resets` counts the calls that empty the prefix cache.

    What the engine does not tell is None, or 0 for what a load is made of.
    """

    engine: str | None = None
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    queued_prefill_tokens: int | None = None
    block_size: int | None = None
    capacity_blocks: int | None = None
    prompt_tokens: float | None = None
    start_time: float | None = None
    prefix_caching: bool | None = None
    resets: float = 0.0

    @property
    def load(self) -> tuple[int, int, int | None]:
        """What makes a heartbeat urgent when it changes: running, waiting, queued prefill tokens."""
        return self.running, self.waiting, self.queued_prefill_tokens


def parse_metrics(text: bytes, dp_rank: int = 0) -> EngineMetrics:
    """From a Prometheus text page. Of samples labelled `engine` only `dp_rank`'s count; bad numbers are skipped."""
    engine: str | None = None
    found: dict[str, float] = {}
    config: dict[str, str] = {}
    for name, labels, value in _samples(text, dp_rank):
        prefix, _, rest = name.partition(":")
        if rest and engine != "reference_engine":
            engine = prefix
        field = _FIELDS[name]
        if field == "resets" and not _is_reset(labels):
            continue
        if field == "cache_config":
            config = labels
        else:
            found[field] = found.get(field, 0.0) + value
    counts = {field: int(min(max(value, 0.0), _MOST)) for field, value in found.items()}
    return EngineMetrics(
        engine=engine,
        running=counts.get("running", 0),
        waiting=counts.get("waiting", 0),
        kv_usage=found.get("kv_usage", 0.0),
        queued_prefill_tokens=counts.get("queued_prefill_tokens"),
        block_size=_count(config.get("block_size")),
        capacity_blocks=_count(config.get("num_gpu_blocks")),
        prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        prompt_tokens=found.get("prompt_tokens"),
        start_time=found.get("start_time"),
        resets=found.get("resets", 0.0),
    )


def _samples(text: bytes, dp_rank: int) -> Iterator[tuple[str, dict[str, str], float]]:
    for match in _LINE.finditer(text):
        labels = {k.decode(): v.decode(errors="replace") for k, v in _LABEL.findall(match[2] or b"")}
        if labels.get("engine", str(dp_rank)) != str(dp_rank):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if value == value and abs(value) != float("inf"):
            yield match[1].decode(), labels, value


def _is_reset(labels: dict[str, str]) -> bool:
    return labels.get("handler") in _RESETTING and labels.get("method") == "POST" and labels.get("status") == "2xx"


def _count(text: str | None) -> int | None:
    return min(int(text), int(_MOST)) if text is not None and text.isdigit() and len(text) < 20 else None
