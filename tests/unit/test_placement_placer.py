"""Placer: reasons, terms, exclusions and what `placed` commits."""

from __future__ import annotations

from array import array

import pytest

from gateway.errors import NoReplica
from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.placement.claims import Claim
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims, Placement, Reason, ReplicaView
from gateway.placement.placer import Placer, _arc_start
from gateway.placement.settings import PlacementSettings
from kvstore.identity import Namespace, token_keys
from kvstore.messages import ROOT_PARENT, Tier

NAMES = [f"replica-{i}" for i in range(4)]
ROOT = Namespace(model="m").root(0)


def _prompt(seed: int, tokens: int, mode: IdentityMode = IdentityMode.EXACT) -> PromptIdentity:
    keys = token_keys(ROOT, [(seed * 7919 + i) % 50_000 for i in range(tokens)])
    return PromptIdentity(mode=mode, keys=keys, tokens=tokens)


def _views(claims: Claims = Claims.REPORTS, **special) -> list[ReplicaView]:
    """Four idle replicas; `replica_2={...}` overrides fields of one."""
    return [
        ReplicaView(
            **{"id": name, "claims": claims, "prefill_tokens_per_s": 1000.0, **special.get(name.replace("-", "_"), {})}
        )
        for name in NAMES
    ]


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    for name in NAMES:
        index.add_replica(name)
    return index


@pytest.fixture
def placer(index: PrefixIndex) -> Placer:
    return Placer(index)


def _hold(index: PrefixIndex, replica: str, keys: array, units: int = 1) -> None:
    blocks = keys[units - 1 :: units]
    index.store(replica, Tier.HBM, blocks, [blocks[i - 1] if i else ROOT_PARENT for i in range(len(blocks))])


def _home_of(placer: Placer, identity: PromptIdentity) -> str:
    return placer.ring.order(identity.keys[0])[0]


def test_a_cold_prompt_goes_to_the_ring(placer):
    identity = _prompt(1, 1000)
    placement = placer.place(identity, _views())
    assert placement.reason is Reason.COLD
    assert placement.replica == placement.home == placement.ring[0] == _home_of(placer, identity)
    assert [c.replica for c in placement.candidates] == placer.ring.order(identity.keys[0])
    assert [c.ring_position for c in placement.candidates] == [0, 1, 2, 3]
    assert placement.predicted_ttft_s == pytest.approx(1.0)


def test_costs_within_the_band_are_equal(placer):
    identity = _prompt(1, 1000)
    home = placer.place(identity, _views()).replica.replace("-", "_")
    assert placer.place(identity, _views(**{home: {"queued_prefill_tokens": 120}})).reason is Reason.COLD
    assert placer.place(identity, _views(**{home: {"queued_prefill_tokens": 120}})).ring[0] == home.replace("_", "-")
    assert placer.place(identity, _views(**{home: {"queued_prefill_tokens": 140}})).replica != home.replace("_", "-")


def test_home_longest_and_cost_are_told_apart(placer, index):
    identity = _prompt(1, 1000)
    placer.place(identity, _views())
    home, other = placer.ring.order(identity.keys[0])[:2]
    _hold(index, other, identity.keys)
    placement = placer.place(identity, _views())
    assert (placement.replica, placement.reason) == (other, Reason.LONGEST)
    assert placement.ring[0] == other
    _hold(index, home, identity.keys)
    assert placer.place(identity, _views()).reason is Reason.HOME
    index.clear(home)
    busy = _views(**{other.replace("-", "_"): {"queued_prefill_tokens": 2000}})
    placement = placer.place(identity, busy)
    assert (placement.replica != other, placement.reason) == (True, Reason.COST)


def test_the_bound_spills_to_the_next_on_the_ring_and_back(placer, index):
    identity = _prompt(1, 1000)
    home = placer.place(identity, _views()).replica
    _hold(index, home, identity.keys)
    full = _views(**{home.replace("-", "_"): {"running": 40}})
    placement = placer.place(identity, full)
    assert placement.reason is Reason.SPILL
    assert placement.home == home == placement.ring[0]
    assert placement.replica == placement.ring[1]
    assert not next(c for c in placement.candidates if c.replica == home).within_bound
    assert placer.place(identity, _views()).replica == home


def test_a_spill_prefers_the_copy_of_an_earlier_one(placer, index):
    identity = _prompt(1, 1000)
    placement = placer.place(identity, _views())
    home, last = placement.ring[0], placement.ring[3]
    _hold(index, home, identity.keys)
    _hold(index, last, identity.keys)
    first = placer.place(identity, _views()).replica
    placement = placer.place(identity, _views(**{first.replace("-", "_"): {"running": 40}}))
    assert {first, placement.replica} == {home, last}


def test_when_all_are_over_a_bound_the_least_pressed_serves(index):
    # With eps 1 and equal weights less than half can be over either bound, so that one is always left.
    placer = Placer(index, PlacementSettings(eps=0.25))
    placement = placer.place(
        _prompt(1, 100),
        _views(
            replica_0={"running": 10},
            replica_1={"running": 9},
            replica_2={"queued_prefill_tokens": 9000},
            replica_3={"queued_prefill_tokens": 9000},
        ),
    )
    assert not any(c.within_bound for c in placement.candidates)
    assert placement.replica == "replica-1"


def test_a_retry_never_returns_and_a_pin_always_does(placer):
    identity = _prompt(1, 1000)
    first = placer.place(identity, _views())
    again = placer.place(identity, _views(), exclude=[first.replica])
    assert again.replica != first.replica
    assert again.reason is Reason.RETRY
    assert sorted(again.ring) == NAMES
    pinned = placer.place(identity, _views(replica_3={"running": 99}), pinned="replica-3")
    assert (pinned.replica, pinned.reason, pinned.home) == ("replica-3", Reason.PINNED, first.home)


@pytest.mark.parametrize(
    ("views", "options"),
    [
        ([], {}),
        (_views(), {"exclude": NAMES}),
        (_views(), {"pinned": "nobody"}),
        (_views(), {"pinned": "replica-1", "exclude": ["replica-1"]}),
        (_views(**{name.replace("-", "_"): {"weight": 0.0} for name in NAMES}), {}),
    ],
)
def test_nothing_left_to_choose_from(placer, views, options):
    with pytest.raises(NoReplica):
        placer.place(_prompt(1, 100), views, **options)


def test_weight_zero_takes_nothing(placer):
    idle = _views(replica_2={"weight": 0.0})
    assert all(placer.place(_prompt(i, 100), idle).replica != "replica-2" for i in range(60))


@pytest.mark.parametrize("block_units", [1, 2, 4, 8])
def test_predictions_are_whole_blocks_and_leave_the_last_token(placer, index, block_units):
    views = _views(replica_1={"block_units": block_units})
    identity = _prompt(1, 256)
    _hold(index, "replica-1", identity.keys, block_units)
    block = 16 * block_units
    for tokens, matched in ((256, 256), (200, 192), (257, 256)):
        prompt = PromptIdentity(mode=IdentityMode.EXACT, keys=identity.keys[: tokens // 16], tokens=tokens)
        candidates = placer.place(prompt, views).candidates
        cached = next(c.cached_tokens for c in candidates if c.replica == "replica-1")
        assert cached == min(matched // block * block, (tokens - 1) // block * block)


def test_pending_claims_predict_hits_until_reported_or_released(placer, index):
    identity = _prompt(1, 1000)
    placement = placer.place(identity, _views())
    claim = placer.placed(placement, identity)
    again = placer.place(identity, _views())
    assert (again.replica, again.predicted_cached_tokens) == (placement.replica, 992)
    placer.release(claim)
    assert placer.place(identity, _views()).predicted_cached_tokens == 0
    claim = placer.placed(placement, identity)
    _hold(index, placement.replica, identity.keys)
    assert not claim.live
    assert placer.place(identity, _views()).predicted_cached_tokens == 992
    assert not placer.placed(again, identity).live, "everything is reported: nothing is pending"
    placer.check()


def test_place_alone_changes_nothing(placer):
    identity = _prompt(1, 1000)
    for _ in range(50):
        placement = placer.place(identity, _views())
    assert placement.reason is Reason.COLD
    assert placement.candidates[0].cached_tokens == 0
    placer.check()


@pytest.mark.parametrize("view_claims", [Claims.REPORTS, Claims.LEARNED])
def test_text_prompts_and_silent_replicas_are_learned(placer, index, view_claims):
    mode = IdentityMode.TEXT if view_claims is Claims.REPORTS else IdentityMode.EXACT
    identity = PromptIdentity(mode=mode, keys=_prompt(1, 640).keys, tokens=2560, unit_tokens=64)
    _hold(index, "replica-0", identity.keys)
    placement = placer.place(identity, _views(view_claims))
    assert placement.reason is Reason.COLD, "reports say nothing about text keys, or there are none"
    placer.placed(placement, identity)
    again = placer.place(identity, _views(view_claims))
    assert again.replica == placement.replica
    assert again.predicted_cached_tokens == 2544
    assert {c.claims for c in again.candidates} == {Claims.LEARNED}
    placer.restarted(placement.replica)
    assert placer.place(identity, _views(view_claims)).predicted_cached_tokens == 0


def test_hash_mode_is_the_ring_and_the_bounds(placer):
    identity = _prompt(1, 1000, IdentityMode.HASH)
    placement = placer.place(identity, _views())
    placer.placed(placement, identity)
    home = placement.replica
    busier = _views(**{home.replace("-", "_"): {"queued_prefill_tokens": 400}})
    again = placer.place(identity, busier)
    assert (again.replica, again.reason) == (home, Reason.FALLBACK)
    assert again.predicted_cached_tokens == 0
    spilled = placer.place(identity, _views(**{home.replace("-", "_"): {"queued_prefill_tokens": 9000}}))
    assert (spilled.replica, spilled.reason) == (again.ring[1], Reason.SPILL)


def test_a_replica_that_left_is_forgotten(placer, index):
    identity = _prompt(1, 1000)
    placement = placer.place(identity, _views())
    placer.placed(placement, identity)
    index.remove_replica(placement.replica)
    placer.forget(placement.replica)
    assert placement.replica not in placer.ring
    left = [view for view in _views() if view.id != placement.replica]
    assert placer.place(identity, left).replica == placement.ring[1]
    placer.check()


def test_replicas_of_several_models_share_one_ring(placer):
    identity = _prompt(1, 1000)
    everyone = placer.place(identity, _views()).ring
    some = [view for view in _views() if view.id in everyone[1:3]]
    assert placer.place(identity, some).ring == everyone[1:3]
    assert placer.place(identity, _views()).ring == everyone


def test_an_arc_begins_after_the_longest_stretch_of_others():
    assert _arc_start([2], 4) == 2
    assert _arc_start([0, 3], 4) == 3
    assert _arc_start([0, 1, 2, 3], 4) == 0
    assert _arc_start([0, 1, 6, 7], 8) == 6
    assert _arc_start([1, 2, 5], 8) == 1


def test_the_next_copy_goes_to_the_rings_next_whatever_cache_has_room(placer, index):
    identity = _prompt(1, 1600)
    first = placer.place(identity, _views())
    _hold(index, first.replica, identity.keys)
    busy = {"running": 40, "capacity_blocks": 100, "held_blocks": 100}
    full = {"capacity_blocks": 100, "held_blocks": 100}
    for roomy in first.ring[1:]:
        special = {name.replace("-", "_"): full for name in first.ring[1:] if name != roomy}
        special[first.replica.replace("-", "_")] = busy
        placement = placer.place(identity, _views(**special))
        assert (placement.reason, placement.home) == (Reason.SPILL, first.replica)
        assert placement.replica == placement.ring[1]


def test_what_is_about_to_be_evicted_is_not_predicted(placer, index):
    old, new = _prompt(1, 1600), _prompt(2, 1600)
    small = {"capacity_blocks": 150}

    def place(identity: PromptIdentity, held: int) -> tuple[Placement, Claim]:
        view = {"replica_0": {**small, "held_blocks": held}}
        placement = placer.place(identity, _views(**view), pinned="replica-0")
        return placement, placer.placed(placement, identity)

    _, claim = place(old, 0)
    _hold(index, "replica-0", old.keys)
    placer.answered(claim)
    place(new, 100)
    # The other 100 blocks are on their way, and push out the last 50 of these.
    assert place(old, 100)[0].predicted_cached_tokens == 800
    placer.check()
