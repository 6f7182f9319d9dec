"""What every way of placing requests is."""

from __future__ import annotations

from gateway.replay.caches import Stored
from gateway.replay.fleet import Choice, Fleet, Outcome
from gateway.replay.knowledge import Knowledge


class Policy:
    """One way of placing requests, as one gateway does it; made anew for every gateway of every replay.

    `choose` is called for each request of its gateway in order, and then `placed` for it; `reported` for what replicas
    report, as late as reports are, where `follows_reports`. With `pooled` the fleet has one cache: a policy that no
    real fleet can have.
    """

    pooled = False
    follows_reports = False

    def __init__(self, fleet: Fleet) -> None:
        """For a gateway of this fleet, at the beginning of a replay."""

    def choose(self, known: Knowledge) -> Choice:
        """Where the request that `known` is about goes."""
        raise NotImplementedError

    def placed(self, known: Knowledge, choice: Choice, outcome: Outcome) -> None:
        """What becomes of it. A policy must not act on what lies in the future before its time has come."""

    def reported(self, at: float, replica: int, stored: Stored) -> None:
        """What a replica took in and let go, told at this time."""
