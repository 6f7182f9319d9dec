"""What it is worth to count how much decoding slows prefills: not at all, as it is learned, and as it is.

    python benchmarks/decode_share.py DIRECTORY [--out benchmarks/results/decode-share.jsonl]

DIRECTORY holds the traces of `benchmarks/replay.py`, whose fleet and workloads these are: chats spread, reports 0.25 s
old, estimates off by 0.3, no fetching. A line a workload: mean TTFT of `ours` in seconds, the mean over the seeds and
each. Figures are exact: they depend on no clock and no machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from replay import LATE, scenario, workload
from stamp import stamp

from gateway.fleet.decoding import Decoding
from gateway.fleet.speed import FleetSpeed
from gateway.replay.formats import read
from gateway.replay.physics import KNOWN
from gateway.replay.replay import replay

LLAMA = KNOWN["llama-3.1-8b"]
SHARES: dict[str, Callable[[FleetSpeed, Decoding], float]] = {
    "not counted": lambda speed, beside: 0.0,
    "learned": FleetSpeed.decode_share,
    "known": lambda speed, beside: LLAMA.decode_share(int(beside.sequences), int(beside.context)),
}
TRACES = {"conversation": ("mooncake_conversation_h1", range(3)), "agentic": ("agentic_coding_a", range(5))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name, (trace, seeds) in TRACES.items():
        agents = name == "agentic"
        rows = read([options.directory / f"{trace}.jsonl.gz"])
        found: dict[str, list[float]] = {}
        for share, of in SHARES.items():
            FleetSpeed.decode_share = of  # type: ignore[assignment, method-assign]
            found[share] = [
                replay(workload(rows, agents, seed, not agents), scenario(agents, seed, **LATE), "ours").ttft_mean
                for seed in seeds
            ]
        line = json.dumps(
            {
                "workload": name,
                "ttft_mean": {share: round(mean(each), 4) for share, each in found.items()},
                "seeds": {share: [round(one, 4) for one in each] for share, each in found.items()},
                **stamp(),
            }
        )
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    main()
