"""Flags of `prefix-gateway demo`."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every port is a flag, so that a taken one can be moved."""
    parser.add_argument("--check", action="store_true", help="play the scenario, verify it, and exit 0 or 1")
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), tiny, or a Hugging Face Llama directory")
    parser.add_argument(
        "--replicas", type=int, default=3, choices=range(2, 17), metavar="N", help="2 to 16 (default 3)"
    )
    parser.add_argument(
        "--kv-tokens", type=_positive, help="KV of each replica in tokens (default: two documents and a bit)"
    )
    parser.add_argument(
        "--followups", type=int, default=3, choices=range(1, 6), help="questions a document (default 3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="order of the questions (default 0)")
    parser.add_argument("--port", type=_port, default=8000, help="public port of the gateway")
    parser.add_argument("--admin-port", type=_port, default=8001, help="admin port of the gateway")
    parser.add_argument("--engine-port", type=_port, default=8100, help="port of the first engine; the others follow")
    parser.add_argument("--agent-port", type=_port, default=8200, help="port of the first agent; the others follow")
    parser.add_argument("--events-port", type=_port, default=5557, help="KV event port of the first engine")
    parser.add_argument("--replay-port", type=_port, default=5657, help="KV event replay port of the first engine")


def _port(text: str) -> int:
    return _between(text, 1, 65_535)


def _positive(text: str) -> int:
    return _between(text, 1, 1 << 31)


def _between(text: str, least: int, most: int) -> int:
    value = int(text)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
    return value
