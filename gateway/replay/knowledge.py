"""What a gateway knows when it places a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from gateway.fleet.decoding import Decoding
from gateway.replay.caches import Stored, match
from gateway.replay.fleet import Belief, Choice, Fleet, Outcome
from gateway.replay.load import Load
from gateway.replay.scenario import ANNOUNCE_S


class Report(NamedTuple):
    """What a replica's cache took in and let go at some time, for a prompt of gateway `gateway`."""

    at: float
    replica: int
    gateway: int
    stored: Stored


class Knowledge:
    """One gateway's view of the fleet: true, or as old as reports are.

    Loads, prefixes and queues are those of its own placements until now, those of the other gateways' as the agents
    announce them (`ANNOUNCE_S`), and of the rest what was reported `report_delay_s` ago. With one gateway and no delay
    that is the truth. Estimates of a prefill are off by the same factor however often they are asked for.

    Owns the load that it knows of and, where reports are late, a table of which replica holds which block. `look` sets
    the request that all questions are about; `learn` tells it of a placement, by whichever gateway.
    """

    def __init__(
        self, fleet: Fleet, gateway: int, on_report: Callable[[float, int, Stored], None] | None = None
    ) -> None:
        scenario, workload = fleet.scenario, fleet.workload
        self.fleet = fleet
        self.gateway = gateway
        self.replicas = scenario.replicas
        self.block = workload.block
        self.physics = scenario.physics
        self.link = scenario.link
        self.now = 0.0
        self.request = -1
        self.chain: tuple[int, ...] = ()
        self.tokens = 0
        self.session: Hashable = None
        self.matched: list[int] = []
        self.load = fleet.load if scenario.gateways == 1 else Load(scenario.replicas)
        self._delay_s = scenario.report_delay_s
        self._table = [0] * len(workload.parents) if self._delay_s else fleet.caches.held
        self._reports: deque[Report] = deque()
        self._on_report = on_report

    def look(self, request: int) -> None:
        """Something arrives at this gateway, when the fleet has just looked at it."""
        fleet, workload = self.fleet, self.fleet.workload
        self.now = fleet.now
        self.request = request
        self.chain = workload.chains[request]
        self.tokens = workload.tokens[request]
        self.session = workload.sessions[request]
        if self.load is not fleet.load:
            self.load.advance(self.now)
        self._read_reports(self.now - self._delay_s)
        self.matched = match(self._table, self.chain, self.replicas) if self._delay_s else fleet.matched

    def cached_tokens(self, replica: int) -> int:
        """Tokens of the prompt that a replica need not compute; the last one always is."""
        return min(self.matched[replica] * self.block, self.tokens - 1)

    def wait_s(self, replica: int) -> float:
        """Seconds until the request's turn: reported work, rolled forward with what has been placed since."""
        jobs = self.fleet.jobs[replica]
        if not jobs:
            return 0.0
        told = self.now - self._delay_s
        until = told
        for placed, begin, end, factor, belief in jobs:
            if placed <= told:
                until += (end - max(begin, told)) * factor
                continue
            known = placed if belief.gateway == self.gateway else placed + ANNOUNCE_S
            if known <= self.now:
                until = max(until, known) + belief.expected_s
        return max(0.0, until - self.now)

    def prefill_s(self, replica: int, past: int) -> float:
        """Estimated seconds of computing the prompt after `past` tokens, while nothing decodes."""
        return self.physics.prefill_s(self.tokens - past, past) * self._factor(replica)

    def token_s(self, replica: int) -> float:
        """The same of one token at a prompt's beginning: the pace at which a replica is taken to work."""
        return self.physics.prefill_s(1, 0) * self._factor(replica)

    def _factor(self, replica: int) -> float:
        """How far estimates for this request on a replica are off. Nobody can know it; `prefill_s` has it in it."""
        return self.fleet.bias[replica] * self.fleet.noise[self.request]

    def decoding(self, replica: int) -> Decoding:
        """What a replica decodes, as reported."""
        reported = self.fleet.reported
        return Decoding(reported.decoding[replica], reported.decoding_context[replica])

    def decode_share(self, replica: int) -> float:
        """The share of a replica's time that decode steps take, as reported."""
        reported = self.fleet.reported
        return self.physics.decode_share(reported.decoding[replica], reported.decoding_context[replica])

    def belief(self, choice: Choice) -> Belief:
        """What this gateway expects of its own choice."""
        replica = choice.replica
        past = self.cached_tokens(replica)
        if self.link is not None:
            blocks = choice.fetch.blocks if choice.fetch is not None else max(self.matched)
            past = max(past, min(blocks * self.block, self.tokens - 1))
        return Belief(self.gateway, self.prefill_s(replica, past) / (1 - self.decode_share(replica)))

    def learn(self, outcome: Outcome, gateway: int) -> None:
        """`gateway` has placed the request that the fleet looked at last."""
        replica, at = outcome.task.replica, outcome.at
        own = gateway == self.gateway
        if self.load is not self.fleet.load:
            if own:
                self.load.add(outcome.task)
            else:
                self.load.add_later(at + ANNOUNCE_S, outcome.task)
        if self._delay_s and own:
            bit = 1 << replica
            for block in outcome.stored.added:
                self._table[block] |= bit
        if self._delay_s or self._on_report is not None:
            self._reports.append(Report(at, replica, gateway, outcome.stored))

    def _read_reports(self, until: float) -> None:
        reports, held = self._reports, self.fleet.caches.held
        while reports and reports[0].at <= until:
            at, replica, _, stored = reports.popleft()
            if self._on_report is not None:
                self._on_report(at + self._delay_s, replica, stored)
            if self._delay_s:
                # Where a block has come or gone again since, a later report or a placement of its own says so.
                bit, table = 1 << replica, self._table
                for block in stored.added:
                    table[block] |= held[block] & bit
                for block in stored.evicted:
                    table[block] &= ~bit | held[block]
