"""Report streams between an agent and a gateway: how long either event loop is held while a million blocks are told.

    python benchmarks/reports.py [--blocks 1000000] [--rounds 3] [--out benchmarks/results/reports.jsonl]

Two processes, each with the real thing on a loop of its own (the agent's whole application behind uvicorn, the
gateway's `ReportStream` into an index with a ledger). A watch takes a turn of either loop whenever it can and notes how
long the others took between two of its turns, in CPU of the thread and by the clock; the first does not depend on what
else the machine does. A million blocks are chains of 128, told by events of 16 blocks.

told      a gateway connects: from the first byte to a confirmed snapshot
changing  the same while the engine stores and evicts 16 blocks 200 times a second
cleared   the engine's cache is reset: until the gateway has let go of everything, and the agent has freed it
lost      the agent's process ends: until the gateway has let go of everything
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import uvloop
from following import report_stream
from stamp import stamp

from gateway.duplication.ledger import Ledger
from gateway.fleet.replica import Replica as FollowedReplica
from gateway.placement.index import PrefixIndex
from gateway.settings import ReplicaSettings
from kvstore.messages import Tier
from replica_agent.app import create_app, warm_up
from replica_agent.engine_client import EngineIdentity
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored
from replica_agent.replica import Replica
from replica_agent.settings import load_settings

CHAIN = 128
EVENT = 16
DEADLINE_S = 120.0


class Watch:
    """The longest that others held the loop between two turns of its own, since `restart`; in seconds."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    async def run(self) -> None:
        """Takes turns until cancelled."""
        while True:
            cpu, wall = time.thread_time(), time.perf_counter()
            await asyncio.sleep(0)
            self.cpu = max(self.cpu, time.thread_time() - cpu)
            self.wall = max(self.wall, time.perf_counter() - wall)

    def restart(self) -> dict[str, float]:
        """What there was, in ms, and from now on anew."""
        found = {"cpu_ms": round(self.cpu * 1e3, 1), "wall_ms": round(self.wall * 1e3, 1)}
        self.cpu = self.wall = 0.0
        return found


def chain(number: int) -> Iterator[BlockStored]:
    """One chain as an engine tells it."""
    rng = random.Random(number)
    parent = None
    for begin in range(0, CHAIN, EVENT):
        hashes = [number * CHAIN + begin + at for at in range(EVENT)]
        yield BlockStored(
            hashes=hashes, parent=parent, tokens=rng.randbytes(EVENT * 64), block_size=16, tier=Tier.HBM, full=True
        )
        parent = hashes[-1]


async def agent(port: int, blocks: int) -> None:
    """Serves what `blocks` blocks are, and does what it reads, a line at a time."""
    await warm_up()
    gc.freeze()
    flags = ["--engine", "http://127.0.0.1:1", "--replica-id", "r", "--port", str(port)]
    replica = Replica(load_settings(flags, {}))
    replica.identity = EngineIdentity(engine="vllm", version="0", models=["m"], root=None)
    replica.hub.new_epoch("m")
    chains = blocks // CHAIN
    begun = time.process_time()
    for number in range(chains):
        replica.catalogue.apply(chain(number))
    applied = time.process_time() - begun
    replica.hub.flush()
    server = uvicorn.Server(uvicorn.Config(create_app(replica), port=port, log_config=None, lifespan="off"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    watch = Watch()
    tasks = [asyncio.create_task(work) for work in (server.serve(), replica.hub.run(), watch.run())]
    changing: asyncio.Task[None] | None = None

    async def change() -> None:
        for number in range(chains, 1 << 40):
            for stored in chain(number):
                replica.catalogue.apply([stored])
                old = [hash - blocks for hash in stored.hashes]
                replica.catalogue.apply([BlockRemoved(hashes=old, tier=Tier.HBM)])
                replica.hub.changed()
                await asyncio.sleep(0.005)

    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print(json.dumps({"apply_per_s": round(chains * CHAIN / applied)}), flush=True)
    while line := (await reader.readline()).strip():
        match line:
            case b"watched":
                pass
            case b"change":
                changing = asyncio.create_task(change())
            case b"clear":
                if changing is not None:
                    changing.cancel()
                replica.catalogue.apply([AllCleared()])
                replica.hub.changed()
                replica.hub.beat()
        print(json.dumps(watch.restart()), flush=True)
    for task in tasks:
        task.cancel()


class Agent:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def say(self, word: str) -> dict[str, Any]:
        """How long its loop was held since the last word."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        return await self.hear()

    async def hear(self) -> dict[str, Any]:
        """A line of it."""
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return told

    async def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        await self._process.wait()


async def one_round(blocks: int) -> dict[str, Any]:
    """All of it, once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--agent", str(port), "--blocks", str(blocks),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    other = Agent(process)
    told: dict[str, Any] = {"blocks": blocks // CHAIN * CHAIN} | await other.hear()
    index = PrefixIndex()
    Ledger(index).register("r", "m", 1 << 20, 16)
    index.add_replica("r")
    url = f"http://127.0.0.1:{port}"
    watch = Watch()

    async def until(reporting: bool, held: bool) -> float:
        begun = time.perf_counter()
        async with asyncio.timeout(DEADLINE_S):
            while replica.reporting is not reporting or bool(len(index)) is not held:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return round(time.perf_counter() - begun, 2)

    async with httpx.AsyncClient(trust_env=False) as client:
        (await client.get(f"{url}/v1/hello")).raise_for_status()  # what only the first request costs
        watching = asyncio.create_task(watch.run())
        for phase in ("told", "changing"):
            replica = FollowedReplica(ReplicaSettings(id="r", engine="http://127.0.0.1:1", agent=url))
            stream = report_stream(replica, index, client)
            await other.say("change" if phase == "changing" else "watched")
            watch.restart()
            following = asyncio.create_task(stream.follow())
            seconds = await until(True, True)
            told[phase] = {"s": seconds, "gateway": watch.restart(), "agent": await other.say("watched")}
            assert index.held_blocks("r") > 0.99 * told["blocks"]
            assert stream.losses == {}
            if phase == "told":
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                index.clear("r")
        await other.say("clear")
        watch.restart()
        seconds = await until(True, False)
        await asyncio.sleep(2)
        told["cleared"] = {"s": seconds, "gateway": watch.restart(), "agent": await other.say("watched")}
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await other.kill()
        watching.cancel()
    return told


def main() -> None:
    """Prints one JSON object a round, and adds them to a file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--agent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent:
        uvloop.run(agent(options.agent, options.blocks))
        return
    for _ in range(options.rounds):
        told = uvloop.run(one_round(options.blocks))
        print(json.dumps(told), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(told | stamp()) + "\n")


if __name__ == "__main__":
    main()
