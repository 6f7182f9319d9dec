"""What the doctor finds, and what it learns of a replica on the way."""

from __future__ import annotations

import msgspec

from gateway.fleet.replica import Replica
from kvstore.messages import Hello, Problem

DEPLOYMENT = "deployment"
"""Where a finding is that no single replica has alone."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A `Problem` of one replica (`where` is its id) or of several. Serializes as the `--json` output."""

    where: str
    code: str
    message: str
    fix: str
    note: bool = False


class Patient:
    """One replica under examination. The checks write what they learn; what they do not learn stays as it is here.

    `sources` are vLLM's publishers of KV events by data-parallel rank, None where the engine does not tell.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.engine = ""
        self.version = ""
        self.models: list[str] = []
        self.block_size = 0
        self.sources: dict[int, dict[str, object]] | None = None
        self.agent_answers = False
        self.hello: Hello | None = None
        self.findings: list[Finding] = []

    def report(self, code: str, message: str, fix: str, *, note: bool = False) -> None:
        """Add a finding, unless the same was found in another way."""
        if all(finding.code != code for finding in self.findings):
            self.findings.append(Finding(where=self.replica.id, code=code, message=message, fix=fix, note=note))

    def pass_on(self, problem: Problem) -> None:
        """Add what the replica's agent finds; it knows better than what was found from outside."""
        self.findings = [finding for finding in self.findings if finding.code != problem.code]
        self.report(problem.code, problem.message, problem.fix, note=problem.note)
