"""The tally in vLLM's own log, in its line of "KV Transfer metrics"."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from replica_agent.engines.vllm.tally import add, summary


class PoolStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there where types are checked
    """`data` is what `Tally.take` gives; vLLM adds it up over ranks, and over the time between two lines."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data
