"""`python -m replica_agent.bench transfer`: see its --help."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from replica_agent.bench.report import render_text
from replica_agent.bench.transfer import PATHS, Options, measure, push_only


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark, and print what it found."""
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m replica_agent.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="benchmark", dest="benchmark")
    transfer = commands.add_parser("transfer", help="moving slots between two pools on this host")
    transfer.add_argument("--slots", type=int, default=defaults.slots, help="slots of one fetch (default %(default)s)")
    transfer.add_argument(
        "--slot-bytes", type=int, default=defaults.slot_bytes, help="a multiple of 4,096 (default %(default)s)"
    )
    transfer.add_argument("--rounds", type=int, default=defaults.rounds, help="at most (default %(default)s)")
    transfer.add_argument(
        "--paths", default=",".join(PATHS), help="the ones to measure, separated by commas (default %(default)s)"
    )
    transfer.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    transfer.add_argument("--out", type=Path, help="also append that line to this file")
    transfer.add_argument("--push-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.slot_bytes < 4096 or options.slot_bytes % 4096:
        parser.error("--slot-bytes: expected a multiple of 4,096")
    if options.slots < 1 or options.rounds < 1:
        parser.error("--slots and --rounds must be above 0")
    paths = tuple(options.paths.split(","))
    if unknown := set(paths) - set(PATHS):
        parser.error(f"--paths: {', '.join(sorted(unknown))} is none of {', '.join(PATHS)}")
    chosen = Options(options.slots, options.slot_bytes, options.rounds, paths)
    if options.push_only:
        sys.stdout.write(msgspec.json.encode(asyncio.run(push_only(chosen))).decode() + "\n")
        return 0
    report = asyncio.run(measure(chosen))
    line = msgspec.json.encode(report).decode()
    sys.stdout.write((line if options.json else render_text(report)) + "\n")
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
