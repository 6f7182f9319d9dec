"""Recorded conversations through a gateway with the official OpenAI client: what was predicted, cached and computed.

    python benchmarks/chats.py CHATS.jsonl[.gz] --model tiny --conversations 30 --out benchmarks/results/chats.jsonl

Plays every conversation turn by turn (each turn waits for the one before; the recorded replies are used, not the
generated ones) under each policy in turn, each on replicas with empty caches: `ours`, and round-robin and least-loaded,
which pin every request to the replica that they choose. Prints and appends one JSON object a policy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from stamp import stamp

from gateway.demo.client import DemoClient
from gateway.demo.cluster import Cluster, ClusterOptions, Ports

Chat = list[dict[str, Any]]
Choose = Callable[[dict[str, int]], str]
"""Gets the requests in flight by replica and names the replica to pin the next one to."""


@dataclass(frozen=True)
class Turn:
    """One request of a conversation and what became of it. Tokens; seconds."""

    conversation: int
    text: str
    replica: str
    reason: str
    identity: str
    predicted: int
    cached: int
    prompt: int
    ttft_s: float


def read_chats(path: Path, count: int) -> list[Chat]:
    """The messages of the first `count` conversations of a JSON-lines file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        return [json.loads(line)["messages"] for line in itertools.islice(lines, count)]


def requests_of(chat: Chat) -> list[Chat]:
    """What a client would have sent: the conversation up to every reply of the assistant."""
    return [chat[:at] for at, message in enumerate(chat) if message["role"] == "assistant" and at > 0]


async def play(
    cluster: Cluster,
    chats: Sequence[Chat],
    *,
    at_once: int = 4,
    max_tokens: int = 8,
    choose: Choose | None = None,
) -> list[Turn]:
    """All turns of all conversations, `at_once` conversations at a time.

    Without `choose` the gateway chooses.
    """
    running = {f"replica-{at}": 0 for at in range(cluster.count)}
    queue = list(enumerate(chats))
    turns: list[Turn] = []
    model = cluster.options.served_name
    gateway = DemoClient(cluster.url, cluster.admin_url, model)
    async with (
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=600) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        stack.push_async_callback(gateway.close)

        async def one(number: int, messages: Chat) -> Turn:
            pin = choose(running) if choose else None
            if pin:
                running[pin] += 1
            try:
                return await _ask(client, gateway, model, number, messages, max_tokens, pin)
            finally:
                if pin:
                    running[pin] -= 1

        async def worker() -> None:
            while queue:
                number, chat = queue.pop(0)
                for messages in requests_of(chat):
                    turns.append(await one(number, messages))

        await asyncio.gather(*(worker() for _ in range(at_once)))
    return turns


async def _ask(
    client: openai.AsyncOpenAI,
    gateway: DemoClient,
    model: str,
    number: int,
    messages: Chat,
    max_tokens: int,
    pin: str | None,
) -> Turn:
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        stream=True,
        max_tokens=max_tokens,
        temperature=0,
        extra_headers={"x-gateway-pin": pin} if pin else {},
    )
    text = ""
    async for chunk in raw.parse():
        for choice in chunk.choices:
            text += choice.delta.content or ""
    receipt = await gateway.receipt(raw.headers["x-request-id"])
    return Turn(
        conversation=number,
        text=text,
        replica=receipt["replica"],
        reason=receipt["reason"],
        identity=receipt["identity"],
        predicted=receipt["predicted_cached_tokens"],
        cached=receipt["cached_tokens"],
        prompt=receipt["prompt_tokens"],
        ttft_s=receipt["ttft_s"],
    )


def summary(policy: str, turns: Sequence[Turn], block: int = 16) -> dict[str, Any]:
    """Figures of one run."""
    ttft = sorted(turn.ttft_s for turn in turns)
    return {
        "policy": policy,
        "turns": len(turns),
        "prompt_tokens": sum(turn.prompt for turn in turns),
        "uncached_tokens": sum(turn.prompt - turn.cached for turn in turns),
        "within_one_block": sum(abs(turn.predicted - turn.cached) <= block for turn in turns) / len(turns),
        "mean_abs_error_tokens": statistics.mean(abs(turn.predicted - turn.cached) for turn in turns),
        "ttft_mean_s": round(statistics.mean(ttft), 4),
        "ttft_p50_s": round(statistics.median(ttft), 4),
        "ttft_p90_s": round(ttft[int(len(ttft) * 0.9)], 4),
    }


def round_robin() -> Choose:
    """Each replica in turn."""
    turn = itertools.count()
    return lambda running: list(running)[next(turn) % len(running)]


def least_loaded(seed: int = 0) -> Choose:
    """The replica with the fewest requests in flight, ties at random."""
    rng = random.Random(seed)
    return lambda running: min(running, key=lambda name: (running[name], rng.random()))


POLICIES: dict[str, Callable[[], Choose | None]] = {
    "ours": lambda: None,
    "round-robin": round_robin,
    "least-loaded": least_loaded,
}


async def _run(options: argparse.Namespace) -> None:
    chats = read_chats(options.chats, options.conversations)
    base = options.base_port
    ports = Ports(base, base + 1, *([base + 10 * n + at for at in range(options.replicas)] for n in range(1, 5)))
    flags = ["--threads", str(options.threads)] + (["--dtype", options.dtype] if options.dtype else [])
    for policy in options.policies.split(","):
        cluster = Cluster(
            ClusterOptions(
                ports=ports,
                model=options.model,
                served_name=options.model,
                kv_tokens=options.kv_tokens,
                engine_flags=flags,
            )
        )
        with cluster:
            cluster.start_all()
            await cluster.wait_ready(300)
            turns = await play(cluster, chats, at_once=options.at_once, choose=POLICIES[policy]())
        result = summary(policy, turns) | {
            "model": options.model,
            "chats": options.chats.name,
            "conversations": len(chats),
            "replicas": options.replicas,
            "kv_tokens": options.kv_tokens,
            "at_once": options.at_once,
            **stamp(),
        }
        print(json.dumps(result), flush=True)
        if options.out:
            with options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=16_384)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype")
    parser.add_argument("--policies", default="ours,round-robin,least-loaded")
    parser.add_argument("--base-port", type=int, default=18_000)
    parser.add_argument("--out", type=Path)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
