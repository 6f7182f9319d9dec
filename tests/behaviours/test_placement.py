"""Behaviours of placement, each with the figure it must keep."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter

import pytest
from placement_fleet import CONVERSATION, POOLS, Fleet, Request, conversation, prompt

from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.placement.placement import Claims, Placement, Reason
from gateway.placement.placer import Placer
from kvstore.messages import FetchState, Tier

CHI_SQUARE_999 = {2: 13.82, 7: 24.32, 15: 37.70}
"""Quantile 0.999 by degrees of freedom."""


def _hot_and_other(share: float, i: int, hot: PromptIdentity) -> PromptIdentity:
    """Every (1/share)-th request is the hot prompt, the others are prompts of their own."""
    return hot if i % round(1 / share) == 0 else prompt(i, 200)


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize(("replicas", "pools"), [(2, None), (8, None), (64, None), (256, None), (8, POOLS)])
def test_hot_prefix_is_bounded(replicas, share, pools):
    fleet = Fleet(replicas, pools=pools)
    hot = prompt(0, 2000)
    fleet.submit(Request(0.0, hot, 500))
    count = min(60 * replicas, 600)
    concurrency = min(8 * replicas, 400)
    most_running = 0
    for i in range(count):
        # 500 output tokens take 10 s.
        identity = _hot_and_other(share, i, hot)
        request = Request(20.0 + i * 10 / concurrency, identity, 500)
        fleet.advance(request.at)
        engine_before = {engine.id: (engine.queued, engine.running) for engine in fleet.engines.values()}
        placement = fleet.submit(request)
        engine = fleet.engines[placement.replica]
        running = [e.running for e in fleet.engines.values()]
        queued = [e.queued for e in fleet.engines.values()]
        # The law of `Bounds`, the request counted on both sides, its prefill with at most the floor.
        own = engine.queued - engine_before[engine.id][0]
        floor = max(512, placement.predicted_cached_tokens)
        counted = min(own, floor)
        assert engine.running <= 2 * sum(running) / replicas + 2
        assert engine.queued - own + counted <= 2 * (sum(queued) - own + counted) / replicas + floor + 1e-6
        most_running = max(most_running, engine.running)
    assert most_running > 2, "the load must be high enough for a bound to matter"
    if share == 1.0 and replicas > 2:
        assert fleet.reasons[Reason.SPILL] > 0


@pytest.mark.parametrize(("replicas", "pools"), [(2, None), (8, None), (64, None), (256, None), (8, POOLS)])
def test_an_idle_fleet_never_spills(replicas, pools):
    fleet = Fleet(replicas, pools=pools)
    hot = prompt(0, 2000)
    placements = [fleet.submit(Request(100.0 * i, _hot_and_other(0.25, i, hot), 500)) for i in range(200)]
    assert fleet.reasons[Reason.SPILL] == 0
    assert len({placement.replica for placement in placements[::4]}) == 1


@pytest.mark.parametrize("mode", [IdentityMode.EXACT, IdentityMode.TEXT, IdentityMode.HASH])
@pytest.mark.parametrize("replicas", [3, 8, 16])
def test_cold_requests_spread(replicas, mode):
    claims = {IdentityMode.EXACT: Claims.REPORTS, IdentityMode.TEXT: Claims.LEARNED, IdentityMode.HASH: Claims.NONE}
    fleet = Fleet(replicas, claims=claims[mode])
    count = 100 * replicas
    served: Counter[str] = Counter()
    for i in range(count):
        keys = prompt(i, 800).keys
        identity = PromptIdentity(mode=mode, keys=keys, tokens=800)
        served[fleet.submit(Request(100.0 * i, identity, 10)).replica] += 1
    expected = count / replicas
    chi_square = sum((served[replica] - expected) ** 2 / expected for replica in fleet.engines)
    assert chi_square < CHI_SQUARE_999[replicas - 1]
    assert served["replica-0"] / count <= 2 / replicas


def test_prompts_too_short_for_a_key_spread():
    fleet = Fleet(8)
    served = Counter(fleet.submit(Request(100.0 * i, prompt(0, 15), 10)).replica for i in range(800))
    assert sum((served[replica] - 100) ** 2 / 100 for replica in fleet.engines) < CHI_SQUARE_999[7]


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the Mooncake conversation trace is not on this machine")
@pytest.mark.parametrize(
    ("mode", "claims", "utilization", "count"),
    [
        (IdentityMode.EXACT, Claims.REPORTS, 0.5, 2500),
        (IdentityMode.EXACT, Claims.REPORTS, 0.05, 2500),
        (IdentityMode.HASH, Claims.NONE, 0.5, 2500),
    ],
)
@pytest.mark.parametrize("pools", [None, POOLS])
def test_shared_system_prompt_spreads(mode, claims, utilization, count, pools):
    fleet = Fleet(8, capacity_blocks=1953, block_units=32, claims=claims, pools=pools)
    requests = conversation(8, fleet.speed, utilization, mode, count)
    assert len({request.identity.keys[31] for request in requests if len(request.identity.keys) >= 32}) == 1
    for request in requests:
        fleet.submit(request)
    assert fleet.work_max_over_mean() <= 1.3


@pytest.mark.parametrize("pools", [None, POOLS])
@pytest.mark.parametrize("replicas", [3, 8])
def test_spill_is_deterministic_and_returns(replicas, pools):
    prefix = prompt(1, 4000).keys
    tails = [prompt(1000 + i, 4100, shared=prefix) for i in range(600)]

    def run(seed: int) -> tuple[Fleet, list[Placement], int]:
        fleet = Fleet(replicas, pools=pools)
        rng = random.Random(seed)
        fleet.submit(Request(0.0, tails[0], 10))
        placements, peak, at = [], 0, 100.0
        for tail in tails[1:500]:
            at += rng.expovariate(8 * replicas / 10)
            placements.append(fleet.submit(Request(at, tail, 500)))
            peak = max(peak, sum(engine.running for engine in fleet.engines.values()))
        return fleet, placements, peak

    used = []
    for seed in (1, 2, 3):
        fleet, placements, demand = run(seed)
        capacity = 2 * demand / replicas + 2
        k = math.ceil(demand / capacity)
        order: list[str] = []
        for placement in placements:
            if placement.replica not in order:
                order.append(placement.replica)
        assert fleet.reasons[Reason.SPILL] > 0
        assert len(order) <= k
        assert len(fleet.index.holders(prefix[-1])) <= k
        assert (sum(engine.fetched for engine in fleet.engines.values()) > 0) == (pools is not None)
        used.append(order)
        # The load has gone: everything is at home again.
        at = fleet.now + 1000
        for i, tail in enumerate(tails[500:]):
            placement = fleet.submit(Request(at + 100 * i, tail, 10))
            assert placement.replica == placement.home == order[0]
    assert all(order[: len(used[0])] == used[0][: len(order)] for order in used), "the k-th copy is on the same replica"


@pytest.mark.parametrize("pools", [None, POOLS])
def test_overload_elsewhere_keeps_affinity(pools):
    def run(overloaded: bool) -> tuple[Fleet, list[Placement]]:
        fleet = Fleet(8, pools=pools)
        if overloaded:
            fleet.engines["replica-5"].queued += 400_000
            fleet.engines["replica-5"].running += 300
        rng = random.Random(7)
        placements, at = [], 0.0
        grown = [prompt(i, 3000).keys for i in range(60)]
        for turn in range(1200):
            conversation = rng.randrange(60)
            grown[conversation] = prompt(
                10_000 + turn, 16 * (len(grown[conversation]) + 6), shared=grown[conversation]
            ).keys
            identity = PromptIdentity(
                mode=IdentityMode.EXACT, keys=grown[conversation], tokens=16 * len(grown[conversation]) + 5
            )
            at += rng.expovariate(8)
            placements.append((conversation, identity.tokens, fleet.submit(Request(at, identity, 100))))
        return fleet, placements

    _, calm = run(False)
    _, loaded = run(True)
    elsewhere = {c for c, _, placement in calm if placement.replica == "replica-5"}
    rates = [
        sum(placement.predicted_cached_tokens for c, _, placement in run if c not in elsewhere)
        / sum(tokens for c, tokens, _ in run if c not in elsewhere)
        for run in (calm, loaded)
    ]
    assert elsewhere
    assert len(elsewhere) < 30
    assert rates[0] > 0.9
    assert rates[0] - rates[1] < 0.02
    assert all(placement.replica != "replica-5" for _, _, placement in loaded)


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_adding_a_replica_moves_little(replicas):
    prompts = [prompt(i, 100) for i in range(600)]
    fleet = Fleet(replicas)
    before = [fleet.placer.place(identity, fleet.views()).replica for identity in prompts]
    fleet.index.remove_replica("replica-0")
    fleet.index.add_replica("replica-0")
    fleet.placer.restarted("replica-0")
    restarted = [fleet.placer.place(identity, fleet.views()).replica for identity in prompts]
    assert restarted == before

    larger = Fleet(replicas + 1)
    after = [larger.placer.place(identity, larger.views()).replica for identity in prompts]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert 0 < len(moved) <= 1.5 / replicas * len(prompts)
    assert set(moved) == {f"replica-{replicas}"}


def _mixed_traffic(count: int, seed: int) -> list[Request]:
    """Applications of unequal size with a system prompt each, and conversations that grow turn by turn."""
    rng = random.Random(seed)
    systems = [prompt(i, 16 * rng.randrange(10, 120)).keys for i in range(12)]
    open_chats: list[array] = []
    requests, at = [], 0.0
    for i in range(count):
        if open_chats and rng.random() < 0.7:
            which = rng.randrange(len(open_chats))
            keys = open_chats.pop(which)
        else:
            keys = systems[min(11, int(rng.expovariate(0.4)))]
        keys = prompt(100_000 + i, 16 * (len(keys) + rng.randrange(5, 80)), shared=keys).keys
        if len(keys) < 600:
            open_chats.append(keys)
        at += rng.expovariate(12)
        identity = PromptIdentity(mode=IdentityMode.EXACT, keys=keys, tokens=16 * len(keys) + 3)
        requests.append(Request(at, identity, rng.randrange(20, 400)))
    return requests


def _two_gateways(restart_at: int | None, pools: FetchState | None) -> tuple[float, float]:
    """Hit rate of the fleet and agreement on the home, over the last 1,000 requests, with two gateways taking
    turns. The second one starts anew, knowing only the reports, where `restart_at` says."""
    fleet = Fleet(8, speed=20_000, capacity_blocks=25_000, pools=pools)
    gateways = [fleet.placer, Placer(fleet.index, clock=lambda: fleet.now)]
    agreed, hits, tokens = 0, 0, 0
    requests = _mixed_traffic(1600, 11)
    for i, request in enumerate(requests):
        if i == restart_at:
            gateways[1] = Placer(fleet.index, clock=lambda: fleet.now)
        fleet.advance(request.at)
        homes = [gateway.place(request.identity, fleet.views()).home for gateway in gateways]
        placement = fleet.submit(request, gateways[i % 2])
        if i >= 600:
            agreed += homes[0] == homes[1]
            hits += placement.predicted_cached_tokens
            tokens += request.identity.tokens
    return hits / tokens, agreed / 1000


@pytest.mark.parametrize("pools", [None, POOLS])
def test_gateways_agree(pools):
    hit_rate, agreement = _two_gateways(None, pools)
    assert agreement >= 0.99
    assert hit_rate > 0.5
    after_restart, agreement = _two_gateways(600, pools)
    assert agreement >= 0.95
    assert hit_rate - after_restart < 0.02


@pytest.mark.parametrize("pools", [None, POOLS])
@pytest.mark.parametrize("at_once", [False, True])
def test_equal_documents_share_out_the_caches(at_once, pools):
    """Six documents of 1,500 tokens over three replicas with 4,000 tokens of KV: two each, nothing evicted."""
    fleet = Fleet(3, speed=1000.0, capacity_blocks=250, pools=pools)
    template = prompt(99, 32).keys
    gap = 0.0 if at_once else 100.0
    documents = [prompt(i, 1500, shared=template) for i in range(6)]
    first = [fleet.submit(Request(1 + gap * i, document, 5)).replica for i, document in enumerate(documents)]
    assert sorted(Counter(first).values()) == [2, 2, 2]
    again = [fleet.submit(Request(5000 + 100 * i, document, 5)) for i, document in enumerate(documents)]
    assert [placement.replica for placement in again] == first
    assert all(placement.predicted_cached_tokens == 1488 for placement in again)
    for engine in fleet.engines.values():
        assert fleet.index.held_blocks(engine.id, Tier.HBM) == 2 + 2 * 91


def test_full_caches_leave_it_to_the_ring():
    fleet = Fleet(4, capacity_blocks=250)
    for i in range(200):
        fleet.submit(Request(100.0 * i, prompt(i, 1500), 5))
    for i in range(200, 260):
        placement = fleet.submit(Request(100.0 * i, prompt(i, 1500), 5))
        assert placement.candidates[0].replica == placement.replica


@pytest.mark.parametrize("pools", [None, POOLS])
def test_all_that_spill_from_a_hot_document_go_to_one_replica(pools):
    for tokens in (1600, 2300, 8000):
        fleet = Fleet(3, pools=pools)
        document = prompt(1, tokens).keys
        fleet.submit(Request(0.0, prompt(5, tokens + 20, shared=document), 10))
        burst = [fleet.submit(Request(60.0, prompt(10 + i, tokens + 20, shared=document), 500)) for i in range(10)]
        home, following = burst[0].ring[:2]
        assert {placement.replica for placement in burst} == {home, following}
        # Once a fetch has made the next one as good as home, the less loaded of the two is the better home.
        assert {placement.home for placement in burst} <= ({home} if pools is None else {home, following})
        after = fleet.submit(Request(500.0, prompt(30, tokens + 20, shared=document), 10))
        assert after.replica == home


def test_a_burst_with_one_prefix_stays_together():
    """At one instant, with prefixes that no report has shown: no more copies than the bound on prefill asks for, and
    every request but the first on a replica is a predicted hit."""
    fleet = Fleet(8)
    short, long = prompt(1, 480).keys, prompt(2, 3000).keys
    burst = [fleet.submit(Request(0.0, prompt(10 + i, 500, shared=short), 50)) for i in range(4)]
    assert len({placement.replica for placement in burst[:2]}) == 1
    assert [placement.predicted_cached_tokens for placement in burst[:2]] == [0, 480]

    fleet = Fleet(8)
    burst = [fleet.submit(Request(0.0, prompt(10 + i, 3100, shared=long), 50)) for i in range(16)]
    copies = {placement.replica for placement in burst}
    assert len(copies) == 3, "16 sequences are within 2 x mean + 2 once three of eight replicas have them"
    assert sum(placement.predicted_cached_tokens == 2992 for placement in burst) == 13


@pytest.mark.parametrize("seed", range(3))
def test_conversations_that_share_a_system_prompt_spread_so_that_all_fit(seed):
    """Eight grow to 4,000 tokens side by side, on three replicas with room for four or five each."""
    rng = random.Random(seed)
    fleet = Fleet(3, speed=2000.0, capacity_blocks=1024)
    system = prompt(99, 1300).keys
    at = 0.0

    def play(chats: list[array[int]], first: int) -> tuple[int, int]:
        """Twelve turns of each; returns the tokens that were computed, and that had to be."""
        nonlocal at
        before = sum(engine.work for engine in fleet.engines.values())
        for turn in range(12):
            for chat in rng.sample(range(len(chats)), len(chats)):
                grown = 16 * len(chats[chat]) + rng.randrange(150, 350)
                chats[chat] = prompt(first + 100 * turn + chat, grown, shared=chats[chat]).keys
                at += rng.uniform(0.2, 2.0)
                fleet.advance(at)
                hits = {engine.id: engine.hits for engine in fleet.engines.values()}
                identity = PromptIdentity(mode=IdentityMode.EXACT, keys=chats[chat], tokens=16 * len(chats[chat]) + 3)
                placement = fleet.submit(Request(at, identity, 30))
                hit = fleet.engines[placement.replica].hits - hits[placement.replica]
                assert placement.predicted_cached_tokens == hit
        least = sum(16 * len(chat) for chat in chats) + 12 * 3 * len(chats)
        return sum(engine.work for engine in fleet.engines.values()) - before, least

    play([system, system], 10_000)  # so that it is known that conversations grow
    computed, least = play([system] * 8, 20_000)
    # Each computes its own part once; the system prompt is there, and is copied to the two other replicas at most.
    least -= 16 * len(system) * 8
    assert least < computed <= least + 16 * len(system) * 2 + 8 * 12 * 16
    fleet.placer.check()
