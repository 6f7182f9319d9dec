"""Where a request goes, and what is to be fetched for it, when agents have pools of KV."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Candidate, Claims, Placement, Reason, ReplicaView
from gateway.placement.placer import Placer
from gateway.placement.settings import PlacementSettings
from kvstore.cost import LinkEstimate
from kvstore.identity import Namespace, token_keys
from kvstore.messages import ROOT_PARENT, FetchState, Tier
from replica_agent.kv.link import HELD_BACK

NAMES = [f"replica-{i}" for i in range(4)]
STATE = FetchState(namespace="n", acts=True, slots=1000, link=LinkEstimate(0.01, 1e6), links={})
BLOCK_BYTES = 1000
KEYS = token_keys(Namespace("m").root(0), range(1600))
PROMPT = PromptIdentity(mode=IdentityMode.EXACT, keys=KEYS, tokens=1600)
ALL_BLOCKS = 99
"""The last of the 100 is always computed."""


class Fleet:
    """Four idle replicas of 1,000 tokens/s with pools; `say` changes what is known of one."""

    def __init__(self, settings: PlacementSettings | None = None) -> None:
        self.index = PrefixIndex()
        for name in NAMES:
            self.index.add_replica(name)
        self.placer = Placer(self.index, settings)
        self.views = {
            name: ReplicaView(
                id=name, claims=Claims.REPORTS, prefill_tokens_per_s=1000.0, block_bytes=BLOCK_BYTES, fetch=STATE
            )
            for name in NAMES
        }

    def home(self, blocks: int = 100, *tiers: Tier) -> list[str]:
        """Has one replica hold the prompt; all, in the order in which copies are made, this one first."""
        self.hold("replica-1", blocks, *tiers)
        return self.place().ring

    def hold(self, name: str, blocks: int = 100, *tiers: Tier) -> None:
        for tier in tiers or (Tier.HBM, Tier.DRAM):
            self.index.store(name, tier, KEYS[:blocks], [ROOT_PARENT, *KEYS[: blocks - 1]])

    def say(self, name: str, **fields: Any) -> None:
        self.views[name] = msgspec.structs.replace(self.views[name], **fields)

    def place(self, identity: PromptIdentity = PROMPT, **options: Any) -> Placement:
        return self.placer.place(identity, list(self.views.values()), **options)


def of(placement: Placement, name: str) -> Candidate:
    return next(candidate for candidate in placement.candidates if candidate.replica == name)


def test_the_holder_serves_and_nothing_is_fetched_instead_of_a_hit():
    fleet = Fleet()
    for holder in NAMES:
        fleet.hold(holder)
        placement = fleet.place()
        assert (placement.replica, placement.fetch) == (holder, None)
        assert placement.predicted_cached_tokens == 1584
        fleet.index.clear(holder)


def test_a_spill_fetches_from_home():
    fleet = Fleet()
    home, following = fleet.home()[:2]
    fleet.say(home, running=40)
    placement = fleet.place()
    assert (placement.replica, placement.reason, placement.home) == (following, Reason.SPILL, home)
    assert placement.fetch is not None
    assert (placement.fetch.source, placement.fetch.blocks, placement.fetch.tokens) == (home, ALL_BLOCKS, 1584)
    assert (placement.fetch.bytes, placement.fetch.counted) == (ALL_BLOCKS * BLOCK_BYTES, True)
    assert placement.fetch.seconds == pytest.approx(0.01 + 0.099)
    assert placement.fetch.deadline_s == pytest.approx(1.584), "as long as recomputing takes"
    assert placement.predicted_cached_tokens == 1584
    assert placement.predicted_ttft_s == pytest.approx(0.109 + 0.016)
    told = of(placement, following)
    assert (told.cached_tokens, told.fetch_source, told.fetch_tokens) == (0, home, 1584)
    assert (told.fetch_s, told.prefill_s) == pytest.approx((0.109, 0.016))
    assert of(placement, home).fetch_source == ""


def test_a_queue_longer_than_a_fetch_moves_the_request_and_its_prefix():
    fleet = Fleet()
    home = fleet.home()[0]
    fleet.say(home, queued_prefill_tokens=300)
    assert fleet.place().replica == home, "within the band of a fetch and its price"
    fleet.say(home, queued_prefill_tokens=600)
    placement = fleet.place()
    assert (placement.reason, placement.fetch.source) == (Reason.COST, home)
    without = Fleet(PlacementSettings(fetch=False))
    without.hold(home)
    without.say(home, queued_prefill_tokens=600)
    assert without.place().replica == home


@pytest.mark.parametrize("off", ["setting", "argument", "pool", "namespace", "bytes", "claims", "hbm only"])
def test_nothing_is_fetched(off):
    fleet = Fleet(PlacementSettings(fetch=off != "setting"))
    home, following = fleet.home(100, *([Tier.HBM] if off == "hbm only" else []))[:2]
    fleet.say(home, running=40)
    for name in NAMES:
        if off == "pool" and name != home:
            fleet.say(name, fetch=None)
        if off == "namespace" and name != home:
            fleet.say(name, fetch=msgspec.structs.replace(STATE, namespace=name))
        if off == "bytes":
            fleet.say(name, block_bytes=0)
        if off == "claims" and name != home:
            fleet.say(name, claims=Claims.LEARNED)
    placement = fleet.place(fetch=off != "argument")
    assert (placement.replica, placement.reason, placement.fetch) == (following, Reason.SPILL, None)
    assert placement.predicted_cached_tokens == 0
    assert placement.predicted_ttft_s == pytest.approx(1.6)


def test_a_replica_that_only_keeps_records_is_told_but_counts_as_computing():
    fleet = Fleet()
    home, following = fleet.home()[:2]
    fleet.say(home, running=40)
    for name in NAMES:
        fleet.say(name, fetch=msgspec.structs.replace(STATE, acts=False))
    placement = fleet.place()
    assert (placement.replica, placement.predicted_cached_tokens) == (following, 0)
    assert (placement.fetch.source, placement.fetch.counted) == (home, False)
    assert of(placement, following).prefill_s == pytest.approx(1.6)
    assert of(placement, following).cost_s == pytest.approx(1.5 * 1.6)


def test_the_own_pool_is_a_hit_that_needs_no_hint():
    fleet = Fleet()
    first, second = NAMES[1:3]
    fleet.hold(first, 40, Tier.HBM)
    fleet.hold(first, 100, Tier.DRAM)
    fleet.hold(second, 40)
    placement = fleet.place()
    assert (placement.replica, placement.fetch) == (first, None)
    assert (placement.predicted_cached_tokens, placement.predicted_pool_tokens) == (1584, 1584 - 640)
    assert of(placement, first).pool_tokens == 1584 - 640
    fleet.say(first, fetch=None)
    assert fleet.place().predicted_cached_tokens == 640, "no engine is connected to that pool"


def test_only_what_is_missing_is_moved_from_the_longest_and_nearest_source():
    fleet = Fleet()
    a, b, c, d = NAMES
    fleet.hold(a, 20)
    fleet.hold(b, 100, Tier.DRAM)
    fleet.hold(c, 100, Tier.DRAM)
    fleet.hold(d, 60)
    for busy in (b, c, d):
        fleet.say(busy, running=40)
    plan = fleet.place(pinned=a).fetch
    assert plan.source == next(name for name in fleet.place().ring if name in (b, c))
    assert (plan.blocks, plan.tokens, plan.bytes) == (ALL_BLOCKS, 1264, 79_000)
    links = {b: LinkEstimate(0.01, 1e6), c: LinkEstimate(0.001, 1e6)}
    fleet.say(a, fetch=msgspec.structs.replace(STATE, links=links))
    plan = fleet.place(pinned=a).fetch
    assert (plan.source, plan.seconds) == (c, pytest.approx(0.08))


def test_nothing_is_counted_on_from_a_source_that_an_agent_holds_back():
    fleet = Fleet()
    a, b, c, _ = NAMES
    fleet.hold(b, 100, Tier.DRAM)
    fleet.hold(c, 100, Tier.DRAM)
    for held_back, sources in (([b], {c}), ([c], {b}), ([b, c], {None})):
        links = dict.fromkeys(held_back, HELD_BACK)
        fleet.say(a, fetch=msgspec.structs.replace(STATE, links=links))
        placement = fleet.place(pinned=a)
        assert {placement.fetch and placement.fetch.source} == sources
        assert (placement.predicted_cached_tokens > 0) == (placement.fetch is not None)


def test_a_pin_and_a_retry_fetch_but_not_from_what_failed():
    fleet = Fleet()
    home, following, third = fleet.home()[:3]
    assert fleet.place(pinned=third).fetch.source == home
    retry = fleet.place(exclude=[following])
    assert (retry.replica, retry.fetch) == (home, None)
    retry = fleet.place(exclude=[home])
    assert (retry.replica != home, retry.reason, retry.fetch) == (True, Reason.RETRY, None)
    fleet.hold(third, 90)
    assert fleet.place(exclude=[home, third]).fetch is None
    fleet.say(home, weight=0.0)
    assert fleet.place(pinned=following).fetch.source == home, "it takes nothing, and can still be read"


def test_what_is_on_its_way_is_a_hit_and_the_hint_goes_along():
    fleet = Fleet()
    home, following = fleet.home()[:2]
    fleet.say(home, running=40)
    first = fleet.place()
    claim = fleet.placer.placed(first, PROMPT)
    second = fleet.place()
    assert second.replica == first.replica == following
    assert second.predicted_cached_tokens == 1584
    assert (second.fetch.source, second.fetch.counted) == (home, False)
    assert second.predicted_ttft_s == pytest.approx(0.016)
    fleet.hold(following)
    assert not claim.live
    third = fleet.place()
    assert (third.replica, third.fetch) == (following, None)
    fleet.placer.check()


def test_a_small_shared_prefix_leaves_new_prompts_to_the_ring():
    """A system prompt that is quick to compute draws nobody to its holder, pools or not."""
    fleet = Fleet()
    fleet.hold(NAMES[0], 4)
    went = set()
    for seed in range(40):
        tail = token_keys(Namespace("m").root(0), [*range(64), *range(seed * 100, seed * 100 + 1500)])
        identity = PromptIdentity(mode=IdentityMode.EXACT, keys=tail, tokens=1564)
        placement = fleet.place(identity)
        fleet.placer.release(fleet.placer.placed(placement, identity))
        went.add(placement.replica)
    assert went == set(NAMES)


def test_an_earlier_copy_is_used_before_a_new_one_is_made():
    fleet = Fleet()
    home, *_, last = fleet.home()
    fleet.hold(last)
    fleet.say(home, running=40)
    placement = fleet.place()
    assert (placement.replica, placement.fetch) == (last, None)


def test_fetched_blocks_evict_what_computed_ones_would():
    fleet = Fleet()
    home, following, third = fleet.home()[:3]
    fleet.say(home, running=40)
    fleet.say(following, capacity_blocks=100, held_blocks=100)
    placement = fleet.place()
    assert placement.replica == following, "where the next copy goes does not depend on which cache has room"
    assert of(placement, following).eviction_s == pytest.approx(0.8)
    assert of(placement, third).eviction_s == 0


@pytest.mark.parametrize("yields", [False, True])
def test_where_a_conversation_was_fetched_from_there_is_room_if_the_engine_gives_it_up(yields):
    fleet = Fleet()
    home, following = fleet.home()[:2]
    for name in NAMES:
        fleet.say(name, capacity_blocks=100, held_blocks=100 if name == home else 0, yields=yields)
    fleet.placer.placed(fleet.place(), PROMPT)
    other = PromptIdentity(mode=IdentityMode.EXACT, keys=token_keys(Namespace("m").root(0), range(5, 805)), tokens=800)
    before = of(fleet.place(other), home).eviction_s
    fleet.say(home, running=40)
    placement = fleet.place()
    assert (placement.replica, placement.fetch and placement.fetch.source) == (following, home)
    fleet.placer.placed(placement, PROMPT)
    after = of(fleet.place(other), home).eviction_s
    assert before > 0
    assert after == pytest.approx(0 if yields else before, rel=0.1)
    fleet.placer.check()


def test_text_and_hash_prompts_fetch_nothing():
    fleet = Fleet()
    fleet.hold(NAMES[0])
    for mode in (IdentityMode.TEXT, IdentityMode.HASH):
        identity = PromptIdentity(mode=mode, keys=KEYS, tokens=1600)
        assert all(fleet.place(identity, pinned=name).fetch is None for name in NAMES)
