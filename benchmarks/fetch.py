"""Fetched against recomputed: time to first token over prefix length, the model's curves beside it, and the regret.

    python benchmarks/fetch.py --model smollm2 --out benchmarks/results/fetch-smollm2

Three replicas on this machine, one request at a time: `replica-0` computes a prompt and saves it, then one of the
others gets the same prompt with a hint. `replica-1` always fetches (a margin below zero), `replica-2` decides. A fourth
request, of another prompt of the same length and without a hint, is recomputed on `replica-1`. Lengths are shuffled.
Writes OUT.json (raw) and OUT.svg, and prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.demo.cluster import Cluster, ClusterOptions, Ports
from gateway.plan.plot import Series, line_chart
from kvstore.hint import FIELD, NAME, Hint
from kvstore.messages import FetchRecord

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
TAIL = 5
"""Tokens behind the last whole block: they are computed in every arm."""
SOURCE, FORCED, DECIDES = 0, 1, 2
READY_S = 180.0
STEPS = ("decide", "lease", "move", "verify", "confirm", "copy")
DEADLINE_MS = 30_000
MIB = 1024 * 1024


class Bench:
    """Sends token prompts to engines directly and reads what their agents recorded."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, seed: int) -> None:
        self._cluster = cluster
        self._http = http
        self._random = random.Random(seed)
        self._sent = 0
        self._saved = 0

    async def ready(self) -> None:
        """Until every engine is connected to its agent."""
        deadline = time.monotonic() + READY_S
        for at in range(self._cluster.count):
            while True:
                self._cluster.check_alive()
                try:
                    health = (await self._http.get(f"{self._cluster.agent_url(at)}/health")).json()
                    if health["kv"]["engine_connected"] and health["engine_up"]:
                        break
                except (httpx.HTTPError, KeyError):
                    pass
                assert time.monotonic() < deadline, f"replica-{at} does not get ready"
                await asyncio.sleep(0.1)

    def prompt(self, blocks: int) -> list[int]:
        """Random tokens: `blocks` whole blocks, and a few more."""
        return [self._random.randrange(1_000, 4_000) for _ in range(blocks * 16 + TAIL)]

    async def saved(self, blocks: int) -> None:
        """Until the source's pool holds `blocks` more than the last time."""
        self._saved += blocks
        deadline = time.monotonic() + 60
        while True:
            health = (await self._http.get(f"{self._cluster.agent_url(SOURCE)}/health")).json()
            if health["kv"]["pool"]["held"] >= self._saved:
                return
            assert time.monotonic() < deadline, f"not saved: {health['kv']['pool']}"
            await asyncio.sleep(0.02)

    async def ask(self, at: int, prompt: Sequence[int], hinted: int = 0) -> tuple[float, FetchRecord | None]:
        """Seconds to the first token, and the record of the fetch if there was one to record."""
        self._sent += 1
        body: dict[str, Any] = {
            "model": self._cluster.options.served_name,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        request = f"bench-{self._sent}"
        if hinted:
            hint = Hint(
                request=request,
                source=f"replica-{SOURCE}",
                url=self._cluster.agent_url(SOURCE),
                blocks=hinted,
                deadline_ms=DEADLINE_MS,
            )
            body[FIELD] = {NAME: msgspec.to_builtins(hint)}
        began = time.perf_counter()
        url = f"{self._cluster.engine_url(at)}/v1/completions"
        async with self._http.stream("POST", url, json=body, headers={"x-request-id": request}) as response:
            assert response.status_code == 200, await response.aread()
            ttft = 0.0
            async for _ in response.aiter_raw():
                ttft = ttft or time.perf_counter() - began
        return ttft, await self._record(at, request) if hinted else None

    async def _record(self, at: int, request: str) -> FetchRecord | None:
        for _ in range(50):
            raw = (await self._http.get(f"{self._cluster.agent_url(at)}/v1/fetches")).json()
            for found in raw["fetches"]:
                if found["gateway_request"] == request:
                    return msgspec.convert({k: v for k, v in found.items() if k != "type"}, FetchRecord, strict=False)
            await asyncio.sleep(0.02)
        return None


async def measure(cluster: Cluster, lengths: Sequence[int], rounds: int, seed: int) -> list[dict[str, Any]]:
    """One row a (round, length): the seconds of every arm and the records."""
    rows: list[dict[str, Any]] = []
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        bench = Bench(cluster, http, seed)
        await bench.ready()
        for at in range(cluster.count):  # the estimators of every replica have seen prefills, as in a running fleet
            for blocks in (8, 16, 32, 64, 128):
                await bench.ask(at, bench.prompt(blocks))
                if at == SOURCE:
                    await bench.saved(blocks)
        for number in range(-1, rounds):  # round -1 is warm-up: connections, the link's first figures
            for tokens in random.Random(seed + number).sample(list(lengths), len(lengths)):
                blocks = tokens // 16
                prompt = bench.prompt(blocks)
                computed, _ = await bench.ask(SOURCE, prompt)
                await bench.saved(blocks)
                fetched, forced = await bench.ask(FORCED, prompt, hinted=blocks)
                decided, record = await bench.ask(DECIDES, prompt, hinted=blocks)
                recomputed, _ = await bench.ask(FORCED, bench.prompt(blocks))
                if number < 0:
                    continue
                row = {
                    "round": number,
                    "tokens": tokens,
                    "source_s": computed,
                    "fetched_s": fetched,
                    "decided_s": decided,
                    "recomputed_s": recomputed,
                    "forced": msgspec.to_builtins(forced),
                    "decision": msgspec.to_builtins(record),
                }
                rows.append(row)
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians a length, and how often each way was chosen."""
    table = []
    for tokens in sorted({row["tokens"] for row in rows}):
        at = [row for row in rows if row["tokens"] == tokens]
        forced = [row["forced"] for row in at if row["forced"] and row["forced"]["outcome"] in ("fetched", "partial")]
        chose = [row["decision"]["outcome"] in ("fetched", "partial") for row in at if row["decision"]]
        median = {
            name: statistics.median(row[name] for row in at) for name in ("fetched_s", "recomputed_s", "decided_s")
        }
        steps = (*(f"{name}_s" for name in STEPS), "total_s")
        best = min(median["fetched_s"], median["recomputed_s"])
        fetches = sum(chose)
        paid = (fetches * median["fetched_s"] + (len(chose) - fetches) * median["recomputed_s"]) / max(1, len(chose))
        table.append(
            {"tokens": tokens, "rounds": len(at), **median}
            | {"fetches_chosen": fetches, "decisions": len(chose), "chosen_s": paid, "best_s": best}
            | {
                f"predicted_{name}_s": statistics.median(record[f"predicted_{name}_s"] for record in forced)
                for name in ("fetch", "rest", "recompute")
                if forced
            }
            | {name: statistics.median(record[name] for record in forced) for name in steps if forced}
            | ({"moved_mib": forced[0]["moved"] * forced[0]["block_bytes"] / MIB} if forced else {})
        )
    return table


def regret(table: Sequence[dict[str, Any]]) -> float:
    """Share of the total time by which the chosen ways were slower than the best ones, over all lengths."""
    best = sum(row["best_s"] for row in table)
    return (sum(row["chosen_s"] for row in table) - best) / best


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """The table, in milliseconds."""
    heads = ("tokens", "MiB", "recomputed", "fetched", "ratio", "chose fetch", *STEPS)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in table:
        steps = [f"{1e3 * row.get(f'{name}_s', 0.0):.2f}" for name in STEPS]
        lines.append(
            f"| {row['tokens']:,} | {row.get('moved_mib', 0.0):.1f} | {1e3 * row['recomputed_s']:.0f} "
            f"| {1e3 * row['fetched_s']:.0f} | {row['fetched_s'] / row['recomputed_s']:.2f} "
            f"| {row['fetches_chosen']}/{row['decisions']} | {' | '.join(steps)} |"
        )
    return "\n".join(lines)


def chart(table: Sequence[dict[str, Any]], model: str) -> str:
    """Measured TTFT and what the agent's fitted figures said, over the prefix length."""

    def series(name: str, key: str, *more: str, dashed: bool = False) -> Series:
        points = [(row["tokens"], 1e3 * sum(row[each] for each in (key, *more))) for row in table if key in row]
        return Series(name, points, dashed=dashed)

    return line_chart(
        f"Time to first token on {model}: prefix fetched or recomputed",
        "prefix, tokens",
        "ms",
        [
            series("recomputed", "recomputed_s"),
            series("fetched", "fetched_s"),
            series("recompute, model", "predicted_recompute_s", dashed=True),
            series("fetch, model", "predicted_fetch_s", "predicted_rest_s", dashed=True),
        ],
    )


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-port", type=int, default=18_600)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    base = options.base_port
    ports = [[base + 10 * kind + at for at in range(3)] for kind in range(4)]
    cluster = Cluster(
        ClusterOptions(
            ports=Ports(base + 90, base + 91, *ports),
            model=options.model,
            served_name=options.model,
            kv_tokens=12_000,
            pool_bytes=3 << 30,
            engine_flags=("--threads", str(options.threads)),
        )
    )
    with cluster:
        for at in range(3):
            cluster.start_engine(at)
            os.environ["REPLICA_AGENT_FETCH_MARGIN"] = "-100" if at == FORCED else "0.1"
            cluster.start_agent(at)
        rows = asyncio.run(measure(cluster, options.lengths, options.rounds, options.seed))
    table = summarize(rows)
    found = {
        "benchmark": "fetch",
        "model": options.model,
        "date": datetime.date.today().isoformat(),
        "host": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "threads": options.threads,
        "regret": regret(table),
        "table": table,
        "rows": rows,
    }
    options.out.with_suffix(".json").write_text(json.dumps(found) + "\n")
    options.out.with_suffix(".svg").write_text(chart(table, options.model))
    print(markdown(table))
    print(f"\nregret of the decision: {100 * found['regret']:.1f} % of the best total")


if __name__ == "__main__":
    main()
