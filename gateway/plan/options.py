"""Flags of `prefix-gateway plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvstore.models import KNOWN_MODELS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Numbers are taken as text and read by the plan itself, so that a bad one is told in one line."""
    plans = parser.add_subparsers(required=True, metavar="what")

    splits = plans.add_parser("splits", help="KV per GPU and room for tokens, for ways of splitting a model over GPUs")
    _add_common(splits, plan_splits, default="llama-3-8b")
    splits.add_argument("--tp", default="1,2,4,8,16", metavar="N,N", help="tensor-parallel sizes (default 1,2,4,8,16)")
    splits.add_argument("--pp", default="1,2", metavar="N,N", help="pipeline stages (default 1,2)")
    splits.add_argument("--dp", default="1,2", metavar="N,N", help="data-parallel replicas (default 1,2)")
    splits.add_argument("--gpu-bytes", default="80e9", metavar="BYTES", help="memory of one GPU (default 80e9)")
    splits.add_argument("--reserve", default="0.1", metavar="SHARE", help="share of it kept free (default 0.1)")
    splits.add_argument("--weight-bytes", default="2", metavar="BYTES", help="bytes of one weight (default 2)")

    crossover = plans.add_parser("crossover", help="the prefix length from which fetching KV beats recomputing it")
    _add_common(crossover, plan_crossover, default=None)
    crossover.add_argument("--link-gigabytes-per-s", metavar="X", help="what the link delivers (default 50)")
    crossover.add_argument("--link-gbps", metavar="X", help="the same in gigabits per second")
    crossover.add_argument("--latency-ms", metavar="X", help="fixed cost of a fetch (default 1)")
    crossover.add_argument("--tflops", metavar="X", help="what a replica achieves, not its peak (default 600)")
    crossover.add_argument(
        "--tokens", metavar="N,N", help="prefix lengths to list (default 32, 64, ... to the context)"
    )
    crossover.add_argument("--as-published", action="store_true", help="a published example beside the exact figures")


def plan_splits(options: argparse.Namespace) -> str:
    """What `plan splits` prints."""
    from gateway.plan.splits import plan

    return plan(options)


def plan_crossover(options: argparse.Namespace) -> str:
    """What `plan crossover` prints."""
    if options.as_published:
        from gateway.plan.published import plan
    else:
        from gateway.plan.crossover import plan

    return plan(options)


def _add_common(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], str], default: str | None) -> None:
    names = ", ".join(KNOWN_MODELS)
    parser.add_argument("--model", default=default, help=f"{names} or the path of a config.json (default llama-3-8b)")
    parser.add_argument("--dtype", help="of the KV, where it is not the model's: bfloat16, fp8, ...")
    parser.add_argument("--json", action="store_true", help="the plan as JSON; sizes in bytes, times in seconds")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves, too")
    parser.set_defaults(plan=run)
