"""The agent's Prometheus page, collected from the parts' own counts when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from replica_agent.replica import Replica


class ReplicaCollector(Collector):
    """Reads one replica's counts; owns nothing."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All `replica_agent_*` families."""
        replica, hub, subscriber = self._replica, self._replica.hub, self._replica.subscriber
        catalogue = replica.catalogue.counts
        counts = subscriber.counts
        for name, help_text, value in (
            ("batches", "Batches of KV events applied.", counts.batches),
            ("malformed", "Batches of KV events that could not be read.", counts.malformed),
            ("other_rank", "Batches of another data-parallel rank, dropped.", counts.other_rank),
            ("gaps", "Holes in the live stream of KV events.", subscriber.gaps),
            ("replays", "Replays asked of the engine.", counts.replays),
            ("failed_replays", "Replays that the engine did not answer.", counts.failed_replays),
            ("orphans_forgotten", "Blocks without a known chain dropped for want of room.", catalogue.forgotten),
            ("dropped_streams", "Report streams closed because the gateway lagged.", hub.overruns),
        ):
            yield CounterMetricFamily(f"replica_agent_{name}", help_text, value=value)
        events = CounterMetricFamily("replica_agent_events", "KV events by type.", labels=["type"])
        for kind, count in replica.events.items():
            events.add_metric([kind], count)
        yield events
        resyncs = CounterMetricFamily("replica_agent_resyncs", "Times the catalogue was emptied.", labels=["reason"])
        for reason, count in replica.resyncs.items():
            resyncs.add_metric([reason], count)
        yield resyncs
        for name, help_text, number in (
            ("blocks", "Blocks reported as held.", replica.catalogue.blocks),
            ("engine_hashes", "Blocks the engine holds by its own names.", catalogue.hashes),
            ("orphans", "Blocks whose chain to the root is unknown.", catalogue.orphans),
            ("unnamed_blocks", "Blocks that cannot be named (images, odd block sizes).", catalogue.unnamed),
            ("epoch", "Epoch in force.", hub.epoch),
            ("streams", "Open report streams.", hub.streams),
            ("engine_up", "Whether the engine answers.", int(replica.engine_state().up)),
            ("subscribed", "Whether the engine's KV events are connected.", int(subscriber.connected)),
            ("event_lag_seconds", "Age of the last batch when it was applied.", replica.event_lag_s),
        ):
            yield GaugeMetricFamily(f"replica_agent_{name}", help_text, value=number)


def metrics_page(registry: CollectorRegistry) -> bytes:
    """The page in Prometheus text format."""
    return generate_latest(registry)


def make_registry(replica: Replica) -> CollectorRegistry:
    """A registry of this replica alone: nothing of the process's other collectors is shown."""
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(replica))
    return registry
