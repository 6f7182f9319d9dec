"""What chose the index's structure: others on the same blocks. Results stand beside those of `benchmarks/index.py`.

    pip install --no-deps --target DIR ai-dynamo-runtime==1.6.1 hirola cslug
    python benchmarks/structures.py [--blocks 1000000] [--peers DIR] [--out benchmarks/results/index.jsonl]

CPU time of one process; compare within one run.

dynamo    the events of `index.py`, as JSON, into Dynamo's RadixTree, where DIR has `ai-dynamo-runtime`
tables    the key table alone against a dict, linear probing in one array, and, where DIR has it, `hirola`
walk      `match` by length of the prompt, against the dicts of int masks of `tests/naive_index.py`
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from index import (
    EVENT,
    LENGTH,
    REPLICAS,
    arguments,
    chains,
    each_part,
    events,
    figures,
    fresh,
    holders,
    resident,
    timed,
)

from gateway.placement.column import Keys
from gateway.placement.key_table import KeyTable
from kvstore.messages import Tier

# events


def dynamo(all_chains: Keys, held: list[list[int]]) -> dict[str, Any]:
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    def event(number: int, data: dict[str, Any]) -> bytes:
        return msgspec.json.encode({"event_id": number, "data": data})

    stores, removals = [], []
    for at, (keys, ours) in enumerate(zip(all_chains, held, strict=True)):
        for replica in ours:
            for some, parents in events(keys):
                ids = some.tolist()
                blocks = [{"block_hash": key, "tokens_hash": key ^ 1} for key in ids]
                parent = int(parents[0]) or None
                stored = {"stored": {"parent_hash": parent, "blocks": blocks}}
                stores.append((replica, event(len(stores), stored)))
        for replica in ours if at < max(1, len(all_chains) // 5) else ():
            for some, _ in reversed(list(events(keys))):
                removals.append((replica, event(len(removals), {"removed": {"block_hashes": some[::-1].tolist()}})))
    before = resident()
    tree = RadixTree()

    def apply(told: list[tuple[int, bytes]]) -> None:
        for replica, data in told:
            tree.apply_event(replica, data)

    stored_s = timed(lambda: apply(stores))
    tree.find_matches([1])
    size = (resident() - before) / all_chains.size
    prompts = iter([[key ^ 1 for key in keys.tolist()] for keys in all_chains[:5]] * 20)
    match = timed(lambda: tree.find_matches(next(prompts)), 100)
    removed_s = timed(lambda: apply(removals))
    return figures(stored_s, 2 * all_chains.size, removed_s, len(removals) * EVENT, match, size)


# tables


def tables(blocks: int, peers: bool) -> Iterator[dict[str, Any]]:
    """Nanoseconds a key, in batches of 125 and of 4,096: add, find again, take out."""
    flat = chains(blocks).reshape(-1)
    for batch in (EVENT, 4_096):
        parts = [flat[begin : begin + batch] for begin in range(0, flat.size, batch)]
        yield from _tables(batch, parts, flat.size, peers)


def _tables(batch: int, parts: list[Keys], keys: int, peers: bool) -> Iterator[dict[str, Any]]:
    def race(what: str, inputs: list[Any], *steps: Callable[[Any], object]) -> dict[str, Any]:
        names = ("add_ns", "find_ns", "drop_ns")
        took = [timed(lambda do=step: [do(part) for part in inputs]) for step in steps]
        figures = {name: round(each / keys * 1e9) for name, each in zip(names, took, strict=False)}
        return {"table": what, "batch": batch} | figures

    table = KeyTable(keys + 1)
    yield race("key table", parts, table.add, table.find, lambda part: table.drop(*table.locate(part)))
    rows: dict[int, int] = {}
    yield race(
        "dict",
        [part.tolist() for part in parts],
        lambda part: [rows.setdefault(key, len(rows)) for key in part],
        lambda part: [rows.get(key) for key in part],
        lambda part: [rows.pop(key, None) for key in part],
    )
    probing = LinearProbing(keys)
    yield race("linear probing, sized beforehand", parts, probing.add, probing.find)
    if peers:
        from hirola import HashTable  # type: ignore[import-not-found]

        hirola = HashTable(int(keys * 1.8), np.uint64)
        yield race("hirola, sized beforehand", parts, hirola.add, hirola.get)


class LinearProbing:
    """Keys in one array of twice their number, sized beforehand, all keys of a batch a step further at a time."""

    def __init__(self, keys: int) -> None:
        self.keys = np.zeros(1 << (2 * keys - 1).bit_length(), np.uint64)
        self.last = self.keys.size - 1

    def find(self, keys: Keys) -> np.ndarray:
        """The slot of every key, or the empty one where it would be."""
        at = (keys & np.uint64(self.last)).view(np.int64)
        found, todo = at.copy(), np.arange(keys.size)
        while todo.size:
            there = self.keys.take(at)
            done = (there == keys) | (there == 0)
            found[todo[done]] = at[done]
            todo, keys, at = todo[~done], keys[~done], at[~done] + 1 & self.last
        return found

    def add(self, keys: Keys) -> None:
        """Of keys that want one slot the last gets it; the others look again."""
        while keys.size:
            at = self.find(keys)
            empty = self.keys.take(at) == 0
            self.keys[at[empty]] = keys[empty]
            keys = keys[self.keys.take(at) != keys]


# walks


def walk() -> Iterator[dict[str, Any]]:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    from naive_index import NaiveIndex  # type: ignore[import-not-found]

    rng = np.random.default_rng(3)
    units = dict.fromkeys(REPLICAS, 1)
    for blocks in (1, 8, 24, 64, 512, LENGTH):
        keys = array("Q", rng.integers(1, 1 << 63, blocks, dtype=np.int64).tolist())
        held = keys[: -(-blocks * 3 // 4)]
        told: dict[str, Any] = {"walk_blocks": blocks}
        for name, index in (("index_us", fresh(16 << 20)), ("dict_us", NaiveIndex())):
            for at, replica in enumerate(REPLICAS):
                index.add_replica(replica)
                some = held if at == 4 else held[: -(-blocks // 4)]
                index.store(replica, Tier.HBM, some, [0, *some[:-1]])
            told[name] = round(min(timed(lambda i=index, k=keys: i.match(k, units), 200) for _ in range(5)) * 1e6, 1)
        yield told
    # Two chains stored in turns of one block each: no two blocks of a chain have consecutive rows.
    index = fresh(16 << 20)
    pair = chains(2 * LENGTH)
    mixed = pair.T.reshape(-1)
    index.store(REPLICAS[0], Tier.HBM, mixed, np.zeros(mixed.size, np.uint64))
    scattered = min(timed(lambda: index.match(pair[0], units), 50) for _ in range(5))
    yield {"walk_blocks": LENGTH, "scattered_us": round(scattered * 1e6, 1)}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    part, peers = options.only, options.peers is not None
    if peers:
        sys.path.append(str(options.peers))
    if part == "dynamo" and peers:
        rows = chains(options.blocks)
        yield {"events": part} | dynamo(rows, holders(len(rows)))
    if part == "tables":
        yield from tables(options.blocks, peers)
    if part == "walk":
        yield from walk()


def main() -> None:
    """All parts, or those of `--only`."""
    parser = arguments(__doc__, "dynamo,tables,walk")
    parser.add_argument("--peers", type=Path, help="where ai-dynamo-runtime and hirola were installed with --no-deps")
    each_part(parser.parse_args(), run)


if __name__ == "__main__":
    main()
