"""A small deterministic fleet for placement tests: engines with a prefix cache, one prefill server and decode slots.

Each engine keeps blocks in an LRU (tails go first), prefills one request after the other at a fixed speed, and holds a
request as running until its last output token. Its blocks are reported to the index the moment its prefill ends. With
pools each engine's agent keeps all that was ever computed or fetched there, and reads from its peers over one link.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path

import xxhash

from gateway.fleet.slow_start import SlowStart
from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims, Placement, Reason, ReplicaView
from gateway.placement.placer import Placer
from gateway.placement.settings import PlacementSettings
from kvstore.cost import LinkEstimate
from kvstore.identity import UNIT_TOKENS
from kvstore.messages import ROOT_PARENT, FetchState, Tier

POOLS = FetchState(namespace="n", acts=True, slots=1 << 20, link=LinkEstimate(0.002, 25e9), links={})
TOKEN_BYTES = 131_072
"""Llama-3-8B."""

SHARED = Path(__file__).parents[2].parent / "shared"
CONVERSATION = SHARED / "traces" / "mooncake_conversation_h1.jsonl.gz"


def prompt(seed: int, tokens: int, *, shared: array[int] | None = None) -> PromptIdentity:
    """An exact prompt of `tokens` whose unit keys are unique to `seed`, after those of `shared`."""
    keys = array("Q", shared or ())
    for i in range(len(keys), tokens // UNIT_TOKENS):
        keys.append(xxhash.xxh3_64_intdigest(f"{seed}/{i}".encode()))
    return PromptIdentity(mode=IdentityMode.EXACT, keys=keys, tokens=tokens)


@dataclass
class Request:
    """One arrival: seconds, prompt, output tokens."""

    at: float
    identity: PromptIdentity
    output: int


@cache
def _block_keys(block: int) -> array[int]:
    return array("Q", [xxhash.xxh3_64_intdigest(f"{block}:{i}".encode()) for i in range(512 // UNIT_TOKENS)])


def conversation(replicas: int, speed: float, utilization: float, mode: IdentityMode, limit: int) -> list[Request]:
    """The Mooncake conversation trace with its 3 s clock ticks spread out, scaled to a prefill utilization."""
    rng = random.Random(0)
    with gzip.open(CONVERSATION, "rt") as lines:
        rows = [json.loads(line) for line in islice(lines, limit)]
    tokens = sum(row["input_length"] for row in rows)
    span = max(row["timestamp"] for row in rows) / 1000 + 3
    scale = tokens / speed / replicas / utilization / span
    requests = []
    for row in rows:
        keys = array("Q")
        for block in row["hash_ids"]:
            keys += _block_keys(block)
        keys = keys[: row["input_length"] // UNIT_TOKENS]
        identity = PromptIdentity(mode=mode, keys=keys, tokens=row["input_length"])
        at = (row["timestamp"] / 1000 + 3 * rng.random()) * scale
        requests.append(Request(at, identity, row["output_length"]))
    return sorted(requests, key=lambda request: request.at)


@dataclass
class Engine:
    """One replica. `cache` is its LRU of block keys, `coming` those of queued prompts; `work` is in tokens.

    It prefills `speed` tokens a second, which is known, but `slow` times fewer until `warm_at`, which is not.
    """

    id: str
    capacity_blocks: int
    block_units: int
    speed: float
    weight: float = 1.0
    warm_at: float = 0.0
    slow: float = 1.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    pool: set[int] = field(default_factory=set)
    coming: Counter[int] = field(default_factory=Counter)
    free_at: float = 0.0
    queued: int = 0
    running: int = 0
    work: int = 0
    hits: int = 0
    fetched: int = 0


def _blocks(engine: Engine, identity: PromptIdentity) -> array[int]:
    return identity.keys[engine.block_units - 1 :: engine.block_units][: engine.capacity_blocks]


class Fleet:
    """Engines, an index that they report to, and the placer under test."""

    def __init__(
        self,
        replicas: int,
        *,
        speed: float = 40_000.0,
        capacity_blocks: int = 1 << 20,
        block_units: int = 1,
        decode_s: float = 0.02,
        claims: Claims = Claims.REPORTS,
        pools: FetchState | None = None,
        settings: PlacementSettings | None = None,
        slow_start_s: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.slow_start = SlowStart(slow_start_s, clock=lambda: self.now)
        self.speed = speed
        self.decode_s = decode_s
        self.claims = claims
        self.pools = pools
        self.capacity_blocks = capacity_blocks
        self.block_units = block_units
        self.engines: dict[str, Engine] = {}
        self.index = PrefixIndex()
        for _ in range(replicas):
            self.add()
        self.placer = Placer(self.index, settings, clock=lambda: self.now)
        self.reasons: Counter[Reason] = Counter()
        self.waits: list[float] = []
        self._events: list[tuple[float, int, str, Engine, PromptIdentity, int]] = []
        self._sequence = 0

    def add(self, *, weight: float = 1.0, **more: float) -> Engine:
        """One more replica, whose cache is empty, `weight` times as fast as the fleet is; `more` as in `Engine`."""
        replica = f"replica-{len(self.engines)}"
        engine = Engine(replica, self.capacity_blocks, self.block_units, weight * self.speed, weight, **more)
        self.engines[replica] = engine
        self.index.add_replica(replica)
        self.slow_start.came_up(replica, 0, self.capacity_blocks)
        return engine

    def views(self) -> list[ReplicaView]:
        """What a gateway with fresh reports knows now."""
        return [
            ReplicaView(
                id=engine.id,
                claims=self.claims,
                queued_prefill_tokens=engine.queued,
                running=engine.running,
                weight=engine.weight,
                warmth=self.slow_start.warmth(engine.id),
                prefill_tokens_per_s=engine.speed,
                block_units=engine.block_units,
                capacity_blocks=engine.capacity_blocks,
                held_blocks=len(engine.cache),
                block_bytes=TOKEN_BYTES * UNIT_TOKENS * engine.block_units,
                fetch=self.pools,
            )
            for engine in self.engines.values()
        ]

    def submit(self, request: Request, placer: Placer | None = None) -> Placement:
        """Advances to the request's arrival, places it and starts it."""
        self.advance(request.at)
        placer = placer or self.placer
        placement = placer.place(request.identity, self.views())
        self.reasons[placement.reason] += 1
        self.start(placement, request, placer)
        return placement

    def start(self, placement: Placement, request: Request, placer: Placer) -> None:
        """Sends a placed request to its engine."""
        engine = self.engines[placement.replica]
        begin = max(self.now, engine.free_at)
        queued = request.identity.tokens - placement.predicted_cached_tokens
        cached = self._cached(engine, request.identity)
        if placement.fetch is not None and placement.fetch.counted:
            assert self.engines[placement.fetch.source].pool.issuperset(
                _blocks(engine, request.identity)[: placement.fetch.blocks]
            )
            come = placement.fetch.blocks * engine.block_units * UNIT_TOKENS
            if come > cached:
                begin = max(begin, self.now + placement.fetch.seconds)
                engine.fetched += come - cached
                cached = come
        missing = request.identity.tokens - cached
        engine.work += missing
        engine.hits += request.identity.tokens - missing
        engine.free_at = begin + missing / engine.speed * (engine.slow if begin < engine.warm_at else 1.0)
        self.waits.append(engine.free_at - self.now)
        claim = placer.placed(placement, request.identity)
        engine.coming.update(_blocks(engine, request.identity))
        engine.queued += queued
        engine.running += 1
        self._push(engine.free_at, "prefilled", engine, request.identity, queued)
        self._push(engine.free_at + request.output * self.decode_s, "done", engine, request.identity, 0)
        if self.claims is not Claims.REPORTS:
            placer.release(claim)

    def advance(self, until: float) -> None:
        """Runs everything that happens up to `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what, engine, identity, queued = heapq.heappop(self._events)
            if what == "prefilled":
                engine.queued -= queued
                self._store(engine, identity)
            else:
                engine.running -= 1
        self.now = max(self.now, until)

    def work_max_over_mean(self) -> float:
        """Prefilled tokens of the busiest engine over the mean."""
        work = [engine.work for engine in self.engines.values()]
        return max(work) / (sum(work) / len(work))

    def hit_rate(self) -> float:
        """Prompt tokens served from the prefix cache, as a share of all."""
        hits = sum(engine.hits for engine in self.engines.values())
        return hits / (hits + sum(engine.work for engine in self.engines.values()))

    def _push(self, at: float, what: str, engine: Engine, identity: PromptIdentity, queued: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at, self._sequence, what, engine, identity, queued))

    def _cached(self, engine: Engine, identity: PromptIdentity) -> int:
        # A prompt that waits for another's prefill of the same prefix will find it cached.
        blocks = 0
        block = engine.block_units * UNIT_TOKENS
        for key in _blocks(engine, identity):
            if key not in engine.cache and key not in engine.pool and not engine.coming[key]:
                break
            blocks += 1
        return min(blocks * block, (identity.tokens - 1) // block * block)

    def _store(self, engine: Engine, identity: PromptIdentity) -> None:
        keys = _blocks(engine, identity)
        for key in keys:
            engine.coming[key] -= 1
            if not engine.coming[key]:
                del engine.coming[key]
        fresh = [i for i, key in enumerate(keys) if key not in engine.cache]
        for key in reversed(keys):
            engine.cache[key] = None
            engine.cache.move_to_end(key)
        gone = [engine.cache.popitem(last=False)[0] for _ in range(len(engine.cache) - engine.capacity_blocks)]
        self.index.remove(engine.id, Tier.HBM, gone)
        parents = [keys[i - 1] if i else ROOT_PARENT for i in fresh]
        self.index.store(engine.id, Tier.HBM, [keys[i] for i in fresh], parents)
        if self.pools is not None:
            self.index.store(engine.id, Tier.DRAM, keys, [ROOT_PARENT, *keys[:-1]])
            engine.pool.update(keys)
