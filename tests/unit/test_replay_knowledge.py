"""What a gateway may know, and no more: loads, prefixes and queues as old as its news."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from replay_support import chat_workload, scenario

from gateway.replay.fleet import Choice, Fleet, Outcome
from gateway.replay.knowledge import Knowledge
from gateway.replay.scenario import ANNOUNCE_S, Scenario


@dataclass
class Told:
    """A placement, and by whom."""

    gateway: int
    outcome: Outcome
    choice: Choice


@dataclass
class Replay:
    """Random placements by several gateways; every step leaves fleet and views as they are after `look`."""

    setting: Scenario
    seed: int = 0
    past: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workload = chat_workload(self.seed)
        self.fleet = Fleet(self.workload, self.setting)
        self.views = [Knowledge(self.fleet, number) for number in range(self.setting.gateways)]
        self.rng = random.Random(self.seed)
        self.request = -1

    def look(self) -> Knowledge:
        """The next request, a hundred times as fast as recorded."""
        self.request += 1
        self.fleet.look(self.workload.times[self.request] / 100, self.request)
        known = self.views[self.request % len(self.views)]
        known.look(self.request)
        return known

    def place(self, known: Knowledge) -> None:
        choice = Choice(self.rng.randrange(self.setting.replicas))
        outcome = self.fleet.place(self.request, choice, known.belief(choice))
        for view in self.views:
            view.learn(outcome, known.gateway)
        self.past.append(Told(known.gateway, outcome, choice))


def test_without_delay_and_error_a_gateway_knows_the_truth() -> None:
    replay = Replay(scenario())
    for _ in range(240):
        known = replay.look()
        assert known.matched == replay.fleet.matched
        assert known.load is replay.fleet.load
        for replica, free in enumerate(replay.fleet.free):
            assert known.wait_s(replica) == pytest.approx(max(0.0, free - known.now), abs=1e-9)
        replay.place(known)


@pytest.mark.parametrize("gateways", [1, 3])
def test_prefixes_are_as_old_as_reports_but_for_own_placements(gateways: int) -> None:
    delay_s = 0.2
    replay = Replay(scenario(report_delay_s=delay_s, gateways=gateways, cache_tokens=12_000))
    changed: dict[tuple[int, int], float] = {}
    stale = unknown = 0
    for _ in range(240):
        known = replay.look()
        held = replay.fleet.caches.held
        for block in range(len(held)):
            for replica in range(4):
                truth, belief = held[block] >> replica & 1, known._table[block] >> replica & 1
                if truth != belief:
                    assert known.now - changed[block, replica] < delay_s
                    stale += belief
                    unknown += truth
        own = [told for told in replay.past if told.gateway == known.gateway]
        for told in own[-1:]:
            for block in told.outcome.stored.added:
                if held[block] >> told.choice.replica & 1:
                    assert known._table[block] >> told.choice.replica & 1
        replay.place(known)
        told = replay.past[-1]
        for block in (*told.outcome.stored.added, *told.outcome.stored.evicted):
            changed[block, told.choice.replica] = known.now
    assert stale, "evictions are heard of later"
    assert bool(unknown) is (gateways > 1), "with one gateway nothing is stored that it did not place"


@pytest.mark.parametrize(("gateways", "delay_s"), [(1, 0.2), (3, 0.2), (3, 0.0)])
def test_loads_are_own_placements_and_what_was_announced(gateways: int, delay_s: float) -> None:
    replay = Replay(scenario(report_delay_s=delay_s, gateways=gateways))
    late = 0
    for _ in range(240):
        known = replay.look()
        known.load.check()
        for replica in range(4):
            mine = [
                told.outcome.task
                for told in replay.past
                if told.choice.replica == replica
                and told.outcome.task.end > known.now
                and (told.gateway == known.gateway or told.outcome.at + ANNOUNCE_S <= known.now)
            ]
            assert known.load.outstanding[replica] == len(mine)
            assert known.load.context[replica] == sum(task.context for task in mine)
            late += replay.fleet.load.outstanding[replica] - len(mine)
        replay.place(known)
    assert bool(late) is (gateways > 1)


@pytest.mark.parametrize("gateways", [1, 3])
def test_a_queue_is_the_reported_work_rolled_forward_with_placements_since(gateways: int) -> None:
    delay_s = 0.2
    replay = Replay(scenario(report_delay_s=delay_s, gateways=gateways, estimate_error=0.3))
    fleet, beliefs = replay.fleet, []
    waits = 0
    for _ in range(240):
        known = replay.look()
        told_at = known.now - delay_s
        for replica in range(4):
            free_at, begin = told_at, 0.0
            for told, belief in zip(replay.past, beliefs, strict=True):
                task = told.outcome.task
                if task.replica != replica:
                    continue
                turn, begin = max(begin, told.outcome.at), task.prefill_end
                factor = fleet.bias[replica] * fleet.noise[replay.past.index(told)]
                seen = told.outcome.at + (0 if told.gateway == known.gateway else ANNOUNCE_S)
                if told.outcome.at <= told_at:
                    free_at += max(0.0, task.prefill_end - max(turn, told_at)) * factor
                elif seen <= known.now:
                    free_at = max(free_at, seen) + belief.expected_s
            assert known.wait_s(replica) == pytest.approx(max(0.0, free_at - known.now), abs=1e-9)
            waits += known.wait_s(replica) > 0
        replay.place(known)
        beliefs.append(fleet.jobs[replay.past[-1].choice.replica][-1].belief)
    assert waits > 100


def test_an_estimate_is_off_by_a_factor_of_the_replica_and_one_of_the_request() -> None:
    replay = Replay(scenario(estimate_error=0.3, seed=3))
    factors = []
    for _ in range(240):
        known = replay.look()
        factors.append([known._factor(replica) for replica in range(4)])
        for replica in range(4):
            true_s = known.physics.prefill_s(known.tokens, 0)
            assert known.prefill_s(replica, 0) == pytest.approx(true_s * known._factor(replica))
            assert known.token_s(replica) == pytest.approx(known.physics.prefill_s(1, 0) * known._factor(replica))
        replay.place(known)
    for one in factors[1:]:
        ratios = [mine / first for mine, first in zip(one, factors[0], strict=True)]
        assert ratios == pytest.approx([ratios[0]] * 4), "all replicas are misjudged alike for one request"
    assert len({row[0] for row in factors}) == 240
    assert len(set(factors[0])) == 4
    exact = Replay(scenario()).look()
    assert [exact._factor(replica) for replica in range(4)] == [1.0] * 4
