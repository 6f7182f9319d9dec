"""The index: how fast and how large. `benchmarks/structures.py` has other structures on the same blocks.

    python benchmarks/index.py [--blocks 1000000] [--out benchmarks/results/index.jsonl]
    python benchmarks/index.py --only bound --prompts 1000000

CPU time of one process; compare within one run. Blocks are chains of 6,250 random keys, each held by two of 8 replicas.

stream    every chain stored by its two holders in events of 125 blocks, matched, and a fifth of them removed, tails
          first: as messages through a report stream's decoding, where what arrives in one piece (64 KiB) is applied at
          once; a ledger and a placer listen
index     the same event by event into the index alone, with arrays as keys
ledger    as `index`, with a ledger that listens
large     10 M blocks: bytes for each, the slowest piece; 1,000 replicas
pieces    a snapshot of 1 M blocks, its loss and the report on shared prefixes: how long each holds the event loop
bound     unique prompts of 8k tokens until the bound holds
uses      what it takes a placer to learn of a prompt that another gateway placed: first seen, and going on
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from following import report_stream
from stamp import stamp

from gateway.duplication.ledger import Ledger
from gateway.fleet.replica import Replica
from gateway.placement.blocks import PIECE_BLOCKS
from gateway.placement.column import Keys
from gateway.placement.evictions import Evictions
from gateway.placement.index import PrefixIndex
from gateway.placement.placer import Placer
from gateway.settings import ReplicaSettings
from kvstore.messages import Delta, FrameReader, Heartbeat, Removed, Snapshot, Stored, Tier, encode_frame

LENGTH = 6_250
EVENT = 125
REPLICAS = [f"replica-{i}" for i in range(8)]
CHUNK = 1 << 16
NOWHERE = "http://127.0.0.1:1"


def chains(blocks: int) -> Keys:
    """Rows of 6,250 keys."""
    keys = np.random.default_rng(1).integers(1, 1 << 63, (max(1, blocks // LENGTH), LENGTH), dtype=np.int64)
    return keys.astype(np.uint64)


def holders(count: int) -> list[list[int]]:
    """Which two replicas hold each chain."""
    rng = np.random.default_rng(2)
    return [rng.choice(len(REPLICAS), 2, replace=False).tolist() for _ in range(count)]


def events(keys: Keys) -> Iterator[tuple[Keys, Keys]]:
    """Keys and parents, 125 at a time."""
    parents = np.concatenate((np.zeros(1, np.uint64), keys[:-1]))
    for begin in range(0, keys.size, EVENT):
        yield keys[begin : begin + EVENT], parents[begin : begin + EVENT]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def timed(work: Callable[[], object], rounds: int = 1) -> float:
    """CPU seconds of one call."""
    begin = time.process_time()
    for _ in range(rounds):
        work()
    return (time.process_time() - begin) / rounds


def fresh(limit: int = 1 << 30, ledger: bool = False, placer: bool = False) -> PrefixIndex:
    index = PrefixIndex(limit)
    if placer:
        Placer(index)
    told = Ledger(index) if ledger else None
    for replica in REPLICAS:
        index.add_replica(replica)
        if told is not None:
            told.register(replica, "m", 1 << 20, 16)
    return index


def figures(stored: float, placements: int, removed: float, removals: int, match: float, size: float) -> dict[str, Any]:
    return {
        "store_per_s": round(placements / stored),
        "remove_per_s": round(removals / removed),
        "match_us": round(match * 1e6, 1),
        "bytes_per_block": round(size, 1),
    }


# events


def index_alone(all_chains: Keys, held: list[list[int]], ledger: bool) -> dict[str, Any]:
    before = resident()
    index = fresh(ledger=ledger)
    placements = 2 * all_chains.size

    def store() -> None:
        for keys, ours in zip(all_chains, held, strict=True):
            for replica in ours:
                for some, parents in events(keys):
                    index.store(REPLICAS[replica], Tier.HBM, some, parents)

    def remove() -> None:
        for keys, ours in zip(gone, held, strict=False):
            for replica in ours:
                for some, _ in reversed(list(events(keys))):
                    index.remove(REPLICAS[replica], Tier.HBM, some[::-1].copy())

    stored = timed(store)
    size = (resident() - before) / all_chains.size
    units = dict.fromkeys(REPLICAS, 1)
    prompt = itertools.cycle(all_chains)
    match = timed(lambda: index.match(next(prompt), units), 100)
    gone = all_chains[: max(1, len(all_chains) // 5)]
    removed = timed(remove)
    return figures(stored, placements, removed, 2 * gone.size, match, size)


class Streams:
    """Report streams without their connections: frames in, index changed."""

    def __init__(self, index: PrefixIndex) -> None:
        client = httpx.AsyncClient()
        self.streams = [
            report_stream(Replica(ReplicaSettings(id=replica, engine=NOWHERE, agent=NOWHERE)), index, client)
            for replica in REPLICAS
        ]

    async def feed(self, replica: int, data: bytes) -> None:
        """As `ReportStream` does with what arrives, a chunk at a time."""
        reader, stream = FrameReader(), self.streams[replica]
        for begin in range(0, len(data), CHUNK):
            await stream.take(reader, data[begin : begin + CHUNK])


def beat(seq: int, digest: int) -> Heartbeat:
    return msgspec.structs.replace(BEAT, seq=seq, digest=digest)


BEAT = Heartbeat(
    epoch=1,
    seq=0,
    engine_up=True,
    running=0,
    waiting=0,
    queued_prefill_tokens=0,
    prefill_tokens_per_s=None,
    kv_usage=0.0,
    capacity_blocks=0,
    blocks=0,
    digest=0,
)


def snapshot(keys: Keys, parents: Keys, part: int = 0, last: bool = True) -> Snapshot:
    stored = Stored(tier=Tier.HBM, keys=keys.tobytes(), parents=parents.tobytes())
    return Snapshot(epoch=1, seq=0, part=part, last=last, stored=[stored])


def through_streams(all_chains: Keys, held: list[list[int]]) -> dict[str, Any]:
    before = resident()
    index = fresh(ledger=True, placer=True)
    streams = Streams(index)
    none = np.zeros(0, np.uint64)
    seqs = [0] * len(REPLICAS)
    first = encode_frame(snapshot(none, none)) + encode_frame(beat(0, 0))

    def frames(rows: Keys, gone: bool) -> list[bytearray]:
        sent = [bytearray() for _ in REPLICAS]
        for keys, ours in zip(rows, held, strict=False):
            for replica in ours:
                told = list(events(keys))
                for some, parents in reversed(told) if gone else told:
                    seqs[replica] += 1
                    change: Removed | Stored = Removed(tier=Tier.HBM, keys=some[::-1].tobytes())
                    if not gone:
                        change = Stored(tier=Tier.HBM, keys=some.tobytes(), parents=parents.tobytes())
                    sent[replica] += encode_frame(Delta(epoch=1, seq=seqs[replica], changes=[change]))
        return sent

    async def feed(sent: list[bytearray]) -> None:
        for replica, data in enumerate(sent):
            await streams.feed(replica, bytes(data))

    asyncio.run(feed([bytearray(first) for _ in REPLICAS]))
    stored_frames = frames(all_chains, gone=False)
    prepared = resident() - before
    stored = timed(lambda: asyncio.run(feed(stored_frames)))
    size = (resident() - before - prepared) / all_chains.size
    units = dict.fromkeys(REPLICAS, 1)
    prompt = itertools.cycle(all_chains)
    match = timed(lambda: index.match(next(prompt), units), 100)
    gone = all_chains[: max(1, len(all_chains) // 5)]
    removed_frames = frames(gone, gone=True)
    removed = timed(lambda: asyncio.run(feed(removed_frames)))
    return figures(stored, 2 * all_chains.size, removed, 2 * gone.size, match, size)


# size and pieces


def large() -> Iterator[dict[str, Any]]:
    for count, replicas in ((10_000_000, 64), (1_000_000, 1_000)):
        before = resident()
        index = PrefixIndex(2 << 30)
        for i in range(replicas):
            index.add_replica(f"replica-{i}")
        rng = np.random.default_rng(4)
        took: list[float] = []
        for at in range(0, count, PIECE_BLOCKS):
            keys = rng.integers(1, 1 << 63, PIECE_BLOCKS, dtype=np.int64).astype(np.uint64)
            for again in range(2):
                begin = time.process_time()
                index.store(f"replica-{(at // PIECE_BLOCKS * 7 + again * 31) % replicas}", Tier.HBM, keys, keys)
                took.append(time.process_time() - begin)
        yield {
            "large_blocks": len(index),
            "replicas": replicas,
            "bytes_per_block": round(index.nbytes / len(index), 1),
            "resident_per_block": round((resident() - before) / len(index), 1),
            "store_per_s": round(2 * len(index) / sum(took)),
            "worst_piece_ms": round(max(took) * 1e3, 1),
            "evicted": index.evicted_blocks,
        }
        del index


def pieces(blocks: int) -> dict[str, Any]:
    """The longest the event loop is held, in CPU ms, while a snapshot is applied and lost again; a ledger listens."""
    index = fresh(ledger=True, placer=True)
    streams = Streams(index)
    keys = chains(blocks).reshape(-1)
    parts = -(-keys.size // 65_536)
    data = b"".join(
        encode_frame(snapshot(part, part, number, number == parts - 1))
        for number, part in enumerate(keys[at : at + 65_536] for at in range(0, keys.size, 65_536))
    )
    data += encode_frame(beat(0, int(np.add.reduce(keys))))

    async def run() -> tuple[float, float]:
        longest: list[float] = []

        async def watch() -> None:
            while True:
                begin = time.process_time()
                await asyncio.sleep(0)
                longest.append(time.process_time() - begin)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await streams.feed(0, data)
        assert index.held_blocks(REPLICAS[0]) == keys.size
        snapshot_s = max(longest)
        longest.clear()
        await streams.streams[0]._lost("benchmark", "reports")
        await asyncio.sleep(0)
        assert len(index) == 0
        watching.cancel()
        return snapshot_s, max(longest)

    times: list[tuple[float, float]] = []
    taken = timed(lambda: times.append(asyncio.run(run())))
    ((applied, lost),) = times
    return {
        "pieces_blocks": keys.size,
        "snapshot_longest_ms": round(applied * 1e3, 1),
        "loss_longest_ms": round(lost * 1e3, 1),
        "both_s": round(taken, 2),
    }


def bound(prompts: int, limit: int) -> dict[str, Any]:
    """Unique prompts of 512 blocks from 8 replicas that never remove anything, a ledger listening."""
    before = resident()
    index = fresh(limit, ledger=True, placer=True)
    rng = np.random.default_rng(5)
    most = 0
    generated = stored = 0.0
    for at in range(prompts):
        begin = time.process_time()
        keys = rng.integers(1, 1 << 63, 512, dtype=np.int64).astype(np.uint64)
        parents = np.append(np.uint64(0), keys[:-1])
        generated += time.process_time() - begin
        stored += timed(lambda k=keys, p=parents, r=REPLICAS[at % 8]: index.store(r, Tier.HBM, k, p))
        if at % 256 == 0:
            most = max(most, resident() - before)
    return {
        "bound_prompts": prompts,
        "limit_bytes": limit,
        "most_resident": most,
        "index_bytes": index.nbytes,
        "blocks": len(index),
        "evicted": index.evicted_blocks,
        "store_per_s": round(prompts * 512 / stored),
    }


def uses(blocks: int, scattered: bool = False) -> dict[str, Any]:
    """Of prompts of so many blocks, stored at once; or block by block, as answers of 64 prompts side by side are."""
    now = 0.0
    index = PrefixIndex()
    index.add_replica(REPLICAS[0])
    evictions = Evictions(index, lambda: now)
    rng = np.random.default_rng(6)
    rows = rng.integers(1, 1 << 63, (64, blocks + 2), dtype=np.int64).astype(np.uint64)

    def store(keys: Keys, parents: Keys) -> None:
        index.store(REPLICAS[0], Tier.HBM, keys, parents)

    if scattered:
        before = np.zeros(64, np.uint64)
        for keys in rows[:, :blocks].T:
            store(keys.copy(), before)
            before = keys.copy()
    else:
        for keys in rows:
            store(keys[:blocks], np.append(np.uint64(0), keys[: blocks - 1]))
    index.add_listener(evictions)
    taken = []
    for turn in range(2):  # a block more of each, and then another
        now += 2.0
        keys, parents = rows[:, blocks + turn].copy(), rows[:, blocks + turn - 1].copy()
        begin = time.process_time()
        store(keys, parents)
        for _ in rows:
            evictions.catch_up()
        taken.append(round((time.process_time() - begin) / len(rows) * 1e6, 1))
    evictions.check()
    return {"uses_blocks": blocks, "scattered": scattered, "first_us": taken[0], "again_us": taken[1]}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    part = options.only
    if part in ("stream", "index", "ledger"):
        rows = chains(options.blocks)
        held = holders(len(rows))
        if part == "stream":
            yield {"events": part} | through_streams(rows, held)
        else:
            yield {"events": part} | index_alone(rows, held, ledger=part == "ledger")
    if part == "large":
        yield from large()
    if part == "pieces":
        yield pieces(options.blocks)
    if part == "uses":
        for blocks in (64, 512, 6_250):
            yield uses(blocks)
        yield uses(2_000, scattered=True)
    if part == "bound":
        yield bound(options.prompts, 256 << 20)


def arguments(about: str | None, parts: str) -> argparse.ArgumentParser:
    """Flags of every benchmark whose parts run one by one."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=parts)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    return parser


def each_part(options: argparse.Namespace, run: Callable[[argparse.Namespace], Iterator[dict[str, Any]]]) -> None:
    """Prints one JSON object a line, and adds them to a file of results. Each part has a process of its own, or memory
    that one gave back would be the next one's."""
    if not options.within:
        for part in options.only.split(","):
            command = [sys.executable, *sys.argv, "--only", part, "--within"]
            subprocess.run(command, check=True, env=os.environ | {"DYN_LOG": "error"})
        return
    where = stamp() | {"python": platform.python_version(), "numpy": np.__version__}
    for told in run(options):
        print(json.dumps(told), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(told | where) + "\n")


def main() -> None:
    """All parts, or those of `--only`."""
    parser = arguments(__doc__, "stream,index,ledger,large,pieces,bound,uses")
    parser.add_argument("--prompts", type=int, default=20_000)
    each_part(parser.parse_args(), run)


if __name__ == "__main__":
    main()
