"""Published ways of placing requests, with what their authors set them to."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from gateway.replay.fleet import Choice, Fleet
from gateway.replay.hashing import Ring, stable_hash
from gateway.replay.knowledge import Knowledge
from gateway.replay.policy import Policy

LOAD_FACTOR = 1.25
"""How far above the mean consistent hashing with bounded loads lets a replica go (KubeAI, SGLang)."""

IMBALANCE = 8
"""From so many requests between the most and the least loaded replica on, longest-match looks at loads alone."""


class RoundRobin(Policy):
    """One replica after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self._replicas = fleet.scenario.replicas
        self._next = -1

    def choose(self, known: Knowledge) -> Choice:
        self._next = (self._next + 1) % self._replicas
        return Choice(self._next)


class Random(Policy):
    """Any replica."""

    def __init__(self, fleet: Fleet) -> None:
        self._rng = random.Random(fleet.scenario.seed)

    def choose(self, known: Knowledge) -> Choice:
        return Choice(self._rng.randrange(known.replicas))


class LeastLoaded(Policy):
    """The fewest outstanding requests; equals take turns."""

    def __init__(self, fleet: Fleet) -> None:
        self._turn = 0

    def choose(self, known: Knowledge) -> Choice:
        return Choice(self._least(range(known.replicas), known.load.outstanding))

    def _least(self, replicas: Sequence[int], load: Sequence[int]) -> int:
        least = min(load[replica] for replica in replicas)
        equal = [replica for replica in replicas if load[replica] == least]
        self._turn += 1
        return equal[(self._turn - 1) % len(equal)]


class LongestMatch(LeastLoaded):
    """The longest cached prefix, the less loaded of equals; the least loaded replica while loads are far apart."""

    def choose(self, known: Knowledge) -> Choice:
        load = known.load.outstanding
        if max(load) - min(load) > IMBALANCE:
            return Choice(load.index(min(load)), spilled=True)
        longest = max(known.matched)
        holders = [replica for replica in range(known.replicas) if known.matched[replica] == longest]
        return Choice(self._least(holders, load))


class SessionHash(Policy):
    """Consistent hash of the session."""

    def __init__(self, fleet: Fleet) -> None:
        self._ring = Ring(fleet.scenario.replicas, fleet.scenario.seed)

    def choose(self, known: Knowledge) -> Choice:
        return Choice(next(self._ring.walk(stable_hash(known.session))))


class FirstBlockHash(Policy):
    """Consistent hash of the first block."""

    depth = 1

    def __init__(self, fleet: Fleet) -> None:
        self._ring = Ring(fleet.scenario.replicas, fleet.scenario.seed)

    def choose(self, known: Knowledge) -> Choice:
        return Choice(next(self._ring.walk(self._key(known))))

    def _key(self, known: Knowledge) -> int:
        return stable_hash(known.chain[: self.depth][-1] if known.chain else known.request)


class BoundedHash(FirstBlockHash):
    """Consistent hash of the first blocks with bounded loads: on along the ring while a replica has its share.

    KubeAI's CHWBL, keyed by as many blocks as `depth` says.
    """

    def __init__(self, fleet: Fleet, depth: int = 1) -> None:
        super().__init__(fleet)
        self.depth = depth

    def choose(self, known: Knowledge) -> Choice:
        load = known.load.outstanding
        limit = math.ceil(LOAD_FACTOR * (sum(load) + 1) / known.replicas)
        walk = self._ring.walk(self._key(known))
        replica = home = next(walk)
        while load[replica] + 1 > limit:
            replica = next(walk)
        return Choice(replica, spilled=replica != home)


class PrefillDecodeBlocks(Policy):
    """Fewest tokens to prefill, those queued and those missing, plus tokens of context: NVIDIA Dynamo's rule."""

    def choose(self, known: Knowledge) -> Choice:
        load = known.load

        def cost(replica: int) -> tuple[int, int, int]:
            missing = max(0, known.tokens - known.matched[replica] * known.block)
            return load.queued_tokens[replica] + missing + load.context[replica], load.outstanding[replica], replica

        return Choice(min(range(known.replicas), key=cost))


class LMetric(Policy):
    """Least product of tokens to prefill, queued and missing ones, and requests, the new one among them.

    LMetric (arXiv 2603.15202) as it was implemented by others; with the request's own missing tokens alone it does
    worse on chats, where queues matter, and better on agents.
    """

    def choose(self, known: Knowledge) -> Choice:
        load = known.load.outstanding

        def cost(replica: int) -> tuple[int, int, int]:
            prefill = known.load.queued_tokens[replica] + known.tokens - known.cached_tokens(replica)
            return prefill * (load[replica] + 1), load[replica], replica

        return Choice(min(range(known.replicas), key=cost))


class Ttft(Policy):
    """Least wait + K x prefill of what is missing, or of what is left after fetching: Mooncake's rule for K = 1."""

    def __init__(self, fleet: Fleet, weight: int = 1) -> None:
        self._weight = weight

    def choose(self, known: Knowledge) -> Choice:
        longest = min(max(known.matched) * known.block, known.tokens - 1)

        def cost(replica: int) -> tuple[float, int, int]:
            cached = known.cached_tokens(replica)
            wait_s = known.wait_s(replica)
            cost_s = wait_s + self._weight * known.prefill_s(replica, cached)
            if known.link is not None and longest > cached:
                fetch_s = known.physics.fetch_s(longest - cached, known.link)
                if fetch_s < known.physics.prefill_s(longest - cached, cached):
                    fetching_s = max(wait_s, fetch_s) + self._weight * known.prefill_s(replica, longest)
                    cost_s = min(cost_s, fetching_s)
            return cost_s, known.load.outstanding[replica], replica

        return Choice(min(range(known.replicas), key=cost))


class OneBigCache(Policy):
    """One cache of all replicas' capacity behind all of them, and the earliest free server: what sharing could give.

    Not a bound: it does not look at decode load, and waits for no one cache.
    """

    pooled = True

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def choose(self, known: Knowledge) -> Choice:
        free, load = self._fleet.free, self._fleet.load.outstanding
        return Choice(
            min(range(known.replicas), key=lambda replica: (max(free[replica] - known.now, 0.0), load[replica]))
        )
