"""What the gateway's parts know now, for Prometheus. Labels are bounded: replicas, modes and models of the fleet."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.duplication.hit_rates import HitRates
from gateway.duplication.ledger import Ledger
from gateway.duplication.recomputed import Recompute
from gateway.fleet.fleet import Fleet
from gateway.fleet.model_profiles import ModelProfiles
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import IdentityMode
from gateway.path.identify import Identify
from gateway.placement.index import PrefixIndex


class StateCollector(Collector):
    """Gauges read from the live objects when scraped."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        ledger: Ledger,
        identifier: Identifier,
        identify: Identify,
        profiles: ModelProfiles,
        hit_rates: HitRates,
        recompute: Recompute,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._ledger = ledger
        self._identifier = identifier
        self._identify = identify
        self._profiles = profiles
        self._hit_rates = hit_rates
        self._recompute = recompute

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._replicas()
        yield from self._duplication()
        yield from self._hits()
        yield GaugeMetricFamily("prefix_gateway_index_bytes", "Memory of the index.", value=self._index.nbytes)
        blocks = len(self._index)
        yield GaugeMetricFamily("prefix_gateway_index_blocks", "Blocks in the index, each once.", value=blocks)
        yield CounterMetricFamily(
            "prefix_gateway_index_evicted_blocks",
            "Blocks that the index dropped for lack of room: placement.index_bytes.",
            value=self._index.evicted_blocks,
        )
        exact = GaugeMetricFamily(
            "prefix_gateway_identity_exact", "1 while token ids are proven equal to the engines'.", labels=["model"]
        )
        modes = GaugeMetricFamily(
            "prefix_gateway_identity_mode",
            "1 for the way in which prompts are identified now: exact, text or hash.",
            labels=["model", "mode"],
        )
        for model, state in self._identify.modes().items():
            exact.add_metric([model], float(state.mode is IdentityMode.EXACT))
            for mode in IdentityMode:
                modes.add_metric([model, mode], float(state.mode is mode))
        yield from (exact, modes)
        yield CounterMetricFamily(
            "prefix_gateway_parity_mismatches",
            "Sampled requests whose token ids were not the engine's.",
            value=self._profiles.mismatches,
        )
        yield CounterMetricFamily(
            "prefix_gateway_identity_worker_kills",
            "Identity workers killed at their deadline.",
            value=self._identifier.stats.deadline_kills,
        )

    def _replicas(self) -> Iterator[Metric]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"prefix_gateway_replica_{name}", text, labels=["replica"])

        up = gauge("up", "1 while the engine answers.")
        reporting = gauge("reporting", "1 while the agent's reports are followed.")
        draining = gauge("draining", "1 while it takes nothing new because an operator says so.")
        warmth = gauge("warmth", "Share of its weight in the load bounds: below 1 after its engine came up.")
        sequences = gauge("running_sequences", "Requests of this gateway in flight.")
        tokens = gauge("queued_prefill_tokens", "Uncached prompt tokens before their first token, deep ones for more.")
        gateways = gauge("other_gateways", "Other gateways that the replica's agent hears of.")
        others = gauge("other_gateways_sequences", "Requests that other gateways have in flight.")
        other_tokens = gauge("other_gateways_prefill_tokens", "Uncached prompt tokens of other gateways that wait.")
        outside = gauge("outside_sequences", "Requests that the engine has from no gateway.")
        announced = CounterMetricFamily(
            "prefix_gateway_load_announcements", "Times the agent was told of this gateway's load.", labels=["replica"]
        )
        unheard = CounterMetricFamily(
            "prefix_gateway_load_announcement_failures", "Times it could not be.", labels=["replica", "why"]
        )
        speed = gauge("prefill_tokens_per_second", "Fitted prefill speed at a prompt's beginning.")
        share = gauge("decode_share", "Share of time that decoding is believed to take from prefills.")
        snapshots = CounterMetricFamily("prefix_gateway_report_snapshots", "Snapshots applied.", labels=["replica"])
        losses = CounterMetricFamily(
            "prefix_gateway_report_losses", "Report streams lost, by what was wrong.", labels=["replica", "why"]
        )
        for replica in self._fleet.replicas.values():
            up.add_metric([replica.id], float(replica.engine_up))
            reporting.add_metric([replica.id], float(replica.reporting))
            draining.add_metric([replica.id], float(replica.draining))
            warmth.add_metric([replica.id], self._fleet.slow_start.warmth(replica.id))
            sequences.add_metric([replica.id], replica.load.sequences)
            tokens.add_metric([replica.id], replica.load.prefill_tokens)
            speed.add_metric([replica.id], self._fleet.speed.of(replica.id))
            share.add_metric([replica.id], self._fleet.speed.decode_share(replica.decoding))
            if replica.others.fresh:
                gateways.add_metric([replica.id], len(replica.others.gateways))
                others.add_metric([replica.id], replica.others.announced.sequences)
                other_tokens.add_metric([replica.id], replica.others.announced.prefill_tokens)
                outside.add_metric([replica.id], replica.others.outside.sequences)
        credit = gauge("trust", "By what its claims are multiplied: 0 in quarantine.")
        judged = CounterMetricFamily(
            "prefix_gateway_trust_judged",
            "Requests whose cached tokens were compared to reports.",
            labels=["replica"],
        )
        contradicted = CounterMetricFamily(
            "prefix_gateway_trust_contradictions", "Those that lacked more than a block of it.", labels=["replica"]
        )
        quarantines = CounterMetricFamily(
            "prefix_gateway_quarantines", "Times that a replica's reports were worth nothing.", labels=["replica"]
        )
        for replica_id in self._fleet.replicas:
            state = self._fleet.trust.state(replica_id)
            credit.add_metric([replica_id], state.credit)
            judged.add_metric([replica_id], state.judged)
            contradicted.add_metric([replica_id], state.contradicted)
            quarantines.add_metric([replica_id], state.quarantines)
        for stream in self._fleet.streams.values():
            snapshots.add_metric([stream.replica_id], stream.snapshots)
            for why, count in stream.losses.items():
                losses.add_metric([stream.replica_id, why], count)
        for announcer in self._fleet.announcers.values():
            announced.add_metric([announcer.replica_id], announcer.announcements)
            for why, count in announcer.failures.items():
                unheard.add_metric([announcer.replica_id, why], count)
        yield from (up, reporting, draining, warmth, sequences, tokens, speed, share)
        yield from (credit, judged, contradicted, quarantines, snapshots, losses)
        yield from (gateways, others, other_tokens, outside, announced, unheard)

    def _hits(self) -> Iterator[Metric]:
        """The terms of the hit rates, so that any window's can be had, and their quotients since the start."""
        tokens = CounterMetricFamily(
            "prefix_gateway_hit_rate_tokens",
            "Over requests whose engine said what was cached: prompt tokens, those that were cached (achieved), that "
            "one endless cache would have had (reachable), and one of the fleet's capacity (ideal, of ideal_prompt).",
            labels=["model", "kind"],
        )
        rate = GaugeMetricFamily(
            "prefix_gateway_hit_rate", "These over the prompt tokens, since the start.", labels=["model", "kind"]
        )
        for each in self._hit_rates.rates():
            terms = {
                "prompt": (each.prompt_tokens, None),
                "achieved": (each.cached_tokens, each.achieved),
                "reachable": (each.reachable_tokens, each.reachable),
                "ideal": (each.ideal_tokens, each.ideal),
                "ideal_prompt": (each.ideal_prompt_tokens, None),
            }
            for kind, (count, quotient) in terms.items():
                tokens.add_metric([each.model, kind], count)
                if quotient is not None:
                    rate.add_metric([each.model, kind], quotient)
        yield from (tokens, rate)

    def _duplication(self) -> Iterator[Metric]:
        labels = ["model", "tier"]
        excess = GaugeMetricFamily("prefix_gateway_kv_excess_bytes", "KV held beyond one copy.", labels=labels)
        held = GaugeMetricFamily("prefix_gateway_kv_held_bytes", "KV held, all copies.", labels=labels)
        for (model, tier), totals in self._ledger.totals().items():
            excess.add_metric([model, tier.name.lower()], totals.excess)
            held.add_metric([model, tier.name.lower()], totals.held)
        stored = CounterMetricFamily(
            "prefix_gateway_stored_tokens", "Tokens whose KV replicas computed, as they report it.", labels=["model"]
        )
        recomputed = CounterMetricFamily(
            "prefix_gateway_recomputed_tokens", "Those of them that another replica held then.", labels=["model"]
        )
        for each in self._recompute.totals():
            stored.add_metric([each.model], each.stored_tokens)
            recomputed.add_metric([each.model], each.recomputed_tokens)
        yield from (excess, held, stored, recomputed)
