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


def judge(scattered: Phase, routed: Phase, spill: Spill) -> list[Verdict]:
    """All verdicts, in the order of the scenario."""
    return [
        Verdict(
            routed.uncached_followups * FEWER <= scattered.uncached_followups,
            f"uncached tokens of follow-ups: {routed.uncached_followups:,} routed, "
            f"{scattered.uncached_followups:,} scattered (at most 1/{FEWER})",
        ),
        *(_recounted(phase) for phase in (scattered, routed)),
        *_spilled(spill),
    ]


def _recounted(phase: Phase) -> Verdict:
    ledger, engines = phase.recount.ledger_bytes, phase.recount.engines_bytes
    return Verdict(
        phase.recount.equal,
        f"{phase.name}: the ledger's excess equals the engines' own block tables: {mib(ledger)}, {mib(engines)}",
    )


def _spilled(spill: Spill) -> list[Verdict]:
    where = {answer.replica for answer in spill.spilled}
    return [
        Verdict(
            where == {spill.next} and len(spill.spilled) < len(spill.burst),
            f"{len(spill.spilled)} of {len(spill.burst)} spilled from {spill.home} to {spill.next}, the ring's next",
        ),
        Verdict(spill.after.replica == spill.home, f"the question after the burst came home to {spill.after.replica}"),
    ]
