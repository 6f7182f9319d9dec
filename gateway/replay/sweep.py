"""Our placement for a range of epsilon: what less duplication costs in balance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from gateway.replay.result import Result, Tally
from gateway.replay.scenario import Scenario

EPSILONS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

Player = Callable[[Scenario, str, str], Tally]
"""Replays a policy of this name on a fleet, under a label for the progress bar."""


class Point(NamedTuple):
    """One value of epsilon and what came of it."""

    epsilon: float
    result: Result

    def fields(self) -> dict[str, object]:
        """What is printed as JSON."""
        return {"epsilon": self.epsilon, **msgspec.to_builtins(self.result)}


def with_placement(scenario: Scenario, **settings: float) -> Scenario:
    """The same fleet with other constants of placement."""
    return msgspec.structs.replace(scenario, placement=msgspec.structs.replace(scenario.placement, **settings))


def sweep(scenario: Scenario, play: Player) -> Iterator[Point]:
    """One replay after the other."""
    for epsilon in EPSILONS:
        tally = play(with_placement(scenario, eps=epsilon), "ours", f"epsilon {epsilon:g}")
        yield Point(epsilon, tally.result("ours"))
