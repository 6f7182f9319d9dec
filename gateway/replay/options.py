"""Flags of `prefix-gateway replay`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Numbers are taken as text and read by the replay itself, so that a bad one is told in one line."""
    add = parser.add_argument
    add(
        "trace", nargs="+", type=Path, metavar="TRACE", help="a recorded trace or request log, .gz or not; or its parts"
    )
    add("--replicas", default="8", metavar="N", help="replicas of the fleet (default 8)")
    add("--cache-tokens", default="1000000", metavar="N", help="tokens of KV that each can hold (default 1000000)")
    add("--model", default="llama-3.1-8b", help="llama-3.1-8b, llama-3.1-70b or the path of a config.json")
    add("--tflops", metavar="X", help="what a replica achieves in prefill (default 600 a GPU)")
    add("--hbm-gigabytes-per-s", metavar="X", help="what it reads its memory at (default 4800 a GPU)")
    add("--policy", default="all", metavar="P,P", help="how requests are placed, or all (default)")
    add(
        "--utilization",
        metavar="SHARE",
        help="compress time until prefilling every prompt whole would take this share of all replicas' time; 0 keeps "
        "the recorded times (default 0.5, and 0 for a request log)",
    )
    add("--gateways", default="1", metavar="N", help="gateways that share the requests (default 1)")
    add("--report-delay", default="0", metavar="S", help="age of what gateways are told (default 0; 0.25 is usual)")
    add("--estimate-error", default="0", metavar="SIGMA", help="lognormal error of estimates (default 0; try 0.3)")
    add("--fetch-gigabytes-per-s", default="0", metavar="X", help="replicas read KV from peers at this rate; 0: never")
    add("--keep-copies", action="store_true", help="what a peer has read is not the first to be evicted at its source")
    add("--sessions-per-replica", default="0", metavar="N", help="a sample of so many sessions for each replica")
    add("--seed", default="0", metavar="N", help="of the sample, the hashes and the errors (default 0)")
    add("--spread-timestamps", action="store_true", help="spread requests that a coarse clock put at one instant")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--sweep", choices=["epsilon"], help="ours for a range of it: duplication against imbalance")
    instead.add_argument("--recommend", action="store_true", help="try settings on this traffic, and name the best")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the result, too")
    add("--json", action="store_true", help="a JSON object a line; sizes in GiB, times in seconds")
