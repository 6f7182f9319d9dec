"""KV of real vLLM servers, moved: time to first token fetched and recomputed, and what the connector costs the rest.

    PYTHONPATH=tests/vllm:tests python benchmarks/vllm_fetch.py fetch --tokens 1024,4096 --out results.jsonl
    PYTHONPATH=tests/vllm:tests python benchmarks/vllm_fetch.py overhead --out results.jsonl

`fetch`: a prompt is computed on one server; the other one gets it with a hint, again (its own cache), and another
prompt of that length (computed), each with one token to answer. A fetch whose lease came too late is counted as lost
and not in the medians. `overhead`: two servers, one with the connector and an agent, the other without; the same load
of fresh prompts goes to one and the other in turn, and nothing is ever fetched. Prints and appends one JSON object for
each length, or for the whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from stamp import stamp
from vllm_models import model_directory
from vllm_pool import PooledEngine, start_all
from vllm_server import BLOCK, VllmServer

KV_TOKENS = 16_384
TAIL = 60
"""Tokens after the last whole block."""


def _tokens(count: int) -> list[int]:
    return [random.randrange(10, 1000) for _ in range(count)]


def _timed(engine: PooledEngine, prompt: Sequence[int], **more: Any) -> tuple[float, int]:
    began = time.perf_counter()
    answer = engine.complete(prompt, tokens=1, **more)
    return time.perf_counter() - began, answer.cached


def fetch(options: argparse.Namespace) -> None:
    """See the module."""
    model = model_directory(options.model)
    pool_blocks = 4 * KV_TOKENS // BLOCK
    with (
        PooledEngine(model, "replica-0", pool_blocks=pool_blocks, kv_tokens=KV_TOKENS, core="0") as source,
        PooledEngine(model, "replica-1", pool_blocks=pool_blocks, kv_tokens=KV_TOKENS, core="1") as reader,
    ):
        start_all((source, reader))
        for length in map(int, options.tokens.split(",")):
            times: dict[str, list[float]] = {"fetched": [], "cached": [], "recomputed": []}
            lost = 0
            for at in range(options.rounds + 1):
                prompt = _tokens(length + TAIL)
                before = source.held
                source.complete(prompt, tokens=1)
                source.wait_saved(min(before + length // BLOCK, pool_blocks - 1))
                # Until what served it idles: vLLM's processes spin for a while after each request.
                time.sleep(2.0)
                fetched_s, cached = _timed(reader, prompt, **source.hint(prompt))
                cached_s, _ = _timed(reader, prompt)
                recomputed_s, _ = _timed(reader, _tokens(length + TAIL))
                if at == 0:  # connects the two
                    continue
                if cached < length // BLOCK * BLOCK:
                    lost += 1
                    continue
                for name, seconds in zip(times, (fetched_s, cached_s, recomputed_s), strict=True):
                    times[name].append(seconds)
            medians = {f"{name}_ms": _ms(seconds) for name, seconds in times.items()}
            shares = [a / b for a, b in zip(times["fetched"], times["recomputed"], strict=True)]
            share = round(statistics.median(shares), 4) if shares else None
            _tell(options, {"benchmark": "fetch", "tokens": length, **medians, "of_recompute": share, "lost": lost})


def overhead(options: argparse.Namespace) -> None:
    """See the module."""
    model = model_directory(options.model)
    with contextlib.ExitStack() as stack:
        pooled = stack.enter_context(PooledEngine(model, "replica-0", pool_blocks=1_024, kv_tokens=KV_TOKENS, core="0"))
        plain = stack.enter_context(VllmServer(model, kv_tokens=KV_TOKENS, core="0"))
        plain.start()
        plain.wait_ready()
        start_all((pooled,))
        http = stack.enter_context(httpx.Client(trust_env=False, timeout=600))
        threads = stack.enter_context(ThreadPoolExecutor(options.at_once))

        def load(server: VllmServer) -> float:
            prompts = [_tokens(options.prompt) for _ in range(options.requests)]

            def one(prompt: list[int]) -> None:
                body = {"model": server.name, "prompt": prompt, "max_tokens": options.answer, "ignore_eos": True}
                http.post(f"{server.url}/v1/completions", json=body).raise_for_status()

            began = time.perf_counter()
            list(threads.map(one, prompts))
            return time.perf_counter() - began

        both = {"with": pooled.server, "without": plain}
        seconds: dict[str, list[float]] = {name: [] for name in both}
        for at in range(options.rounds + 1):
            order = list(both) if at % 2 else list(reversed(both))
            for name in order:
                taken = load(both[name])
                seconds[name] += [taken] if at else []
        ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
        _tell(
            options,
            {
                "benchmark": "overhead",
                "prompt": options.prompt,
                "answer": options.answer,
                "requests": options.requests,
                "at_once": options.at_once,
                "with_s": round(statistics.median(seconds["with"]), 3),
                "without_s": round(statistics.median(seconds["without"]), 3),
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "steps": _last_steps(pooled.server),
            },
        )


def _last_steps(server: VllmServer) -> list[str]:
    """What vLLM's log says of the connector: time spent in steps, blocks saved and shed."""
    lines = [line for line in server.log(100_000).splitlines() if "KV Transfer metrics" in line]
    return [line.partition("KV Transfer metrics: ")[2] for line in lines]


def _ms(seconds: Sequence[float]) -> float | None:
    return round(statistics.median(seconds) * 1e3, 1) if seconds else None


def _tell(options: argparse.Namespace, result: dict[str, Any]) -> None:
    result |= {
        "rounds": options.rounds,
        "model": options.model,
        "dtype": "float32",
        **stamp(),
    }
    print(json.dumps(result), flush=True)
    if options.out:
        with options.out.open("a") as out:
            out.write(json.dumps(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("fetch", fetch), ("overhead", overhead)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--model", default="mid", choices=("tiny", "mid", "smollm2"))
        command.add_argument("--rounds", type=int, default=10)
        command.add_argument("--out", type=Path)
    commands.choices["fetch"].add_argument("--tokens", default="1024,4096", help="lengths, multiples of 128")
    for flag, value in (("prompt", 1_024), ("answer", 32), ("requests", 8), ("at-once", 4)):
        commands.choices["overhead"].add_argument(f"--{flag}", type=int, default=value)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
