"""The doctor's flags."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything beside `--config`, `--engine` and `--agent`, which are those of `serve`."""
    parser.add_argument("--no-probe", dest="probe", action="store_false", help="have no engine compute a token")
    parser.add_argument("--timeout", type=float, default=20.0, metavar="S", help="seconds for each answer (default 20)")
    parser.add_argument("--json", action="store_true", help="what was found as JSON")
