"""The command line, read once at start."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one engine runs. Addresses with port 0 take any free port; endpoint None publishes nothing."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8100
    served_model_name: str | None = None
    kv_tokens: int = 16_384
    block_size: int = 16
    dtype: str = "auto"
    threads: int = 1
    max_model_len: int | None = None
    prefill_chunk: int = 512
    max_num_seqs: int = 64
    kv_events_endpoint: str | None = None
    kv_replay_endpoint: str | None = None
    kv_socket: str | None = None
    seed: int = 0
    debug: bool = False
    verbose: bool = False


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _endpoint(text: str) -> str | None:
    return None if text in ("", "none") else text


def _path(text: str) -> str | None:
    return text or None


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from command line arguments; exits with code 2 and names the flag when one is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m replica_agent.reference",
        description="A small Llama engine with paged prefix caching, OpenAI endpoints and vLLM-compatible KV events.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="smollm2, tiny, or the directory of a Hugging Face Llama model")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8100, help="port to listen on; 0 takes a free one")
    add("--served-model-name", help="name in the API (default: the model's own)")
    add("--kv-tokens", type=_positive, default=16_384, help="tokens that the KV cache holds")
    add("--block-size", type=_positive, default=16, help="tokens in a KV block")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="what to compute and keep KV in")
    add("--threads", type=_positive, default=len(os.sched_getaffinity(0)), help="threads of the compute")
    add("--max-model-len", type=_positive, help="longest context (default: the model's, or the cache if that is less)")
    add("--prefill-chunk", type=_positive, default=512, help="tokens computed in one step at most")
    add("--max-num-seqs", type=_positive, default=64, help="sequences computed at a time at most")
    add("--kv-events-endpoint", type=_endpoint, default="tcp://127.0.0.1:5557", help="ZMQ PUB address, or none")
    add("--kv-replay-endpoint", type=_endpoint, default="tcp://127.0.0.1:5657", help="ZMQ ROUTER address, or none")
    add("--kv-socket", type=_path, help="Unix socket of the agent that keeps KV outside the engine (default: none)")
    add("--seed", type=int, default=0, help="seed of requests that bring none")
    add("--debug", action="store_true", help="serve /debug/blocks and /debug/check")
    add("--quiet", dest="verbose", action="store_false", default=False, help="log one line at start (the default)")
    add("--verbose", action="store_true", default=False, help="log every request")
    return Settings(**vars(parser.parse_args(arguments)))
