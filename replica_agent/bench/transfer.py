"""How fast slots move between two pools of this host, on every path there is, beside a memcpy of the same bytes.

Every round takes each path once, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvstore.slot import TRAILER_BYTES
from replica_agent.bench.gpu import gpu_speeds
from replica_agent.bench.pair import Pair, pair
from replica_agent.bench.recompute import recompute
from replica_agent.bench.report import Report, Speed
from replica_agent.bench.whole import whole_fetch

BETWEEN_PROCESSES = ("shm", "nixl", "tcp")
LOOPBACK = "loopback"
PUSH = "nixl-push"
GPU = "gpu"
PATHS = (*BETWEEN_PROCESSES, LOOPBACK, PUSH, GPU)

_OVER_TCP = {"UCX_TLS": "tcp,self"}
"""What NIXL has between two hosts without RDMA. UCX reads it when it is loaded, so this takes a process of its own."""

_FLOW = " flow"

_SECTION_S = 60.0
_PUSH_S = 120.0
_CPU_FETCHES = 8


@dataclass(frozen=True)
class Options:
    """`rounds` are cut short after a minute for each part of the benchmark. `paths` are some of `PATHS`; `model` is the
    one that recomputes."""

    slots: int = 64
    slot_bytes: int = 262_144
    rounds: int = 60
    paths: tuple[str, ...] = PATHS
    idle_s: float = 5.0
    model: str = "smollm2"


@dataclass
class _Timings:
    """Seconds of each round, by path, and why a path was given up."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    async def rounds(self, runs: Mapping[str, Callable[[], Awaitable[float]]], rounds: int) -> int:
        """Take every path once a round; says how many rounds there were."""
        end = time.monotonic() + _SECTION_S
        for name, run in runs.items():
            await self._take(name, run, warm=True)
        for done in range(rounds):
            if time.monotonic() >= end:
                return done
            for name, run in runs.items():
                await self._take(name, run)
        return rounds

    async def _take(self, name: str, run: Callable[[], Awaitable[float]], *, warm: bool = False) -> None:
        if name in self.failed:
            return
        try:
            seconds = await run()
        except Exception as error:
            self.failed[name] = str(error) or type(error).__name__
            return
        if not warm:
            self.seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """Of `other`'s time to this one's, round by round."""
        return statistics.median(b / a for a, b in zip(self.seconds[name], self.seconds[other], strict=False))

    def flow(self, name: str) -> float:
        """Memcpy's time to that of the slots behind the first, by medians; 0 for memcpy itself."""
        flow = self.seconds.get(name + _FLOW)
        return self.median("memcpy") / statistics.median(flow) if flow else 0.0


async def measure(options: Options) -> Report:
    """The whole benchmark: at most some seven minutes."""
    between = [name for name in options.paths if name in BETWEEN_PROCESSES]
    block_bytes = options.slot_bytes - TRAILER_BYTES
    async with pair(options.slots, block_bytes, between) as two:
        unavailable = {**two.unavailable, **two.peer.unavailable}
        local = [name for name in options.paths if name in two.transports]
        speeds, rounds = await _speeds(two, local, options.rounds)
        idle = await _idle(two, options.idle_s)
    if PUSH in options.paths:
        speeds.append(await _pushed(options))
    if GPU in options.paths:
        speeds += await asyncio.to_thread(gpu_speeds, options.slots, options.slot_bytes, options.rounds)
    whole = [await whole_fetch(name, options.rounds, _SECTION_S) for name in local if name in between]
    again = await recompute(options.model)
    return Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        slots=options.slots,
        slot_bytes=options.slot_bytes,
        rounds=rounds,
        speeds=speeds,
        whole=whole,
        recompute=again,
        idle_cpu=idle,
        unavailable=unavailable,
    )


async def push_only(options: Options) -> Speed:
    """What `nixl-push` does in this process, however UCX was configured for it."""
    async with pair(options.slots, options.slot_bytes - TRAILER_BYTES, [PUSH]) as two:
        if PUSH not in two.transports:
            return Speed(path=PUSH, failed=two.unavailable[PUSH])
        speeds, _ = await _speeds(two, [PUSH], options.rounds)
        return speeds[-1]


async def _speeds(two: Pair, names: list[str], rounds: int) -> tuple[list[Speed], int]:
    timings = _Timings()

    async def fetch(name: str) -> float:
        arrivals: list[float] = []
        seconds = await two.fetch(name, lambda index: arrivals.append(time.perf_counter()))
        flow = (arrivals[-1] - arrivals[0]) * len(arrivals) / max(1, len(arrivals) - 1)
        timings.seconds.setdefault(name + _FLOW, []).append(flow)
        return seconds

    runs: dict[str, Callable[[], Awaitable[float]]] = {"memcpy": two.memcpy}
    runs |= {name: partial(fetch, name) for name in names}
    done = await timings.rounds(runs, rounds)
    count = two.slots * two.region.pitch
    speeds = []
    for name, run in runs.items():
        if name in timings.failed:
            speeds.append(Speed(path=name, failed=timings.failed[name]))
            continue
        before = await two.cpu_s()
        for _ in range(_CPU_FETCHES):
            await run()
        cpu_s = sum(await two.cpu_s()) - sum(before)
        speeds.append(
            Speed(
                path=name,
                median_ms=round(timings.median(name) * 1e3, 3),
                median_gb_s=round(count / timings.median(name) / 1e9, 2),
                best_gb_s=round(count / min(timings.seconds[name]) / 1e9, 2),
                of_memcpy=round(timings.ratio(name, "memcpy"), 3),
                flow_of_memcpy=round(timings.flow(name), 3),
                cpu_s_per_gb=round(cpu_s / (_CPU_FETCHES * count) * 1e9, 3),
            )
        )
    return speeds, done


async def _idle(two: Pair, seconds: float) -> dict[str, float]:
    before = await two.cpu_s()
    await asyncio.sleep(seconds)
    after = await two.cpu_s()
    return {who: round((b - a) / seconds, 4) for who, a, b in zip(("reader", "owner"), before, after, strict=True)}


async def _pushed(options: Options) -> Speed:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replica_agent.bench", "transfer", "--json", "--push-only"),
        *("--slots", str(options.slots), "--slot-bytes", str(options.slot_bytes), "--rounds", str(options.rounds)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **_OVER_TCP},
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), _PUSH_S)
        speed = msgspec.json.decode(out, type=Speed)
    except (TimeoutError, msgspec.MsgspecError) as error:
        speed = Speed(path=PUSH, failed=str(error) or f"not done in {_PUSH_S:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return msgspec.structs.replace(speed, path=f"{PUSH} over TCP")
