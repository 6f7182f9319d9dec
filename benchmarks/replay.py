"""Placement on recorded traffic against one cache of all replicas' size: the figures that placement is held to.

    python benchmarks/replay.py DIRECTORY [--trace agentic] [--case late] [--out benchmarks/results/replay.jsonl]
    python benchmarks/replay.py DIRECTORY --case perfect late --policy least-loaded ttft@4
    python benchmarks/replay.py DIRECTORY --case late --set eps=0.5,2 SURE=2,4
    python benchmarks/replay.py DIRECTORY --case late --replicas 4 --cache-tokens 500000 --utilization 0.3

DIRECTORY holds the traces (`mooncake_conversation_h1.jsonl.gz`, `agentic_coding_a.jsonl.gz`, and others that `--trace`
may name). 8 replicas of an 8B model, 1,000,000 tokens of KV each: chats at half load, seeds 0 to 2, and agents, 12
sessions a replica in closed loop, seeds 0 to 4. A line a case: mean TTFT over that of one big cache (mean over the
seeds, and each), 90th and 99th percentile likewise, hit rate (local, and with what was fetched) over its, excess KV in
GiB, spilled requests in %; then how many requests that were, and how long replaying them took. All but that is exact:
it depends on no clock and no machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import mean
from types import ModuleType

from stamp import stamp

from gateway.fleet import speed
from gateway.placement import reuse
from gateway.placement.settings import PlacementSettings
from gateway.replay.formats import read
from gateway.replay.physics import KNOWN
from gateway.replay.replay import replay
from gateway.replay.result import Result
from gateway.replay.rows import Rows
from gateway.replay.scenario import FETCH_LATENCY_S, Scenario
from gateway.replay.workload import Workload, build
from kvstore.cost import LinkEstimate

REPLICAS = 8
SESSIONS = 12
LATE: dict[str, object] = {"report_delay_s": 0.25, "estimate_error": 0.3}
LINK = LinkEstimate(FETCH_LATENCY_S, 25e9)
CASES: dict[str, tuple[bool, dict[str, object]]] = {
    "perfect": (False, {}),
    "late": (False, LATE),
    "late, found to be alike": (False, {**LATE, "alike": False}),
    "late, fetch": (False, {**LATE, "link": LINK}),
    "late, fetch, copies kept": (False, {**LATE, "link": LINK, "keeps_copies": True}),
    "late, spread": (True, LATE),
    "late, spread, 4 gateways": (True, {**LATE, "gateways": 4}),
}
"""Whether timestamps are spread over the clock's tick, and what gateways know."""

AGENTS = "agentic_coding_a"
TRACES = {"mooncake_conversation_h1": 3, AGENTS: 5}
"""And how many seeds."""
OTHERS = {"tau_airline_a": 3, "loogle_docqa_a": 3}
"""Played where `--trace` asks for them."""

CONSTANTS: dict[str, ModuleType] = {
    "SURE": speed,
    "DOUBT": speed,
    "FLEET_WEIGHT": speed,
    "PRIOR_CHANCE": reuse,
    "PRIOR_TOKENS": reuse,
}
"""Those that `--set` knows besides the fields of PlacementSettings, and where they are."""

AS_IT_IS = ("", 0.0)


def workload(rows: Rows, agents: bool, seed: int, spread: bool, sessions: int = SESSIONS * REPLICAS) -> Workload:
    """The requests of one seed."""
    return build(rows, sessions=sessions if agents else 0, spread=spread, seed=seed)


def scenario(agents: bool, seed: int, **changes: object) -> Scenario:
    """The fleet they are played on."""
    fleet: dict[str, object] = {"replicas": REPLICAS, "utilization": 0.0 if agents else 0.5, **changes}
    return Scenario(physics=KNOWN["llama-3.1-8b"], seed=seed, **fleet)  # type: ignore[arg-type]


@contextmanager
def varied(name: str, value: float) -> Iterator[PlacementSettings]:
    """Settings of placement in which one constant has another value; a module's is put back afterwards."""
    module = CONSTANTS.get(name)
    if module is None:
        yield PlacementSettings(**{name: value} if name else {})  # type: ignore[arg-type]
        return
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield PlacementSettings()
    finally:
        setattr(module, name, before)


def compared(pairs: list[tuple[Result, Result]]) -> dict[str, object]:
    """Ours over one big cache's, seed by seed."""
    ratios = [ours.ttft_mean / best.ttft_mean for ours, best in pairs]
    return {
        "ttft": round(mean(ratios), 4),
        "seeds": [round(ratio, 4) for ratio in ratios],
        "p90": round(mean(ours.ttft_p90 / best.ttft_p90 for ours, best in pairs), 3),
        "p99": round(mean(ours.ttft_p99 / best.ttft_p99 for ours, best in pairs), 3),
        "hit": round(mean(ours.hit_rate / best.hit_rate for ours, best in pairs), 4),
        "hit_or_fetched": round(mean((ours.hit_rate + ours.fetched_share) / best.hit_rate for ours, best in pairs), 4),
        "excess_gib": round(mean(ours.excess_gib_mean for ours, _ in pairs), 1),
        "spill_percent": round(100 * mean(ours.spill_rate for ours, _ in pairs), 2),
    }


def lines(
    name: str, rows: Rows, seeds: int, options: argparse.Namespace, fleet: dict[str, int | float]
) -> Iterator[dict[str, object]]:
    """What is found on one trace: case by case, policy by policy, value by value."""
    agents = name == AGENTS
    replicas = int(fleet.get("replicas", REPLICAS))
    best: dict[bool, list[tuple[Workload, Result]]] = {}
    for case, policy, (constant, value) in product(options.case, options.policy, [AS_IT_IS, *options.set]):
        spread, known = CASES[case]
        if spread not in best:
            best[spread] = []
            for seed in range(seeds):
                requests = workload(rows, agents, seed, spread, options.sessions * replicas)
                bound = replay(requests, scenario(agents, seed, **fleet), "one-big-cache")
                best[spread].append((requests, bound))
        pairs = []
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        with varied(constant, value) as settings:
            for seed, (requests, bound) in enumerate(best[spread]):
                played = scenario(agents, seed, **fleet, **known, placement=settings)
                pairs.append((replay(requests, played, policy), bound))
        yield {
            "trace": name,
            "case": case,
            "policy": policy,
            **fleet,
            **({"sessions": options.sessions} if agents and options.sessions != SESSIONS else {}),
            **({"set": {constant: value}} if constant else {}),
            **compared(pairs),
            "requests": sum(len(requests) for requests, _ in best[spread]),
            "wall_s": round(time.perf_counter() - wall_s, 2),
            "cpu_s": round(time.process_time() - cpu_s, 2),
        }


def values(text: str) -> list[tuple[str, float]]:
    """`eps=0.5,2` as pairs."""
    name, _, listed = text.partition("=")
    if name not in CONSTANTS and name not in PlacementSettings.__struct_fields__:
        raise argparse.ArgumentTypeError(f"{name!r} is neither a field of PlacementSettings nor of {[*CONSTANTS]}")
    return [(name, json.loads(value)) for value in listed.split(",")]


def main() -> None:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trace", help="one trace, by the beginning of its name")
    parser.add_argument("--case", choices=CASES, nargs="+", default=[*CASES])
    parser.add_argument("--policy", nargs="+", default=["ours"])
    parser.add_argument("--set", type=values, nargs="+", action="extend", default=[], help="NAME=VALUE[,VALUE...]")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--cache-tokens", type=int)
    parser.add_argument("--utilization", type=float)
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="of agents, a replica")
    parser.add_argument("--out", type=Path, help="append a JSON object a line")
    options = parser.parse_args()
    options.set = [pair for pairs in options.set for pair in pairs]
    asked = {name: getattr(options, name) for name in ("replicas", "cache_tokens", "utilization")}
    fleet = {name: value for name, value in asked.items() if value is not None}
    traces = {**TRACES, **OTHERS} if options.trace else TRACES
    for name, seeds in traces.items():
        if not name.startswith(options.trace or ""):
            continue
        rows = read([options.directory / f"{name}.jsonl.gz"])
        for found in lines(name, rows, options.seeds or seeds, options, fleet):
            print(json.dumps(found), flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps({**stamp(), **found}) + "\n")


if __name__ == "__main__":
    main()
