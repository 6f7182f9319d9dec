"""Prefill that others had done already: every store counted again, block by block."""

from __future__ import annotations

import random

import pytest
from fetch_support import record

from gateway.duplication.ledger import Kind, Ledger
from gateway.duplication.recomputed import MOST_MODELS, Recompute, Recomputed
from gateway.placement.index import PrefixIndex
from kvstore.messages import ROOT_PARENT, Tier

KINDS = {"m-16": ("m", 16), "m-64": ("m", 64), "n-16": ("n", 16)}


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_a_recount(seed: int) -> None:
    """Stores, evictions, clears and snapshots on replicas of three kinds, also in pools, which are not counted."""
    rng = random.Random(seed)
    live = {f"{kind}-{at}": True for kind in KINDS for at in range(3)}
    recompute = Recompute(lambda replica: live[replica])
    index = PrefixIndex()
    ledger = Ledger(index, recompute.stored)
    held: dict[str, set[int]] = {}
    for name in live:
        model, tokens = KINDS[name[:4]]
        index.add_replica(name)
        ledger.register(name, model, 10, tokens)
        held[name] = set()
    chains = [[rng.getrandbits(63) | 1 for _ in range(30)] for _ in range(4)]
    stored, again = dict.fromkeys("mn", 0), dict.fromkeys("mn", 0)
    for _ in range(1_500):
        name, chain = rng.choice(list(live)), rng.choice(chains)
        model, tokens = KINDS[name[:4]]
        action = rng.random()
        if action < 0.5:
            part = chain[: rng.randrange(31)]
            live[name] = rng.random() < 0.8
            index.store(name, Tier.HBM, part, [ROOT_PARENT, *part][: len(part)])
            fresh = set(part) - held[name]
            others = set().union(*(held[each] for each in live if each != name and each[:4] == name[:4]))
            if live[name]:
                stored[model] += len(fresh) * tokens
                again[model] += len(fresh & others) * tokens
            held[name] |= fresh
        elif action < 0.6:
            index.store(name, Tier.DRAM, chain, [ROOT_PARENT, *chain[:-1]])
        elif action < 0.95:
            gone = chain[rng.randrange(30) :]
            index.remove(name, Tier.HBM, gone)
            held[name] -= set(gone)
        else:
            index.clear(name)
            held[name] = set()
    recompute.check()
    assert recompute.totals() == [
        Recomputed(model=model, stored_tokens=stored[model], recomputed_tokens=again[model]) for model in "mn"
    ]
    assert 0 < again["m"] < stored["m"]


def test_what_was_loaded_was_not_computed() -> None:
    recompute = Recompute(lambda replica: True)
    index = PrefixIndex()
    ledger = Ledger(index, recompute.stored)
    for name in ("a", "b"):
        index.add_replica(name)
        ledger.register(name, "m", 10, 16)
        index.store(name, Tier.HBM, range(1, 11), range(10))
    assert recompute.totals() == [Recomputed(model="m", stored_tokens=320, recomputed_tokens=160)]
    recompute.fetched(record(replica="b", loaded=8, block_tokens=16))
    assert recompute.totals() == [Recomputed(model="m", stored_tokens=192, recomputed_tokens=32)]
    recompute.fetched(record(replica="b", loaded=99, block_tokens=16))
    recompute.fetched(record(replica="unknown", loaded=1, block_tokens=16))
    assert recompute.totals() == [Recomputed(model="m", stored_tokens=0, recomputed_tokens=0)]
    recompute.check()


def test_models_that_nobody_serves_any_more_are_forgotten_before_there_are_too_many() -> None:
    recompute = Recompute(lambda replica: True)
    recompute.stored("steady", Kind("m", 16, 10), 3, 1)
    for number in range(3 * MOST_MODELS):
        recompute.stored("odd", Kind(f"model {number}", 16, 10), 1, 0)
        recompute.check()
        assert len(recompute.totals()) <= MOST_MODELS
    assert recompute.totals()[0] == Recomputed(model="m", stored_tokens=48, recomputed_tokens=16)
    recompute.fetched(record(replica="odd", loaded=1, block_tokens=16))
    recompute.check()
