"""What it is worth to count how much decoding slows prefills: not at all, as it is learned, and as it is.

    python benchmarks/decode_share.py DIRECTORY [--out benchmarks/results/decode-share.jsonl]

DIRECTORY holds the traces of `benchmarks/replay.py`, whose fleet and workloads these are: chats spread, reports 0.25 s
old, estimates off by 0.3, no fetching. A line a workload: mean TTFT of `ours` in seconds, the mean over the seeds and
each. Figures are exact: they depend on no clock and no machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

from replay import LATE, scenario, workload
from stamp import stamp

from gateway.replay.formats import read
from gateway.replay.knowledge import Knowledge
from gateway.replay.ours import Ours, Prefill
from gateway.replay.policies import PLAIN
from gateway.replay.replay import replay


class Learning(Ours):
    """Learns it, as `serve` does."""

    def decode_share(self, known: Knowledge, replica: int) -> float:
        return self.speed.decode_share(known.decoding(replica))

    def prefilled(self, seen: Prefill) -> None:
        self.speed.observe(seen.replica, seen.effort, seen.took_s, seen.beside)


class Blind(Ours):
    """Takes all that it sees for the replica's speed."""

    def decode_share(self, known: Knowledge, replica: int) -> float:
        return 0.0

    def prefilled(self, seen: Prefill) -> None:
        self.speed.observe(seen.replica, seen.effort, seen.took_s)


SHARES = {"not counted": Blind, "learned": Learning, "known": Ours}
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
            PLAIN["ours"] = of
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
