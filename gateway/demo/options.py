"""Flags of `prefix-gateway demo`."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every port is a flag, so that a taken one can be moved."""
    parser.add_argument("--check", action="store_true", help="play the scenario, verify it, and exit 0 or 1")
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), tiny, or a Hugging Face Llama directory")
    parser.add_argument("--replicas", type=int, default=3, help="replicas to start (default 3)")
    parser.add_argument("--kv-tokens", type=int, help="KV of each replica in tokens (default: two documents and a bit)")
    parser.add_argument(
        "--followups", type=int, default=3, choices=range(1, 6), help="questions a document (default 3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="order of the questions (default 0)")
    parser.add_argument("--port", type=int, default=8000, help="public port of the gateway")
    parser.add_argument("--admin-port", type=int, default=8001, help="admin port of the gateway")
    parser.add_argument("--engine-port", type=int, default=8100, help="port of the first engine; the others follow")
    parser.add_argument("--agent-port", type=int, default=8200, help="port of the first agent; the others follow")
    parser.add_argument("--events-port", type=int, default=5557, help="KV event port of the first engine")
    parser.add_argument("--replay-port", type=int, default=5657, help="KV event replay port of the first engine")
