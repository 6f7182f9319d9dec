"""This gateway's own placement, the very object that serves, in virtual time."""

from __future__ import annotations

import math
from array import array
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import xxhash

from gateway.fleet.decoding import Decoding
from gateway.fleet.speed import FleetSpeed
from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.placement.claims import Claim
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims, Placement, Reason, ReplicaView
from gateway.placement.placer import Placer
from gateway.replay.caches import Stored
from gateway.replay.fleet import NO_FETCH, Choice, Fetch, Fleet, Outcome
from gateway.replay.knowledge import Knowledge
from gateway.replay.policy import Policy
from kvstore.messages import ROOT_PARENT, FetchState, Tier


class Prefill(NamedTuple):
    """What the gateway saw of one: `effort` in tokens at a prompt's beginning, and the seconds that it took, of which
    decoding what was `beside` it took `decode_share`."""

    replica: str
    effort: float
    took_s: float
    beside: Decoding
    decode_share: float


class Ours(Policy):
    """A `Placer` over an index that the simulated replicas report to.

    Does what the gateway does around it: names prompts, tells it how full each replica is, commits what it decided,
    ends claims when answers end, and learns how far off its estimates of each replica are. One RouteKey unit is one
    block of the trace. Owns the placer, the index, the fitted speeds and what has not happened yet, in order of time.
    """

    follows_reports = True

    def __init__(self, fleet: Fleet) -> None:
        scenario, workload = fleet.scenario, fleet.workload
        self._now = 0.0
        self._block = workload.block
        self._capacity = fleet.caches.capacity_blocks
        self._block_bytes = workload.block * scenario.physics.token_bytes
        self._parents = workload.parents
        self._keys = array("Q", [_key(number) for number in range(len(workload.parents))])
        self._ids = [f"replica-{number}" for number in range(scenario.replicas)]
        self._index = PrefixIndex()
        for replica in self._ids:
            self._index.add_replica(replica)
        self._placer = Placer(self._index, scenario.placement, lambda: self._now)
        self._pool: FetchState | None = None
        if scenario.link is not None:
            self._pool = FetchState(
                namespace=scenario.physics.name, acts=True, slots=self._capacity, link=scenario.link, links={}
            )
        self._tiers = (Tier.HBM,) if self._pool is None else (Tier.HBM, Tier.DRAM)
        self._nominal = 1 / scenario.physics.prefill_s(1, 0)
        self._attention = scenario.physics.attention
        self.speed = FleetSpeed(self._nominal, lambda: self._now)
        self._keeps_copies = scenario.keeps_copies
        self._level = [] if scenario.alike else [1.0] * scenario.replicas
        self._coming: list[tuple[float, int, Claim | Prefill]] = []
        self._count = count()
        self._placed: tuple[Placement, PromptIdentity] | None = None

    def choose(self, known: Knowledge) -> Choice:
        """Where the placer puts the request, and what it has fetched."""
        self._catch_up(known.now)
        keys = self._keys
        identity = PromptIdentity(
            mode=IdentityMode.EXACT,
            keys=array("Q", [keys[number] for number in known.chain]),
            tokens=known.tokens,
            unit_tokens=self._block,
        )
        placement = self._placer.place(identity, [self._view(known, replica) for replica in range(known.replicas)])
        self._placed = placement, identity
        fetch = NO_FETCH
        if placement.fetch is not None and placement.fetch.counted:
            source = self._ids.index(placement.fetch.source)
            fetch = Fetch(source, placement.fetch.blocks, placement.hot_units)
        return Choice(self._ids.index(placement.replica), placement.reason is Reason.SPILL, fetch)

    def placed(self, known: Knowledge, choice: Choice, outcome: Outcome) -> None:
        """The request is sent: it is believed to be where it goes until it is reported, or its answer has ended."""
        assert self._placed is not None
        placement, identity = self._placed
        claim = self._placer.placed(placement, identity)
        self._later(outcome.task.end, claim)
        if not outcome.fetched:
            expected_s = known.prefill_s(choice.replica, outcome.cached) * self._alike(known)[choice.replica]
            seen = Prefill(
                self._ids[choice.replica],
                expected_s * self._nominal,
                outcome.prefill_s,
                known.decoding(choice.replica),
                outcome.decode_share,
            )
            self._later(outcome.task.prefill_end, seen)

    def reported(self, at: float, replica: int, stored: Stored) -> None:
        """A replica's report has arrived."""
        self._catch_up(at)
        name, keys, parents = self._ids[replica], self._keys, self._parents
        gone = array("Q", [keys[number] for number in stored.evicted])
        added = stored.added[::-1]  # engines report a chain from its beginning
        new = array("Q", [keys[number] for number in added])
        before = array("Q", [keys[parents[number]] if parents[number] >= 0 else ROOT_PARENT for number in added])
        for tier in self._tiers:
            self._index.remove(name, tier, gone)
            self._index.store(name, tier, new, before)

    def decode_share(self, known: Knowledge, replica: int) -> float:
        """The share of a replica's time that decoding takes from prefills: as reported, which every policy is told.

        `serve` learns it (`gateway.fleet.decoding`), for engines that compute a piece of a prompt in each decode step.
        A simulated replica decodes at a fixed pace instead, which slows prefills by another curve. What learning it
        costs here: `benchmarks/decode_share.py`.
        """
        return known.decode_share(replica)

    def prefilled(self, seen: Prefill) -> None:
        """The first token of a request has come back."""
        # The speed of a replica in estimated work: what it takes for a second of it tells how far off it is.
        self.speed.observe(seen.replica, seen.effort, seen.took_s * (1 - seen.decode_share))

    def check(self) -> None:
        """Asserts the conservation laws of what it owns."""
        self._placer.check()
        self._index.check()

    def _view(self, known: Knowledge, replica: int) -> ReplicaView:
        """What the gateway tells its placer of a replica: queue and speed in seconds as it estimates them."""
        name = self._ids[replica]
        fitted = self._alike(known)[replica] * self._nominal / self.speed.of(name)
        tokens_per_s = 1 / (known.token_s(replica) * fitted)
        decode_share = self.decode_share(known, replica)
        return ReplicaView(
            id=name,
            claims=Claims.REPORTS,
            queued_prefill_tokens=round(known.wait_s(replica) * fitted * tokens_per_s * (1 - decode_share)),
            running=known.load.outstanding[replica],
            prefill_tokens_per_s=tokens_per_s,
            attention=self._attention,
            decode_share=decode_share,
            unit_tokens=self._block,
            capacity_blocks=self._capacity,
            held_blocks=self._index.held_blocks(name, Tier.HBM),
            block_bytes=self._block_bytes,
            fetch=self._pool,
            yields=not self._keeps_copies,
        )

    def _alike(self, known: Knowledge) -> list[float]:
        """What makes the first estimates of all replicas equal: `serve` takes them for the same hardware, too, until
        their prefills prove otherwise (`FleetSpeed`)."""
        if not self._level:
            logs = [math.log(known.token_s(replica)) for replica in range(known.replicas)]
            mean = sum(logs) / len(logs)
            self._level = [math.exp(mean - log) for log in logs]
        return self._level

    def _later(self, at: float, what: Claim | Prefill) -> None:
        heappush(self._coming, (at, next(self._count), what))

    def _catch_up(self, now: float) -> None:
        """Lets everything happen whose time has come."""
        coming = self._coming
        while coming and coming[0][0] <= now:
            self._now, _, what = heappop(coming)
            if isinstance(what, Claim):
                self._placer.answered(what)
            else:
                self.prefilled(what)
        self._now = now


def _key(number: int) -> int:
    return xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"))
