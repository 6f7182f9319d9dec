"""`make soak`: the storm of the tests for longer, with a result to keep."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path

from stress.driver import Report, storm
from stress.fleet import COUNT, KV_BLOCKS, POOL_SLOTS, Broken

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def main() -> int:
    """0 when everything held; 1, and nothing is written, when something did not."""
    parser = argparse.ArgumentParser(prog="make soak ARGS=", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long parts are frozen and killed (default 30)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="default: another each time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)  # now, not after half an hour
    sys.stderr.write(f"seed {arguments.seed}, {arguments.minutes:g} minutes\n")
    try:
        report = asyncio.run(storm(arguments.seed, 60 * arguments.minutes))
    except Broken as error:
        sys.stderr.write(f"{error}\n")
        return 1
    date = datetime.date.today().isoformat()
    cores = len(os.sched_getaffinity(0))
    host = f"{platform.system()} {platform.machine()}, {cores} cores, Python {platform.python_version()}"
    path = arguments.out / f"soak-{date}.json"
    path.write_text(json.dumps({"date": date, "host": host, **vars(report)}, indent=1) + "\n")
    path.with_suffix(".md").write_text(_page(report, date, host))
    sys.stderr.write(f"{path}\n")
    return 0


def _page(report: Report, date: str, host: str) -> str:
    """The result in words."""
    answers = report.answers
    lines = [
        f"# Soak of {report.seconds / 60:g} minutes, {date}",
        "",
        f"    make soak ARGS='--minutes {report.seconds / 60:g} --seed {report.seed}'",
        "",
        f"{host}. {COUNT} tiny float32 engines of {KV_BLOCKS} blocks, each beside an agent that keeps {POOL_SLOTS}. "
        f"No answer was wrong, no request failed but by a kill of its engine, {report.checks} checks of live parts "
        f"held, and {report.quiet_after_s:.1f} s after the last request nothing was held for anybody.",
        "",
        f"{answers['right']} right answers, {answers['left']} clients that left, {answers['killed']} requests to an "
        f"engine that was dead or died. {report.blocks_moved} blocks moved ({_counts(report.transports)} fetches), "
        f"{report.cached_tokens} prompt tokens cached. Done to the parts: {_counts(report.faults)}.",
        "",
        "| what came of a search | count |",
        "|---|---|",
        *(f"| {outcome} | {count} |" for outcome, count in sorted(report.fetches.items())),
        "",
        "The replica that is never killed, before the storm and after it; bytes of its own by thirds of the storm:",
        "",
        "| part | sockets | other descriptors | mapped pools | MiB by thirds |",
        "|---|---|---|---|---|",
    ]
    for name, found in report.survivor.items():
        before, after = found["before"], found["after"]
        change = [f"{before[what]} -> {after[what]}" for what in ("sockets", "files", "pools")]
        thirds = " / ".join(f"{each / 2**20:.1f}" for each in found["private_bytes_by_third"])
        lines.append(f"| {name} | {' | '.join(change)} | {thirds} |")
    return "\n".join(lines) + "\n"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
