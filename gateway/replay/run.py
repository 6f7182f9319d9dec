"""`prefix-gateway replay`: what recorded traffic would have done, under each policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import msgspec

from gateway.plan.inputs import write_plot
from gateway.replay import charts, table
from gateway.replay.inputs import read_policies, read_scenario, read_workload
from gateway.replay.progress import Progress
from gateway.replay.recommend import hot_prefix, recommend
from gateway.replay.replay import play
from gateway.replay.result import Tally
from gateway.replay.scenario import Scenario
from gateway.replay.sweep import sweep


def run(options: argparse.Namespace, write: Callable[[str], None]) -> int:
    """Replays, and writes line after line; returns the exit status. Raises SettingsError and TraceError.

    All flags are looked at before the trace is read, and the trace is read to its end before anything is replayed.
    """
    names = read_policies(options.policy)
    read_scenario(options, live=False)
    workload = read_workload(options)
    scenario = read_scenario(options, live=workload.live)
    hot = hot_prefix(workload, scenario.replicas) if options.recommend else None

    def play_shown(scenario: Scenario, name: str, label: str) -> Tally:
        progress = Progress(sys.stderr, label, len(workload))
        try:
            return play(workload, scenario, name, progress, watched=hot.block if hot else None)
        finally:
            progress.close()

    def say(*lines: str) -> None:
        if not options.json:
            for line in lines:
                write(line)

    def tell(found: object) -> None:
        if options.json:
            write(msgspec.json.encode(found).decode())

    say(*table.describe(workload, scenario), "")
    if options.recommend:
        recommendation = recommend(workload, scenario, play_shown, hot)
        tell(recommendation)
        say(*table.recommendation(recommendation))
        svg = charts.tradeoff([(each.epsilon, each) for each in recommendation.tried])
    elif options.sweep:
        points = []
        for point in sweep(scenario, play_shown):
            points.append(point)
            tell(point.fields())
        say(*table.sweep(points))
        svg = charts.tradeoff(points)
    else:
        tallies: list[tuple[str, Sequence[float]]] = []
        results = []
        for name in names:
            tally = play_shown(scenario, name, name)
            tallies.append((name, tally.ttft_s()))
            results.append(tally.result(name))
            tell(results[-1])
        say(*table.results(results))
        svg = charts.waits(tallies)
    if options.plot:
        write_plot(options.plot, svg)
    return 0
