"""The ledger against a recount from every catalogue."""

from __future__ import annotations

import random
from array import array
from itertools import combinations

import numpy as np
import pytest
from placement_fleet import Fleet, Request, prompt

from gateway.duplication.demand import Load
from gateway.duplication.ledger import Ledger
from gateway.duplication.report import Reporter, render_text
from gateway.placement.index import PrefixIndex
from kvstore.identity import Namespace, token_keys
from kvstore.messages import ROOT_PARENT, Tier

KINDS = {"m-16": ("m", 16, 1000), "m-64": ("m", 64, 4000), "n-16": ("n", 16, 77)}
"""Model, block tokens and block bytes of the replicas, by the first part of their ids."""


class Catalogues:
    """What every replica holds, kept plainly: (tier, key) -> parent."""

    def __init__(self) -> None:
        self.held: dict[str, dict[tuple[Tier, int], int]] = {}

    def _groups(self):
        for kind, (model, tokens, size) in KINDS.items():
            above = {
                key: parent
                for replica, held in self.held.items()
                if replica.startswith(kind)
                for (_, key), parent in held.items()
            }
            for tier in Tier:
                blocks: dict[int, set[str]] = {}
                for replica, held in self.held.items():
                    if replica.startswith(kind):
                        for held_tier, key in held:
                            if held_tier is tier:
                                blocks.setdefault(key, set()).add(replica)
                yield model, tokens, size, tier, blocks, above

    def totals(self):
        found: dict[tuple[str, Tier], tuple[int, int]] = {}
        for model, _, size, tier, blocks, _ in self._groups():
            held, distinct = found.get((model, tier), (0, 0))
            copies = sum(len(holders) for holders in blocks.values())
            found[model, tier] = (held + copies * size, distinct + len(blocks) * size)
        return {place: figures for place, figures in found.items() if figures != (0, 0)}

    def excess(self):
        return sum((len(h) - 1) * size for _, _, size, _, blocks, _ in self._groups() for h in blocks.values())

    def pairs(self):
        found: dict[tuple[Tier, str, str], int] = {}
        for _, _, size, tier, blocks, _ in self._groups():
            for holders in blocks.values():
                for pair in combinations(sorted(holders), 2):
                    found[tier, *pair] = found.get((tier, *pair), 0) + size
        return found

    def prefixes(self):
        """(key, model, tier, depth tokens, tokens, holders, excess) of every maximal segment, from the definition."""
        found = set()
        for model, tokens, size, tier, blocks, above in self._groups():
            shared = {key: frozenset(h) for key, h in blocks.items() if len(h) > 1}
            parent = {key: self.held[min(h)][tier, key] for key, h in shared.items()}
            goes_on = {
                key: [child for child in shared if parent[child] == key and shared[child] == holders]
                for key, holders in shared.items()
            }
            for key, holders in shared.items():
                if len(goes_on[key]) == 1:
                    continue
                first, length = key, 1
                while shared.get(parent[first]) == holders and len(goes_on[parent[first]]) == 1:
                    first, length = parent[first], length + 1
                depth, at = 0, key
                while at in above:
                    depth, at = depth + 1, above[at]
                excess = (len(holders) - 1) * length * size
                found.add((key, model, tier, depth * tokens, length * tokens, tuple(sorted(holders)), excess))
        return found


def _documents(rng: random.Random, model: str) -> list[array]:
    prompts = [[rng.randrange(500) for _ in range(16 * 24)]]
    for _ in range(9):
        base = rng.choice(prompts)
        cut = 16 * rng.randrange(0, len(base) // 16 + 1)
        prompts.append(base[:cut] + [rng.randrange(500) for _ in range(16 * rng.randrange(1, 20))])
    return [token_keys(Namespace(model=model).root(0), prompt) for prompt in prompts]


@pytest.mark.parametrize("seed", range(4))
def test_duplication_equals_brute_force(seed):
    """Thousands of random changes: chains stored from the root, tails evicted, clears, replicas that come and go."""
    rng = random.Random(seed)
    index, catalogues = PrefixIndex(), Catalogues()
    ledger = Ledger(index)
    documents = {model: _documents(rng, model) for model in "mn"}
    names = [f"{kind}-{i}" for kind in KINDS for i in range(4)]
    for step in range(2500):
        replica = rng.choice(names)
        model, tokens, size = KINDS[replica[:4]]
        if replica not in catalogues.held:
            index.add_replica(replica)
            catalogues.held[replica] = {}
            ledger.register(replica, model, size, tokens)
        held = catalogues.held[replica]
        action, tier = rng.random(), rng.choice([Tier.HBM, Tier.HBM, Tier.DRAM])
        units = tokens // 16
        keys = rng.choice(documents[model])[units - 1 :: units]
        if action < 0.55:
            keys = keys[: rng.randrange(len(keys) + 1)]
            parents = [keys[i - 1] if i else ROOT_PARENT for i in range(len(keys))]
            index.store(replica, tier, keys, parents)
            for key, parent in zip(keys, parents, strict=True):
                held.setdefault((tier, key), parent)
        elif action < 0.9:
            gone = keys[rng.randrange(len(keys) + 1) :] if rng.random() < 0.8 else keys[: rng.randrange(len(keys) + 1)]
            index.remove(replica, tier, gone)
            for key in gone:
                held.pop((tier, key), None)
        elif action < 0.95:
            index.clear(replica)
            held.clear()
        else:
            index.remove_replica(replica)
            del catalogues.held[replica]
            if rng.random() < 0.5:
                ledger.forget(replica)
        assert ledger.excess == sum(totals.excess for totals in ledger.totals().values())
        if step % 25 == 0:
            assert ledger.excess == catalogues.excess()
            assert {p: (t.held, t.distinct) for p, t in ledger.totals().items() if t.held} == catalogues.totals()
            assert ledger.pairs() == catalogues.pairs()
        if step % 250 == 0:
            ledger.check()
            prefixes = ledger.prefixes(top=10_000)
            assert {
                (p.key, p.model, p.tier, p.depth_tokens, p.tokens, tuple(p.holders), p.excess_bytes) for p in prefixes
            } == catalogues.prefixes()
            assert sum(p.excess_bytes for p in prefixes) == ledger.excess
            assert [p.excess_bytes for p in prefixes] == sorted((p.excess_bytes for p in prefixes), reverse=True)
    for replica in list(catalogues.held):
        index.remove_replica(replica)
    assert ledger.excess == 0
    assert ledger.pairs() == {}
    assert not any(totals.held for totals in ledger.totals().values())


def test_replicas_are_isolated():
    """Removed or cleared on one replica changes no other's matches, blocks or digest."""
    rng = random.Random(3)
    index = PrefixIndex()
    names = [f"replica-{i}" for i in range(6)]
    documents = _documents(rng, "m")
    for name in names:
        index.add_replica(name)
        for keys in documents:
            index.store(name, Tier.HBM, keys, [ROOT_PARENT, *keys[:-1]])
    units = dict.fromkeys(names, 1)
    for _ in range(300):
        victim, keys = rng.choice(names), rng.choice(documents)
        others = {n: (index.digest(n), index.held_blocks(n), index.match(keys, {n: 1})) for n in names if n != victim}
        if rng.random() < 0.1:
            index.clear(victim)
            assert index.match(keys, units).get(victim) is None
        elif rng.random() < 0.5:
            index.remove(victim, Tier.HBM, keys[rng.randrange(len(keys)) :])
        else:
            index.store(victim, Tier.HBM, keys, [ROOT_PARENT, *keys[:-1]])
        assert others == {
            n: (index.digest(n), index.held_blocks(n), index.match(keys, {n: 1})) for n in names if n != victim
        }
    index.check()


def test_many_holders_are_kept():
    """1,000 holders of one block are all kept, counted and matched; a removed one frees its share and no other's."""
    index = PrefixIndex()
    ledger = Ledger(index)
    names = [f"replica-{i}" for i in range(1000)]
    keys = token_keys(Namespace(model="m").root(0), range(16))
    for name in names:
        index.add_replica(name)
        ledger.register(name, "m", 10, 16)
        index.store(name, Tier.HBM, keys, [ROOT_PARENT, *keys[:-1]])
    assert sorted(index.holders(keys[-1])) == sorted(names)
    assert index.match(keys, dict.fromkeys(names, 1)) == dict.fromkeys(names, 1)
    assert ledger.excess == 999 * 10
    (prefix,) = ledger.prefixes()
    assert (prefix.copies, prefix.depth_tokens) == (1000, 16)
    for name in names[:999]:
        index.remove_replica(name)
    assert index.holders(keys[0]) == ["replica-999"]
    assert ledger.excess == 0
    assert not ledger.pairs()
    index.check()
    ledger.check()


def test_index_memory_stays_under_its_bound(request):
    """Unique prompts of 8k tokens, a million with --slow, on replicas that never report a removal.

    What the index drops is counted, what it keeps is true, the digest is that of everything reported, and a prefix that
    placements use outlives what nobody asks for again. Removing a replica frees its share for the others.
    """
    prompts, blocks = 1_000_000 if request.config.getoption("--slow") else 4_000, 512
    limit = 64 << 20 if prompts == 1_000_000 else 32 << 20
    index = PrefixIndex(limit)
    picks = np.random.default_rng(7)
    names = [f"replica-{i}" for i in range(8)]
    for name in names:
        index.add_replica(name)
    hot = picks.integers(1, 1 << 63, blocks, dtype=np.int64).astype(np.uint64)
    for name in names:
        _tell(index, name, hot)
    digests = dict.fromkeys(names, int(np.add.reduce(hot)))
    most = 0
    for at in range(prompts):
        name = names[at % 8]
        keys = picks.integers(1, 1 << 63, blocks, dtype=np.int64).astype(np.uint64)
        _tell(index, name, keys)
        digests[name] = (digests[name] + int(np.add.reduce(keys))) % 2**64
        if at % 16 == 0:
            assert index.match(hot, dict.fromkeys(names, 1), use=True) == dict.fromkeys(names, blocks)
            most = max(most, index.nbytes)
    assert limit / 2 < most <= limit
    assert {name: index.digest(name) for name in names} == digests
    assert index.evicted_blocks == (prompts + 1) * blocks - len(index) > 0
    assert sum(index.evicted_of(name) + index.held_blocks(name) for name in names) == (prompts + 8) * blocks
    index.check()
    kept = len(index)
    index.remove_replica("replica-0")
    assert kept * 0.8 < len(index) < kept * 0.95
    evicted, room = index.evicted_blocks, kept - len(index)
    _tell(index, "replica-1", picks.integers(1, 1 << 63, room, dtype=np.int64).astype(np.uint64))
    assert index.evicted_blocks == evicted, "what the others bring has room now"
    index.check()


def _tell(index, replica, keys):
    index.store(replica, Tier.HBM, keys, np.concatenate((np.array([ROOT_PARENT], np.uint64), keys[:-1])))


def test_useful_and_wasted_add_up():
    """Useful + wasted = excess, whatever is held. What was spilled by load is useful, what a restart scattered wasted.

    A document that every request is about, on eight replicas that have sixty requests at a time; another, asked for
    once, of which three replicas still have copies from before a restart.
    """
    fleet = Fleet(8, decode_s=0.02)
    ledger, load = Ledger(fleet.index), Load()
    for replica in fleet.engines:
        ledger.register(replica, "m", 1000, 16)
    hot, scattered = prompt(1, 1600).keys, prompt(2, 800).keys
    for at in range(600):
        fleet.submit(Request(at / 6, prompt(100 + at, 1664, shared=hot), 500))
        load.observe(sum(view.running for view in fleet.views()))
    fleet.submit(Request(100.0, prompt(50, 864, shared=scattered), 10))
    fleet.advance(100.5)
    for replica in ("replica-1", "replica-4", "replica-6"):
        fleet.index.store(replica, Tier.HBM, scattered, [ROOT_PARENT, *scattered[:-1]])
    report = Reporter(ledger, traffic=fleet.placer.traffic, load=load).report(100)
    assert report.demand == "requests"
    assert report.useful_bytes + report.wasted_bytes == report.excess_bytes == ledger.excess
    for prefix in report.prefixes:
        assert prefix.useful_bytes + prefix.wasted_bytes == prefix.excess_bytes
    found = {prefix.tokens: prefix for prefix in report.prefixes}
    spilled, left = found[1600], found[800]
    assert 1 < spilled.copies <= spilled.needed
    assert (spilled.useful_bytes, spilled.wasted_bytes) == (spilled.excess_bytes, 0)
    assert left.copies in (3, 4)
    assert (left.needed, left.useful_bytes, left.wasted_bytes) == (1, 0, left.excess_bytes)
    assert "wasted" in render_text(report)
