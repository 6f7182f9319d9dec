"""What `make demo ARGS=--check` holds the scenario to."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.demo.scenario import Phase, Spill
from gateway.demo.screen import mib

FEWER = 3
"""Routed follow-ups must cost at most this fraction (1/3) of the scattered ones."""


@dataclass(frozen=True)
class Verdict:
    """One thing that was checked, and whether it held."""

    ok: bool
    text: str


def judge(scattered: Phase, routed: Phase, spill: Spill, *, pools: bool) -> list[Verdict]:
    """All verdicts, in the order of the scenario; without pools nothing can have been fetched."""
    return [
        Verdict(
            routed.uncached_followups * FEWER <= scattered.uncached_followups,
            f"uncached tokens of follow-ups: {routed.uncached_followups:,} routed, "
            f"{scattered.uncached_followups:,} scattered (at most 1/{FEWER})",
        ),
        *(_recounted(phase) for phase in (scattered, routed)),
        *judge_spill(spill, pools=pools),
    ]


def judge_spill(spill: Spill, *, pools: bool) -> list[Verdict]:
    """Those of the burst."""
    return [
        _spilled(spill),
        *(_fetched(spill) if pools else ()),
        Verdict(spill.after.replica == spill.home, f"the question after the burst came home to {spill.after.replica}"),
    ]


def _recounted(phase: Phase) -> Verdict:
    ledger, engines = phase.recount.ledger_bytes, phase.recount.engines_bytes
    return Verdict(
        phase.recount.equal,
        f"{phase.name}: the ledger's excess equals the engines' own block tables: {mib(ledger)}, {mib(engines)}",
    )


def _spilled(spill: Spill) -> Verdict:
    where = {answer.replica for answer in spill.spilled}
    return Verdict(
        where == {spill.next} and len(spill.spilled) < len(spill.burst),
        f"{len(spill.spilled)} of {len(spill.burst)} spilled from {spill.home} to {spill.next}, the ring's next",
    )


def _fetched(spill: Spill) -> list[Verdict]:
    """None of those that spilled computed the document, and with the KV of home the next one says what home says."""
    fetches, computed = spill.fetches, sum(answer.uncached for answer in spill.spilled)
    moved, seconds, instead = spill.fetch_totals
    home, following = spill.compared
    return [
        Verdict(
            spill.in_time and all(each.source == spill.home for each in fetches),
            f"they computed {computed:,} tokens: {moved:,} were fetched from {spill.home} in {seconds * 1000:.0f} ms; "
            f"computing them was expected to take {instead * 1000:.0f} ms",
        ),
        Verdict(
            home.text == following.text and home.cached == following.cached > 0,
            f"{home.replica}, which computed the document, and {following.replica}, which fetched it, say the same: "
            f"{home.text!r}",
        ),
    ]
