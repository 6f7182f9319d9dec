"""The simulated replicas: what really happens to a request, whatever anybody believed."""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

from gateway.replay.caches import Caches, Stored, match
from gateway.replay.load import Load, Task
from gateway.replay.physics import TPOT_S
from gateway.replay.scenario import Scenario
from gateway.replay.workload import Workload


class Fetch(NamedTuple):
    """KV to read from a peer: the first `blocks` of the prompt, from replica `source`, which gives up its copy, but for
    the first `keep`."""

    source: int
    blocks: int
    keep: int = 0


NO_FETCH = Fetch(-1, 0)


class Choice(NamedTuple):
    """Where a request goes. `spilled`: not where it would have gone but for the load there.

    Without a `fetch` the replica reads the longest prefix that any peer holds, where that is quicker than computing it,
    and the peer keeps its copy; `NO_FETCH` forbids that.
    """

    replica: int
    spilled: bool = False
    fetch: Fetch | None = None


class Belief(NamedTuple):
    """What the gateway that placed a request expected its prefill to take."""

    gateway: int
    expected_s: float


class Job(NamedTuple):
    """A prefill on a replica's single server, whose turn came at `begin`. Estimates of it are off by `factor`."""

    placed: float
    begin: float
    end: float
    factor: float
    belief: Belief


class Outcome(NamedTuple):
    """What became of a request. `cached` tokens were there, `fetched` came from a peer, and the rest was computed in
    `prefill_s`, of which decode steps took `decode_share`. Task and `at` hold times."""

    at: float
    cached: int
    fetched: int
    prefill_s: float
    decode_share: float
    task: Task
    stored: Stored


class Fleet:
    """Replicas with a prefix cache, one prefill server in order of arrival, and decode slots without limit.

    Owns caches, loads, when each server is free, how long it worked, and the jobs that reports still speak of. `look`
    moves the time on to a request and sets `matched`, the blocks of it that each replica holds; `place` gives it to
    one. With `pooled` there is one cache of all replicas' capacity. `reported` is the load as reports tell it.
    """

    def __init__(self, workload: Workload, scenario: Scenario, *, pooled: bool = False) -> None:
        self.workload = workload
        self.scenario = scenario
        self.now = 0.0
        replicas = scenario.replicas
        self._pooled = pooled
        tokens = scenario.cache_tokens * (replicas if pooled else 1)
        self.caches = Caches(1 if pooled else replicas, max(1, tokens // workload.block), len(workload.parents))
        self.load = Load(replicas)
        self.reported = Load(replicas) if scenario.report_delay_s else self.load
        self.free = [0.0] * replicas
        self.busy_s = [0.0] * replicas
        self.jobs: list[deque[Job]] = [deque() for _ in range(replicas)]
        rng = random.Random(scenario.seed)
        self.bias = [rng.lognormvariate(0.0, scenario.estimate_error) for _ in range(replicas)]
        self.noise = [rng.lognormvariate(0.0, scenario.estimate_error) for _ in workload.times]
        self.matched: list[int] = []

    def look(self, now: float, request: int) -> None:
        """`request` arrives now."""
        self.now = now
        self.load.advance(now)
        told = now - self.scenario.report_delay_s
        if self.reported is not self.load:
            self.reported.advance(told)
        for jobs in self.jobs:
            while jobs and jobs[0].end <= told:
                jobs.popleft()
        chain, replicas = self.workload.chains[request], self.scenario.replicas
        held = self.caches.held
        self.matched = match(held, chain, 1) * replicas if self._pooled else match(held, chain, replicas)

    def place(self, request: int, choice: Choice, belief: Belief) -> Outcome:
        """Gives the request of the last `look` to a replica."""
        workload, physics, now = self.workload, self.scenario.physics, self.now
        replica, tokens, chain = choice.replica, workload.tokens[request], workload.chains[request]
        cached = min(self.matched[replica] * workload.block, tokens - 1)
        fetched, ready = self._fetch(chain, tokens, cached, choice)
        past = cached + fetched
        share = physics.decode_share(self.load.decoding[replica], self.load.decoding_context[replica])
        prefill_s = physics.prefill_s(tokens - past, past) / (1 - share)
        turn = max(now, self.free[replica])
        first_token = max(ready, turn) + prefill_s
        task = Task(replica, first_token, tokens - past, tokens, first_token + workload.outputs[request] * TPOT_S)
        self.free[replica] = first_token
        self.busy_s[replica] += prefill_s
        self.load.add(task)
        if self.reported is not self.load:
            self.reported.add(task)
        factor = self.bias[replica] * self.noise[request]
        self.jobs[replica].append(Job(now, turn, first_token, factor, belief))
        stored = self.caches.store(0 if self._pooled else replica, chain, now)
        return Outcome(now, cached, fetched, prefill_s, share, task, stored)

    def _fetch(self, chain: tuple[int, ...], tokens: int, cached: int, choice: Choice) -> tuple[int, float]:
        """Tokens that come from a peer, and when they are there."""
        link, physics, block = self.scenario.link, self.scenario.physics, self.workload.block
        if link is None or choice.fetch is NO_FETCH:
            return 0, self.now
        reach = max(self.matched)
        if choice.fetch is not None:
            reach = min(self.matched[choice.fetch.source], choice.fetch.blocks)
        extra = min(reach * block, tokens - 1) - cached
        fetch_s = physics.fetch_s(extra, link)
        if extra <= 0 or fetch_s >= physics.prefill_s(extra, cached):
            return 0, self.now
        if choice.fetch is not None and not self.scenario.keeps_copies:
            self.caches.give_up(choice.fetch.source, chain[choice.fetch.keep : reach])
        return extra, self.now + fetch_s
