"""The duplication report: JSON for `GET /admin/duplication`, text for a terminal."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.duplication.demand import Demand, Held, Load, Traffic
from gateway.duplication.history import History, Window
from gateway.duplication.hit_rates import HitRate, HitRates
from gateway.duplication.ledger import Ledger
from gateway.duplication.prefixes import Shared, SharedPrefix, cut
from gateway.duplication.recomputed import Recompute, Recomputed
from gateway.placement.adaptive_key import AdaptiveKey
from kvstore.messages import Tier

MIB = 1 << 20

_BASIS = {"requests": "the gateway's last requests", "held": "the prompts that are held"}


class ModelDuplication(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one model in one tier: held by all replicas, distinct, and the difference."""

    model: str
    tier: str
    held_bytes: int
    distinct_bytes: int
    excess_bytes: int


class ReplicaDuplication(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes one replica holds in one tier."""

    replica: str
    tier: str
    held_bytes: int


class PairDuplication(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that two replicas both hold in one tier. Pairs overlap: they do not add up to the excess."""

    tier: str
    replicas: tuple[str, str]
    shared_bytes: int


class PrefixDuplication(msgspec.Struct, frozen=True, kw_only=True):
    """One shared prefix (`SharedPrefix`); `key` is its last RouteKey in hexadecimal."""

    key: str
    model: str
    tier: str
    depth_tokens: int
    tokens: int
    copies: int
    needed: int
    holders: list[str]
    excess_bytes: int
    useful_bytes: int
    wasted_bytes: int


class DuplicationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about duplicated KV now. All sizes are bytes; every list is sorted, the largest first.

    `useful_bytes` of the excess are copies that the traffic of their prefixes needs under the bound of placement,
    `wasted_bytes` the rest, which routing by prefix would not make; `demand` says by what the traffic is known: the
    gateway's own `requests`, or, as long as there are none, what is `held`. `recomputed` is prefill that another
    replica had already done, since the gateway's start.
    """

    held_bytes: int
    distinct_bytes: int
    excess_bytes: int
    useful_bytes: int
    wasted_bytes: int
    demand: str
    recomputed: list[Recomputed]
    models: list[ModelDuplication]
    replicas: list[ReplicaDuplication]
    pairs: list[PairDuplication]
    prefixes: list[PrefixDuplication]
    window: Window | None = None
    hit_rates: list[HitRate] = []


class Reporter:
    """Makes reports from these sources; owns none of them.

    `traffic` has the gateway's last requests; where there are none, what is held says whose the traffic is.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        history: History | None = None,
        hit_rates: HitRates | None = None,
        traffic: AdaptiveKey | None = None,
        load: Load | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        self._ledger = ledger
        self._history = history
        self._hit_rates = hit_rates
        self._traffic = traffic
        self._load = load or Load()
        self._recompute = recompute

    def report(self, top: int = 20, window_s: float = 3600.0) -> DuplicationReport:
        """The report now, with the `top` prefixes and pairs, and the mean and maximum of the last `window_s`."""
        figures, demand = self._figures(top, window_s)
        return self._with_prefixes(figures, self._ledger.shared(top, demand, self._load))

    async def report_aside(self, top: int = 20, window_s: float = 3600.0) -> DuplicationReport:
        """The same, with what takes long done in a thread, on copies."""
        figures, demand = self._figures(top, window_s)
        forests, replicas = self._ledger.forests(demand.least), self._ledger.replicas
        cuts = await asyncio.to_thread(lambda: [cut(forest, top, demand, self._load, replicas) for forest in forests])
        return self._with_prefixes(figures, self._ledger.named(cuts, top))

    def _figures(self, top: int, window_s: float) -> tuple[DuplicationReport, Demand]:
        """All but the prefixes, and by what their traffic is known."""
        ledger = self._ledger
        totals = ledger.totals()
        counts, requests = self._traffic.seen() if self._traffic is not None else ({}, 0)
        models = [
            ModelDuplication(
                model=model, tier=_name(tier), held_bytes=t.held, distinct_bytes=t.distinct, excess_bytes=t.excess
            )
            for (model, tier), t in totals.items()
            if t.held
        ]
        replicas = [
            ReplicaDuplication(replica=replica, tier=_name(tier), held_bytes=held)
            for (replica, tier), held in ledger.replica_bytes().items()
        ]
        pairs = [
            PairDuplication(tier=_name(tier), replicas=(first, second), shared_bytes=shared)
            for (tier, first, second), shared in ledger.pairs().items()
        ]
        figures = DuplicationReport(
            held_bytes=sum(t.held for t in totals.values()),
            distinct_bytes=sum(t.distinct for t in totals.values()),
            excess_bytes=ledger.excess,
            useful_bytes=0,
            wasted_bytes=ledger.excess,
            demand="requests" if requests else "held",
            recomputed=self._recompute.totals() if self._recompute is not None else [],
            models=sorted(models, key=lambda m: (-m.excess_bytes, m.model, m.tier)),
            replicas=sorted(replicas, key=lambda r: (-r.held_bytes, r.replica, r.tier)),
            pairs=sorted(pairs, key=lambda p: (-p.shared_bytes, p.replicas, p.tier))[:top],
            prefixes=[],
            window=self._history.window(window_s) if self._history is not None else None,
            hit_rates=self._hit_rates.rates() if self._hit_rates is not None else [],
        )
        return figures, Traffic(counts, requests) if requests else Held()

    @staticmethod
    def _with_prefixes(figures: DuplicationReport, shared: Shared) -> DuplicationReport:
        return msgspec.structs.replace(
            figures,
            useful_bytes=shared.useful_bytes,
            wasted_bytes=figures.excess_bytes - shared.useful_bytes,
            prefixes=[_prefix(prefix) for prefix in shared.top],
        )


def render_text(report: DuplicationReport) -> str:
    """The report as a plain table for a terminal, sizes in MiB."""
    lines = [
        f"KV held     {_mib(report.held_bytes)} MiB",
        f"distinct    {_mib(report.distinct_bytes)} MiB",
        f"duplicated  {_mib(report.excess_bytes)} MiB  ({_share(report.excess_bytes, report.held_bytes)} of held)",
        f"  useful    {_mib(report.useful_bytes)} MiB  copies that their traffic needs, by {_BASIS[report.demand]}",
        f"  wasted    {_mib(report.wasted_bytes)} MiB  routing by prefix would not make these",
    ]
    for each in report.recomputed:
        lines.append(
            f"prefill of {each.model}: {each.stored_tokens:,} tokens, {each.recomputed_tokens:,} of them "
            f"({_share(each.recomputed_tokens, each.stored_tokens)}) while another replica held them"
        )
    if not report.models:
        lines.append(
            "no replica reports any block: is an agent running beside each engine, and has there been traffic?"
        )
    if report.window is not None:
        w = report.window
        lines.append(
            f"last {w.seconds:,.0f} s: mean {_mib(w.mean_bytes).strip()} MiB, most {_mib(w.max_bytes).strip()} MiB"
        )
    for rate in report.hit_rates:
        lines.append(
            f"hit rate of {rate.model}: {_percent(rate.achieved)}, one endless cache {_percent(rate.reachable)}, "
            f"one of the fleet's capacity {_percent(rate.ideal)} ({rate.requests:,} requests)"
        )
    if report.models:
        rows = [
            [m.model, m.tier, _mib(m.held_bytes), _mib(m.distinct_bytes), _mib(m.excess_bytes)] for m in report.models
        ]
        lines += _table(["model", "tier", "held MiB", "distinct MiB", "duplicated MiB"], rows, text_columns=2)
    if report.replicas:
        rows = [[r.replica, r.tier, _mib(r.held_bytes)] for r in report.replicas]
        lines += _table(["replica", "tier", "held MiB"], rows, text_columns=2)
    if report.pairs:
        rows = [[f"{p.replicas[0]} + {p.replicas[1]}", p.tier, _mib(p.shared_bytes)] for p in report.pairs]
        lines += _table(["both hold", "tier", "MiB"], rows, text_columns=2)
    if report.prefixes:
        rows = [
            [
                *(p.key, p.model, p.tier, f"{p.depth_tokens:,}", f"{p.tokens:,}"),
                *(str(p.copies), str(p.needed), _mib(p.excess_bytes), _mib(p.wasted_bytes)),
            ]
            for p in report.prefixes
        ]
        headers = [
            "shared prefix",
            "model",
            "tier",
            "depth tokens",
            "tokens",
            "copies",
            "needed",
            "duplicated MiB",
            "wasted MiB",
        ]
        lines += _table(headers, rows, text_columns=3)
    return "\n".join(lines) + "\n"


def _prefix(prefix: SharedPrefix) -> PrefixDuplication:
    return PrefixDuplication(
        key=f"{prefix.key:016x}",
        model=prefix.model,
        tier=_name(prefix.tier),
        depth_tokens=prefix.depth_tokens,
        tokens=prefix.tokens,
        copies=prefix.copies,
        needed=prefix.needed,
        holders=prefix.holders,
        excess_bytes=prefix.excess_bytes,
        useful_bytes=prefix.useful_bytes,
        wasted_bytes=prefix.wasted_bytes,
    )


def _name(tier: Tier) -> str:
    return tier.name.lower()


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


def _table(headers: list[str], rows: list[list[str]], *, text_columns: int) -> list[str]:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(row: list[str]) -> str:
        cells = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return ["", line(headers), *(line(row) for row in rows)]
