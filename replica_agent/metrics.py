"""The agent's Prometheus page, collected from the parts' own counts when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from replica_agent.kv.service import KvService
from replica_agent.replica import Replica

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class ReplicaCollector(Collector):
    """Reads one replica's counts; owns nothing."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Family]:
        """All `replica_agent_*` families, and where there is a pool, those of `kvstore_*`."""
        if self._replica.kv is not None:
            yield from _kv(self._replica.kv)
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
            ("told_again", "Blocks told again that were held (kv_cache_report_mode full).", catalogue.told_again),
            ("surplus_copies", "Copies of blocks taken off: more than the engine has room for.", catalogue.surplus),
            ("dropped_streams", "Report streams closed because the gateway lagged.", hub.overruns),
            ("load_announcements", "Loads that gateways announced.", replica.gateways.announcements),
            (
                "gateways_forgotten",
                "Gateways not heard of for a second, and so not counted.",
                replica.gateways.forgotten,
            ),
            ("gateways_refused", "Loads not taken: too many gateways.", replica.gateways.refused),
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
            ("gateways", "Gateways whose load is known.", len(replica.gateways)),
            ("engine_up", "Whether the engine answers.", int(replica.engine_state().up)),
            ("subscribed", "Whether the engine's KV events are connected.", int(subscriber.connected)),
            ("event_lag_seconds", "Age of the last batch when it was applied.", replica.event_lag_s),
        ):
            yield GaugeMetricFamily(f"replica_agent_{name}", help_text, value=number)


def _kv(kv: KvService) -> Iterator[Family]:
    log, keeper = kv.log, kv.keeper
    outcomes = CounterMetricFamily("replica_agent_fetches", "Searches for blocks by outcome.", labels=["outcome"])
    for outcome, count in log.outcomes.items():
        outcomes.add_metric([outcome.value], count)
    yield outcomes
    yield CounterMetricFamily("replica_agent_fetch_bytes", "Bytes of KV fetched from peers.", value=log.bytes_moved)
    yield HistogramMetricFamily(
        "replica_agent_fetch_seconds",
        "From asking for a lease to the owner's word that it held.",
        buckets=log.buckets,
        sum_value=log.seconds,
    )
    yield GaugeMetricFamily(
        "replica_agent_kv_engine_connected", "Whether the engine uses the KV pool.", value=int(kv.engine_connected)
    )
    slots = GaugeMetricFamily("kvstore_pool_slots", "Slots of the KV pool by state.", labels=["state"])
    if keeper.pool is not None:
        for state, count in keeper.pool.counts._asdict().items():
            slots.add_metric([state], count)
    yield slots
    leases, expired = (0, 0) if keeper.leases is None else (len(keeper.leases), keeper.leases.expired)
    yield GaugeMetricFamily("kvstore_leases", "Leases of peers.", value=leases)
    yield CounterMetricFamily("kvstore_lease_expired", "Leases that ended unreleased.", value=expired)
    wrong = CounterMetricFamily("kvstore_wrong_bytes", "Fetched blocks that were not used.", labels=["kind"])
    for kind, count in kv.wrong_bytes.items():
        wrong.add_metric([kind], count)
    yield wrong


def metrics_page(registry: CollectorRegistry) -> bytes:
    """The page in Prometheus text format."""
    return generate_latest(registry)


def make_registry(replica: Replica) -> CollectorRegistry:
    """A registry of this replica alone: nothing of the process's other collectors is shown."""
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(replica))
    return registry
