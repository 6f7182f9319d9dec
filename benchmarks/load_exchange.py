"""What it costs that gateways know of each other's placements: CPU per request, of a gateway and of an agent.

    python benchmarks/load_exchange.py [--seconds 5] [--out benchmarks/results/load-exchange.jsonl]

One agent and one to four gateways, each a process with a uvloop as in the product: the agent's HTTP side and report
streams, and each gateway's announcer and report stream. Requests are made up: each is counted in flight, sees its first
token after 30 ms and ends after 300 ms; arrivals are Poisson. What the same takes without announcer and stream, and
what is spent while no request comes, is subtracted. `seen` is the time from a placement by one gateway until another
one counts it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn
import uvloop
from following import report_stream
from stamp import stamp

from gateway.fleet.agent_access import agent_access, agent_client
from gateway.fleet.announcer import Announcer
from gateway.fleet.inflight import InFlight, Ticket
from gateway.fleet.others import GatewayId
from gateway.fleet.replica import Replica
from gateway.placement.index import PrefixIndex
from gateway.settings import ReplicaSettings, Settings

CASES = [(1, 20), (2, 2), (2, 20), (2, 100), (4, 2), (4, 20), (4, 100)]
"""Gateways, and requests a second of each to this replica."""

FIRST_TOKEN_S, END_S = 0.03, 0.3
_WATCHED = 1 << 30
"""Prefill tokens of a request whose arrival at the other gateways is timed."""


class Found(NamedTuple):
    """What a process of a kind took while nothing happened and while requests came and went, in seconds of CPU."""

    kind: str
    idle_s: float
    busy_s: float
    count: int
    seen_ms: list[float]


async def _agent(listener: socket.socket, seconds: float, go: Any, out: Any) -> None:
    from replica_agent import replica as agent_replica
    from replica_agent.app import create_app
    from replica_agent.engine_client import EngineIdentity
    from replica_agent.settings import load_settings

    settings = load_settings(["--engine", "http://127.0.0.1:1", "--replica-id", "r"], {})
    replica = agent_replica.Replica(settings)
    replica.identity = EngineIdentity(engine="none", version="0", models=["m"], root=None)
    replica.hub.new_epoch("m")
    beating = asyncio.create_task(replica.hub.run())
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(replica), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.to_thread(go.wait)
    begin = time.process_time()
    await asyncio.sleep(seconds)
    idle, posts = time.process_time(), replica.gateways.announcements
    await asyncio.sleep(seconds)
    busy = time.process_time()
    out[1].put(Found("agent", idle - begin, busy - idle, replica.gateways.announcements - posts, []))
    await asyncio.to_thread(out[0].wait)
    replica.hub.close()
    beating.cancel()
    server.should_exit = True
    await serving


def agent(listener: socket.socket, seconds: float, go: Any, out: Any) -> None:
    """The agent's process."""
    uvloop.run(_agent(listener, seconds, go, out))


async def _drive(load: InFlight, rate: float, seconds: float) -> int:
    """Requests come and go; returns how many."""
    loop, rng, count = asyncio.get_running_loop(), random.Random(), 0
    end = at = loop.time()
    end += seconds
    while (at := at + rng.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, at - loop.time()))
        ticket: Ticket = load.admit(200)
        loop.call_later(FIRST_TOKEN_S, ticket.prefilled)
        loop.call_later(END_S, ticket.finish)
        count += 1
    return count


async def _gateway(
    url: str, number: int, rate: float, seconds: float, exchange: bool, ready: Any, go: Any, out: Any
) -> None:
    me = GatewayId(f"gateway-{number}", number)
    replica = Replica(ReplicaSettings(id="r", engine="http://127.0.0.1:1", agent=url), me=me)
    index = PrefixIndex(1 << 24)
    index.add_replica("r")
    client = agent_client(agent_access(Settings()))

    stream = report_stream(replica, index, client)
    tasks = []
    if exchange:
        announcer = Announcer(replica, httpx.URL(url), me, token="")
        tasks = [asyncio.create_task(stream.follow()), asyncio.create_task(announcer.run())]
        for _ in range(200):
            if replica.reporting and announcer.announcements:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
    ready.release()
    await asyncio.to_thread(go.wait)
    begin = time.process_time()
    await asyncio.sleep(seconds)
    idle = time.process_time()
    requests = await _drive(replica.load, rate, seconds)
    busy = time.process_time()
    seen: list[float] = []
    if exchange:
        # The clock is the host's own, so times of two processes compare.
        if number == 0:
            await asyncio.sleep(1.0)
            for _ in range(40):
                stamp_ms = time.monotonic_ns() // 1_000 % _WATCHED
                ticket = replica.load.admit(_WATCHED + stamp_ms)
                await asyncio.sleep(0.03 + random.random() / 50)
                ticket.finish()
                await asyncio.sleep(0.03)
        elif number == 1:
            until = time.monotonic() + 5.0
            last = 0
            told = replica.others.told

            def watch(beat: Any, own: Any) -> None:
                nonlocal last
                told(beat, own)
                found = replica.others.announced.prefill_tokens
                if found >= _WATCHED and found != last:
                    last = found
                    seen.append((time.monotonic_ns() // 1_000 % _WATCHED - (found - _WATCHED)) / 1_000)

            replica.others.told = watch  # type: ignore[method-assign]
            await asyncio.sleep(until - time.monotonic())
    out[1].put(Found("gateway", idle - begin, busy - idle, requests, seen))
    await asyncio.to_thread(out[0].wait)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()


def gateway(*arguments: Any) -> None:
    """A gateway's process."""
    uvloop.run(_gateway(*arguments))


def measure(gateways: int, rate: float, seconds: float, exchange: bool) -> dict[str, float]:
    """CPU microseconds per request and announcements, in sum over all processes of a kind."""
    spawn = multiprocessing.get_context("fork")
    go, done, ready, queue = spawn.Event(), spawn.Event(), spawn.Semaphore(0), spawn.SimpleQueue()
    listener = socket.socket()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    processes = [spawn.Process(target=agent, args=(listener, seconds, go, (done, queue)))]
    processes += [
        spawn.Process(target=gateway, args=(url, number, rate, seconds, exchange, ready, go, (done, queue)))
        for number in range(gateways)
    ]
    for process in processes:
        process.start()
    listener.close()
    for _ in range(gateways):
        ready.acquire()
    go.set()
    found = [queue.get() for _ in range(gateways + 1)]
    done.set()
    for process in processes:
        process.join()
    requests = sum(each.count for each in found if each.kind == "gateway")
    seen = sorted(ms for each in found for ms in each.seen_ms)
    result: dict[str, float] = {"requests": requests}
    for kind in ("gateway", "agent"):
        those = [each for each in found if each.kind == kind]
        result[f"{kind}_idle_us_per_s"] = sum(each.idle_s for each in those) / len(those) / seconds * 1e6
        result[f"{kind}_us"] = sum(each.busy_s - each.idle_s for each in those) / requests * 1e6
    result["announcements"] = sum(each.count for each in found if each.kind == "agent") / requests
    if seen:
        result |= {"seen_p50_ms": statistics.median(seen), "seen_p90_ms": seen[int(len(seen) * 0.9)]}
    return result


def main() -> None:
    """Prints, and writes, one line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path, help="append results as JSON lines")
    parser.add_argument("--case", type=int, action="append", help="only the n-th case")
    options = parser.parse_args()
    for gateways, rate in [CASES[at] for at in options.case] if options.case else CASES:
        base = measure(gateways, rate, options.seconds, exchange=False)
        found = measure(gateways, rate, options.seconds, exchange=True)
        found["gateway_us"] -= base["gateway_us"]
        found["gateway_idle_us_per_s"] -= base["gateway_idle_us_per_s"]
        line = (
            {"gateways": gateways, "requests_per_s_each": rate} | {k: round(v, 2) for k, v in found.items()} | stamp()
        )
        print(json.dumps(line))
        if options.out:
            with options.out.open("a") as lines:
                lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
