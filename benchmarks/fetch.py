"""Fetched against recomputed: time to first token over prefix length and link, the decider's curves, and its regret.

    python benchmarks/fetch.py --model smollm2 --out benchmarks/results/fetch-smollm2

Three replicas on this machine, one request at a time: `replica-0` has computed and saved a prompt of each length. Then,
in rounds, every length in another order: `replica-1`, which always fetches (a margin below zero), gets it with a hint;
`replica-2`, which decides, too; and `replica-1` without one, so that it is recomputed. Caches are emptied before each.
`--links`: MB/s between the agents (the tcp transport through a relay), or shm; from fast to slow, for a link that is
known as slow is not tried again. Writes OUT.json (raw) and OUT.svg, and prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from relay import HOST, Relay
from stamp import stamp

from gateway.demo.cluster import Cluster, ClusterOptions, Ports
from gateway.plan.plot import Series, line_chart
from kvstore.hint import FIELD, NAME, Hint
from kvstore.messages import FetchRecord

LENGTHS = (128, 512, 1024, 2048, 4096)
LINKS = ("shm", "50", "15", "8")
TAIL = 5
"""Tokens behind the last whole block: they are computed in every arm."""
SOURCE, FORCED, DECIDES = 0, 1, 2
READY_S = 180.0
STEPS = ("decide", "lease", "move", "verify", "confirm", "copy")
ARMS = ("fetched", "decided", "recomputed")
DEADLINE_MS = 30_000
WARM_UPS = 4
"""Fetches of either reader over a link that was changed, of the shorter lengths, before anything is measured."""
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
        await self._holds(SOURCE, lambda held: held >= self._saved)

    async def empty(self, at: int) -> None:
        """A replica with no KV, neither in the engine nor in the agent's pool."""
        (await self._http.post(f"{self._cluster.engine_url(at)}/reset_prefix_cache")).raise_for_status()
        await self._holds(at, lambda held: not held)

    async def _holds(self, at: int, right: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + 60
        while True:
            pool = (await self._http.get(f"{self._cluster.agent_url(at)}/health")).json()["kv"]["pool"]
            if right(pool["held"]):
                return
            assert time.monotonic() < deadline, f"replica-{at}: {pool}"
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


async def measure(
    cluster: Cluster, relay: Relay, links: Sequence[str], lengths: Sequence[int], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """One row a (link, round, length): the seconds of every arm and the records."""
    rows: list[dict[str, Any]] = []
    async with relay, httpx.AsyncClient(trust_env=False, timeout=120) as http:
        bench = Bench(cluster, http, seed)
        await bench.ready()
        for at in (FORCED, DECIDES):  # the estimators of either reader have seen prefills, as in a running fleet
            for blocks in (8, 16, 32, 64, 128):
                await bench.ask(at, bench.prompt(blocks))
        prompts = {}
        for tokens in lengths:
            prompts[tokens] = bench.prompt(tokens // 16)
            await bench.ask(SOURCE, prompts[tokens])
            await bench.saved(tokens // 16)

        async def arm(at: int, tokens: int, hinted: bool = True) -> tuple[float, FetchRecord | None]:
            await bench.empty(at)
            return await bench.ask(at, prompts[tokens], hinted=tokens // 16 if hinted else 0)

        for link in links:
            relay.rate = 0.0 if link == "shm" else float(link) * 1e6
            for tokens in (sorted(lengths) * WARM_UPS)[:WARM_UPS]:
                for at in (FORCED, DECIDES):
                    await arm(at, tokens)
            for number in range(rounds):
                for tokens in random.Random(seed + number).sample(list(lengths), len(lengths)):
                    fetched, forced = await arm(FORCED, tokens)
                    decided, record = await arm(DECIDES, tokens)
                    recomputed, _ = await arm(FORCED, tokens, hinted=False)
                    assert forced is not None and record is not None, "recorded"
                    rows.append(
                        {
                            "link": link,
                            "round": number,
                            "tokens": tokens,
                            "fetched_s": fetched,
                            "decided_s": decided,
                            "recomputed_s": recomputed,
                            "forced": msgspec.to_builtins(forced),
                            "decision": msgspec.to_builtins(record),
                        }
                    )
    return rows


def brought(record: dict[str, Any]) -> bool:
    """Whether blocks were fetched."""
    return record["outcome"] in ("fetched", "partial")


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians a link and length, and how often fetching was chosen. Predictions are the decider's."""
    table = []
    links = list(dict.fromkeys(row["link"] for row in rows))
    ordered = sorted(rows, key=lambda row: (links.index(row["link"]), row["tokens"]))
    for link, tokens in dict.fromkeys((row["link"], row["tokens"]) for row in ordered):
        at = [row for row in rows if (row["link"], row["tokens"]) == (link, tokens)]
        moved = [row["forced"] for row in at if brought(row["forced"])]
        decisions = [row["decision"] for row in at]
        line = {"link": link, "tokens": tokens, "rounds": len(at), "fetches_chosen": sum(map(brought, decisions))}
        line |= {f"{name}_s": statistics.median(row[f"{name}_s"] for row in at) for name in ARMS}
        for name in ("fetch", "rest", "recompute"):
            line[f"predicted_{name}_s"] = statistics.median(each[f"predicted_{name}_s"] for each in decisions)
        if moved:
            line |= {f"{name}_s": statistics.median(each[f"{name}_s"] for each in moved) for name in (*STEPS, "total")}
            line["moved_mib"] = moved[0]["moved"] * moved[0]["block_bytes"] / MIB
        table.append(line)
    return table


def regret(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By which share of the total a way was slower than the better arm of the same round and length: what the decided
    requests took, what all fetched ones took, and all recomputed ones. `chosen` is what the arms took that were chosen:
    without what one replica differs by from the other, and one minute from the next. `errors`: predicted over measured,
    the decider's figures; its recompute time, and that of a fetch and the rest, beside the arms of the same round."""
    best = sum(min(row["fetched_s"], row["recomputed_s"]) for row in rows)
    fetches = sum(brought(row["decision"]) for row in rows)
    recompute = [row["decision"]["predicted_recompute_s"] / row["recomputed_s"] for row in rows]
    fetch = [
        (row["decision"]["predicted_fetch_s"] + row["decision"]["predicted_rest_s"]) / row["fetched_s"] for row in rows
    ]
    return {
        "best_s": best,
        "fetches_chosen": fetches,
        "recomputes_chosen": len(rows) - fetches,
        "fetching_was_better": sum(row["fetched_s"] < row["recomputed_s"] for row in rows),
        "decided": sum(row["decided_s"] for row in rows) / best - 1,
        "chosen": sum(row["fetched_s"] if brought(row["decision"]) else row["recomputed_s"] for row in rows) / best - 1,
        "always_fetch": sum(row["fetched_s"] for row in rows) / best - 1,
        "never_fetch": sum(row["recomputed_s"] for row in rows) / best - 1,
        "errors": {
            name: {"median": statistics.median(all), "least": min(all), "most": max(all)}
            for name, all in (("recompute", recompute), ("fetch", fetch))
        },
    }


def markdown(table: Sequence[dict[str, Any]], regrets: dict[str, dict[str, Any]]) -> str:
    """The tables, in milliseconds."""
    heads = ("link", "tokens", "MiB", *ARMS, "ratio", "chose fetch", "recompute, expected", "fetch, expected", *STEPS)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in table:
        steps = [f"{1e3 * row.get(f'{name}_s', 0.0):.1f}" for name in STEPS]
        arms = [f"{1e3 * row[f'{name}_s']:.0f}" for name in ARMS]
        lines.append(
            f"| {row['link']} | {row['tokens']:,} | {row.get('moved_mib', 0.0):.1f} | {' | '.join(arms)} "
            f"| {row['fetched_s'] / row['recomputed_s']:.2f} | {row['fetches_chosen']}/{row['rounds']} "
            f"| {1e3 * row['predicted_recompute_s']:.0f} "
            f"| {1e3 * (row['predicted_fetch_s'] + row['predicted_rest_s']):.0f} | {' | '.join(steps)} |"
        )
    lines += [
        "",
        "| link | fetched / recomputed | fetching was better | regret | of the choice | always fetch | never fetch |",
    ]
    lines += ["|---" * 7 + "|"]
    for link, each in regrets.items():
        shares = [f"{100 * each[way]:.1f} %" for way in ("decided", "chosen", "always_fetch", "never_fetch")]
        chosen = each["fetches_chosen"], each["recomputes_chosen"]
        lines.append(f"| {link} | {chosen[0]} / {chosen[1]} | {each['fetching_was_better']} | {' | '.join(shares)} |")
    for name, error in regrets["all"]["errors"].items():
        lines.append(
            f"\n{name}: expected / measured {error['median']:.2f}, {error['least']:.2f} to {error['most']:.2f}"
        )
    return "\n".join(lines)


def chart(table: Sequence[dict[str, Any]], model: str) -> str:
    """Measured TTFT and what the deciding replica expected, over the prefix length."""

    def series(name: str, link: str, key: str, *more: str, dashed: bool = False) -> Series:
        rows = [row for row in table if row["link"] == link]
        points = [(row["tokens"], 1e3 * sum(row[each] for each in (key, *more))) for row in rows]
        return Series(name, points, dashed=dashed)

    links = list(dict.fromkeys(row["link"] for row in table))
    lines = [
        series("recomputed", links[-1], "recomputed_s"),
        series("recompute, expected", links[-1], "predicted_recompute_s", dashed=True),
    ]
    for link in links[:3]:
        name = link if link == "shm" else f"{link} MB/s"
        lines.append(series(f"fetched, {name}", link, "fetched_s"))
        lines.append(series("expected", link, "predicted_fetch_s", "predicted_rest_s", dashed=True))
    return line_chart(f"Time to first token on {model}: prefix fetched or recomputed", "prefix, tokens", "ms", lines)


def run(options: argparse.Namespace, links: Sequence[str]) -> list[dict[str, Any]]:
    """A cluster whose agents move KV by shm, or through the relay."""
    base = options.base_port
    ports = [[base + 10 * kind + at for at in range(3)] for kind in range(4)]
    data, relayed = base + 80, base + 81
    cluster = Cluster(
        ClusterOptions(
            ports=Ports(base + 90, base + 91, *ports),
            model=options.model,
            served_name=options.model,
            kv_tokens=12_000,
            pool_bytes=1 << 30,
            engine_flags=("--threads", str(options.threads)),
        )
    )
    os.environ["REPLICA_AGENT_TRANSPORTS"] = "shm" if links == ["shm"] else "tcp"
    with cluster:
        for at in range(3):
            cluster.start_engine(at)
            os.environ["REPLICA_AGENT_FETCH_MARGIN"] = "-100" if at == FORCED else "0.1"
            os.environ["REPLICA_AGENT_DATA_PORT"] = str(data if at == SOURCE else 0)
            os.environ["REPLICA_AGENT_DATA_ADVERTISE"] = f"{HOST}:{relayed}" if at == SOURCE else ""
            cluster.start_agent(at)
        return asyncio.run(measure(cluster, Relay(relayed, data), links, options.lengths, options.rounds, options.seed))


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--links", nargs="+", default=list(LINKS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-port", type=int, default=18_600)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    rows = run(options, ["shm"]) if "shm" in options.links else []
    if slow := [link for link in options.links if link != "shm"]:
        rows += run(options, slow)
    table = summarize(rows)
    regrets = {link: regret([row for row in rows if row["link"] == link]) for link in options.links}
    regrets["all"] = regret(rows)
    found = {
        "benchmark": "fetch",
        "model": options.model,
        **stamp(),
        "threads": options.threads,
        "took_s": round(time.monotonic() - began),
        "regret": regrets,
        "table": table,
        "rows": rows,
    }
    options.out.with_suffix(".json").write_text(json.dumps(found) + "\n")
    options.out.with_suffix(".svg").write_text(chart(table, options.model))
    print(markdown(table, regrets))


if __name__ == "__main__":
    main()
