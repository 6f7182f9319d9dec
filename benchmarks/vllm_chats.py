"""Recorded conversations on real vLLM replicas, behind one front after the other: tokens computed, and waiting.

    PYTHONPATH=tests/vllm:tests:benchmarks python benchmarks/vllm_chats.py CHATS.jsonl[.gz] --out results.jsonl

The same replicas serve all fronts, with empty caches each time; rounds are interleaved, so that whatever else the host
does hits all of them alike. Fronts: `ours` (a gateway, and an agent beside each replica), `round-robin` and
`least-conn` (nginx), `cache-aware` (sglang-router 0.3.2; `--sglang` is a python that has it). Conversations are played
turn by turn, each turn after the one before; the recorded replies are used, not the generated ones. Prints and appends
one JSON object for each front and round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
from chats import Chat, read_chats, requests_of
from loopback_ports import free_ports
from stamp import stamp
from vllm_deployment import beside
from vllm_models import model_directory
from vllm_server import BLOCK, VllmServer, start_servers

HOST = "127.0.0.1"
READY_S = 120.0
MODEL = "vllm"

KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600"}
"""Longer than any front keeps a connection: else a request meets one that vLLM, after its 5 s, is closing: a 502."""


class Turn(NamedTuple):
    """One answered request. `predicted` is None behind a front that predicts nothing; `ttft_s` is the client's."""

    prompt: int
    cached: int
    predicted: int | None
    ttft_s: float


async def play(url: str, chats: Sequence[Chat], at_once: int, max_tokens: int) -> list[Turn]:
    """All turns of all conversations, `at_once` conversations at a time."""
    queue = list(chats)
    turns: list[Turn] = []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def worker() -> None:
            while queue:
                for messages in requests_of(queue.pop(0)):
                    turns.append(await _ask(client, messages, max_tokens))

        await asyncio.gather(*(worker() for _ in range(at_once)))
    return turns


async def _ask(client: openai.AsyncOpenAI, messages: Chat, max_tokens: int) -> Turn:
    began = time.perf_counter()
    first = None
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=max_tokens,
        temperature=0,
    )
    usage = None
    async for chunk in raw.parse():
        if chunk.choices and first is None:
            first = time.perf_counter() - began
        usage = chunk.usage or usage
    assert usage is not None and usage.prompt_tokens_details is not None and first is not None
    predicted = raw.headers.get("x-gateway-predicted-cached-tokens")
    return Turn(
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens or 0,
        None if predicted is None else int(predicted),
        first,
    )


@contextlib.asynccontextmanager
async def ours(servers: Sequence[VllmServer], options: argparse.Namespace) -> AsyncIterator[str]:
    """A gateway, and an agent beside each replica."""
    with beside(servers) as cluster:
        for at in range(len(servers)):
            cluster.start_agent(at)
        cluster.start_gateway()
        await cluster.wait_ready(READY_S)
        yield cluster.url


@contextlib.asynccontextmanager
async def nginx(method: str, servers: Sequence[VllmServer], options: argparse.Namespace) -> AsyncIterator[str]:
    """nginx; `method` is a directive of its upstream, empty for round-robin."""
    (port,) = free_ports(1)
    upstreams = "".join(f"server {HOST}:{server.port}; " for server in servers)
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "nginx.conf")
        config.write_text(
            f"daemon off; user {getpass.getuser()}; worker_processes 1; pid {directory}/pid; error_log stderr error;\n"
            "events {}\n"
            f"http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 1m;\n"
            f"  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;\n"
            f"  fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u;\n"
            f"  scgi_temp_path {directory}/s; upstream replicas {{\n"
            f"    {method} {upstreams} keepalive 32; }}\n"
            f"  server {{ listen {HOST}:{port}; location / {{ proxy_pass http://replicas; proxy_http_version 1.1;\n"
            f'    proxy_set_header connection ""; proxy_buffering off; proxy_read_timeout 600s; }} }} }}\n'
        )
        async with _running(["nginx", "-c", str(config)], f"http://{HOST}:{port}") as url:
            yield url


@contextlib.asynccontextmanager
async def cache_aware(servers: Sequence[VllmServer], options: argparse.Namespace) -> AsyncIterator[str]:
    """sglang-router with the policy and the thresholds that it has by default."""
    port, metrics = free_ports(2)
    command = [
        *(options.sglang, "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)),
        *("--policy", "cache_aware", "--prometheus-port", str(metrics), "--log-level", "warn"),
        *("--worker-urls", *(server.url for server in servers)),
    ]
    async with _running(command, f"http://{HOST}:{port}") as url:
        yield url


@contextlib.asynccontextmanager
async def _running(command: Sequence[str], url: str) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_S
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                assert process.returncode is None and time.monotonic() < deadline, f"{command[0]} does not serve"
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"{url}/v1/models")).status_code == 200:
                        break
                await asyncio.sleep(0.2)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def front(name: str, servers: Sequence[VllmServer], options: argparse.Namespace) -> AbstractAsyncContextManager[str]:
    """The front of this name, serving as long as the context lasts."""
    match name:
        case "ours":
            return ours(servers, options)
        case "round-robin":
            return nginx("", servers, options)
        case "least-conn":
            return nginx("least_conn;", servers, options)
        case "cache-aware":
            return cache_aware(servers, options)
    raise SystemExit(f"--fronts: there is no {name!r}")


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Figures of one run; `within_one_block` where something was predicted."""
    ttft = sorted(turn.ttft_s for turn in turns)
    errors = [abs(turn.predicted - turn.cached) for turn in turns if turn.predicted is not None]
    return {
        "turns": len(turns),
        "prompt_tokens": sum(turn.prompt for turn in turns),
        "uncached_tokens": sum(turn.prompt - turn.cached for turn in turns),
        "within_one_block": sum(error <= BLOCK for error in errors) / len(errors) if errors else None,
        "ttft_mean_s": round(statistics.mean(ttft), 4),
        "ttft_p50_s": round(statistics.median(ttft), 4),
        "ttft_p90_s": round(ttft[int(len(ttft) * 0.9)], 4),
    }


async def _reset(servers: Sequence[VllmServer]) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for server in servers:
            (await http.post(f"{server.url}/reset_prefix_cache")).raise_for_status()


async def _run(options: argparse.Namespace) -> None:
    chats = read_chats(options.chats, options.conversations)
    model = model_directory(options.model)
    cores = os.cpu_count() or 1
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                VllmServer(
                    model, name=MODEL, kv_tokens=options.kv_tokens, core=str(at % cores), dev_mode=True, env=KEEP_ALIVE
                )
            )
            for at in range(options.replicas)
        ]
        start_servers(servers)
        for number in range(options.rounds):
            for name in options.fronts.split(","):
                await _reset(servers)
                async with front(name, servers, options) as url:
                    began = time.monotonic()
                    turns = await play(url, chats, options.at_once, options.max_tokens)
                result = (
                    {"front": name, "round": number}
                    | summary(turns)
                    | {
                        "seconds": round(time.monotonic() - began, 1),
                        "model": options.model,
                        "chats": options.chats.name,
                        "conversations": len(chats),
                        "replicas": options.replicas,
                        "kv_tokens": options.kv_tokens,
                        "at_once": options.at_once,
                        **stamp(),
                    }
                )
                print(json.dumps(result), flush=True)
                if options.out:
                    with options.out.open("a") as out:
                        out.write(json.dumps(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--model", default="tiny", choices=("tiny", "mid", "smollm2"))
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=16_384)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fronts", default="ours,round-robin,least-conn,cache-aware")
    parser.add_argument("--sglang", default="python3")
    parser.add_argument("--out", type=Path)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
