"""Results for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.plan.text import figure, table
from gateway.replay.recommend import Recommendation
from gateway.replay.replay import speedup
from gateway.replay.result import Result
from gateway.replay.scenario import Scenario
from gateway.replay.sweep import Point
from gateway.replay.workload import Workload

HEADERS = (
    "policy",
    "hit %",
    "fetched %",
    "mean s",
    "p50 s",
    "p90 s",
    "p99 s",
    "copies",
    "excess GiB",
    "at most",
    "work",
    "spill %",
)


def results(found: Sequence[Result]) -> list[str]:
    """A line for each policy."""
    return table(HEADERS, [[result.policy, *_figures(result)] for result in found], left=1)


def sweep(points: Sequence[Point]) -> list[str]:
    """A line for each value of epsilon."""
    return table(["epsilon", *HEADERS[1:]], [[f"{point.epsilon:g}", *_figures(point.result)] for point in points])


def recommendation(found: Recommendation) -> list[str]:
    """What was tried, and what follows from it."""
    rows = [
        [
            f"{each.epsilon:g}",
            f"{each.fetch_margin:g}",
            figure(each.ttft_mean),
            figure(each.ttft_p99),
            f"{each.excess_gib_mean:.1f}",
            f"{each.work_max_over_mean:.2f}",
            f"{100 * each.spill_rate:.1f}",
            f"{100 * each.fetched_share:.2f}",
        ]
        for each in found.tried
    ]
    headers = ["epsilon", "margin", "mean s", "p99 s", "excess GiB", "work", "spill %", "fetched %"]
    lines = [*table(headers, rows), "", f"placement.epsilon: {found.epsilon:g}"]
    if found.fetch_margin is not None:
        lines.append(f"fetch.margin: {found.fetch_margin:g}")
    lines += [
        f"copies: {found.copies:.2f} of a block in the mean",
        f"mean TTFT: {figure(found.ttft_mean)} s, against {figure(found.least_loaded_ttft_mean)} s of least-loaded",
    ]
    if (hot := found.hot) is not None:
        lines.append(
            f"hot prefix: {hot.tokens:,} tokens that {100 * hot.requests:.0f}% of the requests begin with, on "
            f"{hot.copies:.1f} replicas in the mean"
        )
    return lines


def describe(workload: Workload, scenario: Scenario) -> list[str]:
    """What was replayed, and on what."""
    pace = speedup(workload, scenario)
    span_s = workload.times[-1] / pace
    told = f"reports {scenario.report_delay_s:g} s old" if scenario.report_delay_s else "reports without delay"
    error = f"estimates off by {scenario.estimate_error:g}" if scenario.estimate_error else "exact estimates"
    link = f"{scenario.link.bytes_per_s / 1e9:g} GB/s between replicas" if scenario.link else "no fetching"
    link += ", which keep what peers read" if scenario.link and scenario.keeps_copies else ""
    gateways = f"{scenario.gateways} gateway{'s' if scenario.gateways > 1 else ''}"
    lines = [
        f"{len(workload):,} requests in {len(set(workload.sessions)):,} sessions over {span_s:,.0f} s "
        f"({pace:.3g} times the recorded pace), {sum(workload.tokens):,} prompt tokens",
        f"{scenario.replicas} replicas of {scenario.physics.name}, {scenario.cache_tokens:,} tokens of KV each; "
        f"{gateways}, {told}, {error}, {link}",
    ]
    if workload.assumed:
        lines.append(f"{workload.assumed:,} requests do not say how long their answer was; see docs/replay.md")
    return lines


def _figures(result: Result) -> list[str]:
    return [
        f"{100 * result.hit_rate:.2f}",
        f"{100 * result.fetched_share:.2f}",
        *(figure(each) for each in (result.ttft_mean, result.ttft_p50, result.ttft_p90, result.ttft_p99)),
        f"{result.copies:.2f}",
        f"{result.excess_gib_mean:.1f}",
        f"{result.excess_gib_max:.1f}",
        f"{result.work_max_over_mean:.2f}",
        f"{100 * result.spill_rate:.1f}",
    ]
