"""Placement on recorded traffic against one cache of all replicas' size: the figures that placement is held to.

    python benchmarks/replay.py DIRECTORY [--trace agentic] [--only late] [--out benchmarks/results/replay.jsonl]

DIRECTORY holds the traces (`mooncake_conversation_h1.jsonl.gz`, `agentic_coding_a.jsonl.gz`). 8 replicas of an 8B
model, 1,000,000 tokens of KV each: chats at half load, seeds 0 to 2, and agents, 12 sessions a replica in closed loop,
seeds 0 to 4. A line a case: mean TTFT over that of one big cache (mean over the seeds, and each), 90th and 99th
percentile likewise, hit rate (local, and with what was fetched) over its, excess KV in GiB, spilled requests in %.
Figures are exact: they depend on no clock and no machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

from stamp import stamp

from gateway.replay.formats import read
from gateway.replay.physics import KNOWN
from gateway.replay.replay import replay
from gateway.replay.result import Result
from gateway.replay.rows import Rows
from gateway.replay.scenario import FETCH_LATENCY_S, Scenario
from gateway.replay.workload import Workload, build
from kvstore.cost import LinkEstimate

REPLICAS = 8
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


def workload(rows: Rows, agents: bool, seed: int, spread: bool) -> Workload:
    """The requests of one seed."""
    return build(rows, sessions=12 * REPLICAS if agents else 0, spread=spread, seed=seed)


def scenario(agents: bool, seed: int, **changes: object) -> Scenario:
    """The fleet they are played on."""
    load = 0.0 if agents else 0.5
    return Scenario(
        physics=KNOWN["llama-3.1-8b"],
        replicas=REPLICAS,
        utilization=load,
        seed=seed,
        **changes,  # type: ignore[arg-type]
    )


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


def main() -> None:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--trace", help="one trace, by the beginning of its name")
    parser.add_argument("--policy", default="ours")
    parser.add_argument("--out", type=Path, help="append a JSON object a line")
    options = parser.parse_args()
    for name, agents, seeds in (("mooncake_conversation_h1", False, 3), ("agentic_coding_a", True, 5)):
        if not name.startswith(options.trace or ""):
            continue
        rows = read([options.directory / f"{name}.jsonl.gz"])
        best: dict[tuple[int, bool], tuple[Workload, Result]] = {}
        for case, (spread, known) in CASES.items():
            if options.only not in (None, case):
                continue
            pairs = []
            for seed in range(seeds):
                if (seed, spread) not in best:
                    requests = workload(rows, agents, seed, spread)
                    best[seed, spread] = requests, replay(requests, scenario(agents, seed), "one-big-cache")
                requests, bound = best[seed, spread]
                pairs.append((replay(requests, scenario(agents, seed, **known), options.policy), bound))
            found = {"trace": name, "case": case, "policy": options.policy, **compared(pairs)}
            print(json.dumps(found), flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps({**stamp(), **found}) + "\n")


if __name__ == "__main__":
    main()
