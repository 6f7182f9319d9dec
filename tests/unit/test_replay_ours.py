"""The gateway's own placement in virtual time."""

from __future__ import annotations

import pytest
from replay_support import chat_workload, scenario

from gateway.placement.settings import PlacementSettings
from gateway.replay.fleet import Choice, Fleet, Outcome
from gateway.replay.knowledge import Knowledge
from gateway.replay.ours import Ours
from gateway.replay.replay import replay
from gateway.replay.scenario import Scenario
from kvstore.cost import LinkEstimate
from kvstore.messages import Tier

LINK = LinkEstimate(0.002, 25e9)


class Watched(Ours):
    """Checks at every step that the index holds what has been reported, and all laws now and then."""

    steps = 0

    def choose(self, known: Knowledge) -> Choice:
        fleet = known.fleet
        if not fleet.scenario.report_delay_s:
            for replica, name in enumerate(self._ids):
                blocks = {self._keys[block] for block, mask in enumerate(fleet.caches.held) if mask >> replica & 1}
                assert set(self._index.keys_of(name, Tier.HBM)) == blocks
        self.steps += 1
        if self.steps % 20 == 0:
            self.check()
        return super().choose(known)

    def placed(self, known: Knowledge, choice: Choice, outcome: Outcome) -> None:
        assert self._placed is not None
        placement, _ = self._placed
        if not known.fleet.scenario.report_delay_s and known.fleet.scenario.link is None:
            assert placement.predicted_cached_tokens == outcome.cached // 512 * 512, "with the truth it is right"
        super().placed(known, choice, outcome)


@pytest.mark.parametrize(
    "setting",
    [
        scenario(),
        scenario(link=LINK),
        scenario(report_delay_s=0.25, estimate_error=0.3),
        scenario(report_delay_s=0.25, estimate_error=0.3, gateways=3, link=LINK),
    ],
    ids=["truth", "fetching", "late", "three gateways"],
)
def test_its_laws_hold_and_a_replay_repeats(setting: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = chat_workload(4)
    plain = replay(workload, setting, "ours")
    monkeypatch.setattr("gateway.replay.policies.PLAIN", {"ours": Watched})
    assert replay(workload, setting, "ours") == plain


def test_it_keeps_prefixes_together_and_still_spreads_work() -> None:
    workload = chat_workload(4)
    ours = replay(workload, scenario(), "ours")
    least = replay(workload, scenario(), "least-loaded")
    best = replay(workload, scenario(), "one-big-cache")
    assert least.hit_rate < ours.hit_rate <= best.hit_rate
    assert ours.work_max_over_mean < 1.5


def test_what_it_fetches_is_what_it_planned() -> None:
    workload = chat_workload(4)
    without = replay(workload, scenario(placement=PlacementSettings(fetch=False), link=LINK), "ours")
    fetching = replay(workload, scenario(utilization=1.5, link=LINK), "ours")
    assert without.fetched_share == 0
    assert fetching.fetched_share > 0


def test_the_settings_of_placement_are_those_of_the_scenario() -> None:
    workload = chat_workload(4)
    results = {
        eps: replay(workload, scenario(utilization=2.0, placement=PlacementSettings(eps=eps)), "ours")
        for eps in (0.01, 100.0)
    }
    assert results[0.01].spill_rate > results[100.0].spill_rate


@pytest.mark.parametrize(("alike", "prefills"), [(True, 1), (False, 2_000)])
def test_equal_machines_are_taken_for_equal(alike: bool, prefills: int) -> None:
    """From the start, or as soon as their prefills say so."""
    workload = chat_workload(4)
    fleet = Fleet(workload, scenario(estimate_error=0.5, seed=1, cache_tokens=512, alike=alike))
    ours, known = Ours(fleet), Knowledge(fleet, 0)
    known.look(0)
    before = [ours._view(known, replica).prefill_tokens_per_s for replica in range(4)]
    assert (max(before) / min(before) > 1.8) is not alike
    for at in range(prefills):
        request = at % len(workload)
        fleet.look(float(at), request)
        known.look(request)
        choice = ours.choose(known)._replace(replica=at % 4)
        ours.placed(known, choice, fleet.place(request, choice, known.belief(choice)))
    speeds = [ours._view(known, replica).prefill_tokens_per_s for replica in range(4)]
    assert max(fleet.bias) / min(fleet.bias) > 1.8, "of machines that are equal"
    assert max(speeds) / min(speeds) < 1.3
