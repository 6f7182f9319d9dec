"""`prefix-gateway replay`: what recorded traffic would have done, under each policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import msgspec

from gateway.replay.inputs import read_policies, read_scenario, read_workload
from gateway.replay.progress import Progress
from gateway.replay.replay import replay
from gateway.replay.result import Result
from gateway.replay.scenario import Scenario
from gateway.replay.table import describe, render
from gateway.replay.workload import Workload


def run(options: argparse.Namespace, write: Callable[[str], None]) -> int:
    """Replays, and writes line after line; returns the exit status. Raises SettingsError and TraceError.

    All flags are looked at before the trace is read, and the trace is read to its end before anything is replayed.
    """
    names = read_policies(options.policy)
    read_scenario(options, live=False)
    workload = read_workload(options)
    scenario = read_scenario(options, live=workload.live)
    results = []
    for name in names:
        results.append(shown(workload, scenario, name))
        if options.json:
            write(to_json(results[-1]))
    if not options.json:
        for line in [*describe(workload, scenario), "", *render(results)]:
            write(line)
    return 0


def shown(workload: Workload, scenario: Scenario, name: str, label: str = "") -> Result:
    """A replay with a progress bar on the terminal."""
    progress = Progress(sys.stderr, label or name, len(workload))
    try:
        return replay(workload, scenario, name, progress)
    finally:
        progress.close()


def to_json(result: msgspec.Struct) -> str:
    """One line."""
    return msgspec.json.encode(result).decode()
