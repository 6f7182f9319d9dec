"""Replays a workload on a simulated fleet, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from gateway.replay.fleet import Fleet
from gateway.replay.knowledge import Knowledge
from gateway.replay.policies import policy
from gateway.replay.result import Result, Tally
from gateway.replay.scenario import Scenario
from gateway.replay.workload import Workload


def speedup(workload: Workload, scenario: Scenario) -> float:
    """By how much time is compressed to reach the utilization asked for; 1 where none is."""
    if not scenario.utilization:
        return 1.0
    work_s = sum(scenario.physics.prefill_s(tokens, 0) for tokens in workload.tokens)
    return scenario.utilization * scenario.replicas * max(workload.times[-1], 1e-9) / work_s


def replay(workload: Workload, scenario: Scenario, name: str) -> Result:
    """What the policy `name` makes of a workload. Raises SettingsError for an unknown policy.

    The same arguments give the same result, in every process.
    """
    return play(workload, scenario, name).result(name)


def play(
    workload: Workload,
    scenario: Scenario,
    name: str,
    progress: Callable[[int], None] = lambda done: None,
    watched: int | None = None,
) -> Tally:
    """As `replay`, with all that was counted. `progress` is told how many requests are done."""
    make = policy(name)
    fleet = Fleet(workload, scenario, pooled=getattr(make, "pooled", False))
    gateways = []
    for number in range(scenario.gateways):
        own = make(fleet)
        gateways.append((own, Knowledge(fleet, number, own.reported if own.follows_reports else None)))
    tally = Tally(fleet, watched)
    speed = speedup(workload, scenario)
    agenda = [(workload.times[i] / speed, i) for i in workload.starts]
    heapify(agenda)
    done = 0
    while agenda:
        now, request = heappop(agenda)
        own, known = gateways[done % len(gateways)]
        fleet.look(now, request)
        known.look(request)
        choice = own.choose(known)
        outcome = fleet.place(request, choice, known.belief(choice))
        own.placed(known, choice, outcome)
        for _, other in gateways:
            other.learn(outcome, known.gateway)
        tally.add(choice, outcome)
        follower = workload.follows[request]
        if follower >= 0:
            heappush(agenda, (outcome.task.end + workload.gaps_s[follower] / speed, follower))
        done += 1
        progress(done)
    return tally
