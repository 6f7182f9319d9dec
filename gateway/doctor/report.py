"""What the doctor says at the end: for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import msgspec

from gateway.doctor.findings import DEPLOYMENT, Finding, Patient

WIDTH = 118


class ExaminedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as far as it could be seen. Empty or 0 is what is not known."""

    id: str
    engine: str
    engine_name: str
    engine_version: str
    models: list[str]
    block_size: int
    dp_rank: int | None
    agent: str | None
    agent_answers: bool
    pool_connected: bool


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Serializes as the `--json` output. `problems` and `notes` count the findings."""

    ok: bool
    problems: int
    notes: int
    replicas: list[ExaminedReplica]
    findings: list[Finding]


def diagnose(patients: Sequence[Patient], between: Sequence[Finding]) -> Diagnosis:
    """Everything that was found, replica by replica, then between them."""
    findings = [finding for patient in patients for finding in patient.findings] + list(between)
    notes = sum(finding.note for finding in findings)
    return Diagnosis(
        ok=notes == len(findings),
        problems=len(findings) - notes,
        notes=notes,
        replicas=[_examined(patient) for patient in patients],
        findings=findings,
    )


def _examined(patient: Patient) -> ExaminedReplica:
    replica = patient.replica
    return ExaminedReplica(
        id=replica.id,
        engine=str(replica.engine),
        engine_name=patient.engine,
        engine_version=patient.version,
        models=patient.models,
        block_size=patient.block_size,
        dp_rank=replica.dp_rank,
        agent=str(replica.agent) if replica.agent else None,
        agent_answers=patient.agent_answers,
        pool_connected=patient.hello is not None and patient.hello.namespace is not None,
    )


def render_text(diagnosis: Diagnosis) -> str:
    """The diagnosis for a terminal: a line a replica, what is wrong with it below, and how to change it."""
    lines: list[str] = []
    for replica in diagnosis.replicas:
        lines += _wrapped(f"{replica.id}: ", ", ".join(_facts(replica)))
        lines += _about(replica.id, diagnosis)
    between = list(_about(DEPLOYMENT, diagnosis))
    if between:
        lines += ["all replicas together:", *between]
    counted = [_plural(diagnosis.problems, "problem"), _plural(diagnosis.notes, "note")]
    lines.append("")
    lines.append("nothing found" if not diagnosis.findings else ", ".join(counted))
    return "\n".join(lines)


def _facts(replica: ExaminedReplica) -> Iterator[str]:
    rank = "" if replica.dp_rank is None else f" rank {replica.dp_rank}"
    named = f" ({replica.engine_name} {replica.engine_version})".replace(" )", ")") if replica.engine_name else ""
    yield f"engine {replica.engine}{rank}{named}"
    if replica.models:
        yield f"serves {', '.join(replica.models)}"
    if replica.block_size:
        yield f"blocks of {replica.block_size} tokens"
    if replica.agent:
        yield f"agent {replica.agent}{'' if replica.agent_answers else ' (no answer)'}"
        yield "pool connected" if replica.pool_connected else "no pool"


def _about(where: str, diagnosis: Diagnosis) -> Iterator[str]:
    for finding in diagnosis.findings:
        if finding.where == where:
            kind = "note" if finding.note else "PROBLEM"
            yield from _wrapped(f"  {kind} {finding.code}: ", finding.message)
            yield from _wrapped("      fix: ", finding.fix)


def _wrapped(opening: str, text: str) -> list[str]:
    return textwrap.wrap(
        opening + text, WIDTH, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False
    )


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
