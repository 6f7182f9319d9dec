"""Pending and learned claims."""

from __future__ import annotations

import random
from array import array

from gateway.placement.claims import LearnedClaims, PendingClaims
from gateway.placement.index import PrefixIndex
from kvstore.messages import ROOT_PARENT, Tier


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _prompts(rng: random.Random, count: int) -> list[array]:
    prompts = [array("Q", [rng.getrandbits(64) for _ in range(30)])]
    for _ in range(count - 1):
        base = rng.choice(prompts)
        prompts.append(base[: rng.randrange(len(base))] + array("Q", [rng.getrandbits(64) for _ in range(10)]))
    return prompts


def _common(one: array, other: array) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_pending_equals_the_longest_common_prefix_of_live_claims():
    rng, clock = random.Random(5), Clock()
    pending, prompts, live = PendingClaims(ttl_s=50, clock=clock), _prompts(rng, 12), []
    for step in range(2000):
        clock.now += rng.random()
        live = [(claim, born, prompt) for claim, born, prompt in live if claim.live and born + 50 > clock.now]
        replica, prompt, units = rng.choice("abc"), rng.choice(prompts), rng.choice([1, 2, 4])
        if rng.random() < 0.5 or not live:
            claim = pending.claim(replica, prompt, 0, units)
            if claim.live:
                live.append((claim, clock.now, prompt[: len(prompt) // units * units]))
        else:
            pending.release(live.pop(rng.randrange(len(live)))[0])
        pending.expire()
        prompt = rng.choice(prompts)
        for replica in "abc":
            longest = max((_common(prompt, keys) for claim, _, keys in live if claim.replica == replica), default=0)
            assert pending.match(replica, prompt, 2) == longest // 2 * 2
            assert pending.fresh_units(replica) == sum(c.fresh_units for c, _, _ in live if c.replica == replica)
        if step % 100 == 0:
            pending.check()
    clock.now += 100
    pending.expire()
    pending.check()
    assert not pending._counts
    assert not pending._awaited


def test_a_claim_ends_when_its_last_whole_block_is_reported():
    index, pending = PrefixIndex(), PendingClaims()
    index.add_listener(pending)
    for replica in ("a", "b"):
        index.add_replica(replica)
    keys = array("Q", [1, 2, 3, 4, 5])
    claim, elsewhere = pending.claim("a", keys, 0, 2), pending.claim("b", keys, 0, 2)
    assert pending.match("a", keys, 2) == 4
    index.store("a", Tier.HBM, [2], [0])
    assert claim.live
    index.store("a", Tier.DRAM, [4], [2])
    assert claim.live, "another tier is not where the engine looks"
    index.store("a", Tier.HBM, [4], [2])
    assert not claim.live
    assert elsewhere.live
    pending.check()
    index.remove_replica("b")
    assert not elsewhere.live
    pending.release(elsewhere)
    pending.check()


def test_a_prefix_that_waits_twice_fills_the_cache_once():
    pending, prefix = PendingClaims(), array("Q", range(1, 101))
    claims = [pending.claim("a", prefix + array("Q", [1000 + i, 2000 + i])) for i in range(10)]
    assert pending.fresh_units("a") == 100 + 10 * 2
    assert claims[0].fresh_units == 102
    for claim in claims:
        pending.release(claim)
    assert pending.fresh_units("a") == 0
    pending.check()


def test_a_prompt_that_is_reported_in_full_claims_nothing():
    pending = PendingClaims()
    assert not pending.claim("a", array("Q", [1, 2, 3]), 2, 2).live
    assert not pending.claim("a", array("Q"), 0, 1).live
    assert pending.match("a", array("Q", [1]), 1) == 0
    pending.check()


def test_an_answered_prompt_is_believed_until_its_report_or_the_grace_is_over():
    clock = Clock()
    index = PrefixIndex()
    pending = PendingClaims(60.0, clock, grace_s=2.0)
    index.add_listener(pending)
    index.add_replica("a")
    early, late = array("Q", [1, 2, 3]), array("Q", [7, 8])
    for keys in (early, late):
        pending.settle(pending.claim("a", keys))
    index.store("a", Tier.HBM, early, [ROOT_PARENT, 1, 2])
    assert (pending.match("a", early), pending.match("a", late)) == (0, 2)
    clock.now += 1.9
    pending.expire()
    assert pending.match("a", late) == 2
    pending.check()
    clock.now += 0.2
    pending.expire()
    assert pending.match("a", late) == 0
    pending.check()
    pending.settle(pending.claim("a", early[:1]))
    pending.clear("a")
    clock.now += 10
    pending.expire()
    pending.check()
    assert len(pending) == 0


def test_learned_claims_are_crowded_out_oldest_first_and_heads_outlive_tails():
    clock = Clock()
    learned = LearnedClaims(ttl_s=100, clock=clock)
    old, new = array("Q", range(1, 11)), array("Q", range(101, 111))
    learned.record("a", old, 16)
    learned.record("a", new, 16)
    assert learned.match("a", new) == 10
    assert learned.match("a", old) == 6
    assert learned.match("a", old, 4) == 4
    assert learned.match("b", old) == 0
    assert learned.held_units("a") == 16
    learned.check()
    learned.record("a", array("Q", range(1000, 1040)), 16)
    assert learned.match("a", array("Q", range(1000, 1040))) == 16, "a prompt longer than the cache keeps its head"
    learned.clear("a")
    assert learned.match("a", new) == 0


def test_learned_claims_expire_unless_used_again():
    clock = Clock()
    learned = LearnedClaims(ttl_s=100, clock=clock)
    keys = array("Q", range(1, 11))
    learned.record("a", keys, 100)
    clock.now += 60
    learned.record("a", keys[:4], 100)
    clock.now += 60
    assert learned.match("a", keys) == 4
    learned.record("a", array("Q", [77]), 100)
    assert learned.held_units("a") == 5
    learned.check()
    clock.now += 100
    assert learned.match("a", keys) == 0
