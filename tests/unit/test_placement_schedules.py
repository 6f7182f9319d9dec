"""10,000 random schedules, 2,000 of them at the bound: `PrefixIndex` against dicts. With --slow ten times as many."""

from __future__ import annotations

import random

import numpy as np
import pytest
from index_picture import Picture
from naive_index import NaiveIndex

from gateway.placement import blocks, holdings, index, walk
from gateway.placement.index import PrefixIndex
from kvstore.messages import ROOT_PARENT, Tier

TIERS = (Tier.HBM, Tier.HBM, Tier.DRAM, Tier.NVME)
SCHEDULES = 1_000


class Schedule:
    """One random sequence of changes, applied to both; `run` compares after each and `compare` at the end."""

    def __init__(self, seed: int, limit_bytes: int, *, longest: int, sizes: tuple[int, ...], bits: int) -> None:
        self.rng = rng = random.Random(seed)
        self.index, self.naive, self.picture = PrefixIndex(limit_bytes), NaiveIndex(), Picture()
        self.index.add_listener(self.picture)
        for i in range(rng.choice([0] * 12 + [62, 62, 126])):  # so that holder sets have more than one word
            self._add(f"idle-{i}")
        self.units = {f"replica-{i}": rng.choice(sizes) for i in range(rng.randrange(1, 6))}
        self.chains: list[list[int]] = []
        for _ in range(rng.randrange(1, 5)):
            base = rng.choice(self.chains) if self.chains else []
            tail = [rng.getrandbits(bits) or 1 for _ in range(rng.randrange(1, longest))]
            self.chains.append([*base[: rng.randrange(len(base) + 1)], *tail][:longest])
        self.reported: dict[tuple[str, Tier], set[int]] = {}
        self.evicted = 0

    def _add(self, replica: str) -> None:
        self.index.add_replica(replica)
        self.naive.add_replica(replica)

    def run(self, steps: int, evicts: bool) -> None:
        for _ in range(steps):
            replica = self.rng.choice(list(self.units))
            self._add(replica)
            self._change(replica, self.rng.choice(TIERS), self.rng.random(), evicts)
            if replica in self.naive.replicas():
                assert self.index.digest(replica) == self.naive.digest(replica)
            prompt = self.rng.choice(self.chains)
            assert self.index.match(prompt, self.units, use=True) == self.naive.match(prompt, self.units)

    def _change(self, replica: str, tier: Tier, action: float, evicts: bool) -> None:
        rng, units = self.rng, self.units[replica]
        keys = rng.choice(self.chains)[units - 1 :: units]
        begin = rng.randrange(len(keys) + 1) if rng.random() < 0.5 else 0
        end = rng.randrange(begin, len(keys) + 1)
        parents = [keys[i - 1] if i else ROOT_PARENT for i in range(begin, end)]
        some = keys[begin:end]
        reported = self.reported.setdefault((replica, tier), set())
        if action < 0.6:
            if evicts:  # an agent says of no block twice that it is held
                fresh = {key: parent for key, parent in zip(some, parents, strict=True) if key not in reported}
                some, parents = list(fresh), list(fresh.values())
                reported |= set(some)
            elif rng.random() < 0.2:
                some, parents = some + some[:3], parents + [7, 7, 7][: len(some[:3])]
            self.picture.lost.clear()
            self.index.store(replica, tier, some, parents)
            for key in self.picture.lost:
                self.naive.evict(key)
            self.evicted += len(self.picture.lost)
            self.naive.store(replica, tier, some, parents)
        elif action < 0.88:
            some = list(set(some) & reported) if evicts else some * rng.choice([1, 1, 2])
            rng.shuffle(some)
            reported -= set(some)
            self.index.remove(replica, tier, some)
            self.naive.remove(replica, tier, some)
        else:
            for held in Tier:
                self.reported[replica, held] = set()
            if action < 0.94:
                self.index.clear(replica)
                self.naive.clear(replica)
            else:
                self.index.remove_replica(replica)
                self.naive.remove_replica(replica)

    def compare(self) -> None:
        index, naive, rng = self.index, self.naive, self.rng
        index.check()
        assert index.evicted_blocks == self.evicted
        assert index.replicas() == naive.replicas()
        for replica in naive.replicas():
            assert index.bit(replica) == naive.bit(replica)
            assert index.digest(replica) == naive.digest(replica)
            for tier in Tier:
                assert set(index.keys_of(replica, tier)) == set(naive.keys_of(replica, tier))
                assert index.held_blocks(replica, tier) == naive.held_blocks(replica, tier)
        keys = {key for chain in self.chains for key in chain}
        masks = {(tier, key): mask for key in keys for tier in Tier if (mask := naive.holder_mask(key, tier))}
        assert {(tier, key): index.holder_mask(key, tier) for tier, key in masks} == masks
        assert {place: mask for place, mask in self.picture.masks.items() if mask} == masks
        assert len(index) == len({key for _, key in masks})
        for _, key in masks:
            assert index.parent(key) == naive.parent(key)
            for replica in self.units:
                if replica in naive.replicas():
                    assert index.parent(key, replica) == naive.parent(key, replica)
        for prompt in self.chains:
            pools = [replica for replica in self.units if rng.random() < 0.7]
            assert index.match(prompt, self.units) == naive.match(prompt, self.units)
            assert index.runs(np.array(prompt, np.uint64), self.units, pools) == naive.runs(prompt, self.units, pools)
        self._compare_shared()

    def _compare_shared(self) -> None:
        """What two or more of all replicas hold, with the parent of the first of them."""
        everybody = sum(self.naive.bit(replica) for replica in self.naive.replicas())
        for tier in Tier:
            keys, parents, sets = self.index.shared(tier, everybody)
            held = [sum(int(masks[at]) << 64 * word for word, masks in sets) for at in range(keys.size)]
            told = dict(zip(keys.tolist(), zip(parents.tolist(), held, strict=True), strict=True))
            known = {key for chain in self.chains for key in chain}
            shared = {key: mask for key in known if (mask := self.naive.holder_mask(key, tier)).bit_count() > 1}
            assert told == {
                key: (self.naive.parent(key, self.naive.replicas_of(mask)[0]), mask) for key, mask in shared.items()
            }


def _seeds(chunk: int, slow: bool) -> range:
    count = SCHEDULES * (10 if slow else 1)
    return range(chunk * count, (chunk + 1) * count)


@pytest.mark.parametrize("chunk", range(8))
def test_any_schedule_gives_what_dicts_give(chunk, monkeypatch, request):
    """Stores, removals, tiers, two parents of one key, clears, replicas removed and added again."""
    for seed in _seeds(chunk, request.config.getoption("--slow")):
        rng = random.Random(seed)
        monkeypatch.setattr(holdings, "PIECE_BLOCKS", rng.choice([3, 8_192]))
        monkeypatch.setattr(blocks, "SWEEP_ROWS", rng.choice([5, 262_144]))
        for module in (index, walk):
            monkeypatch.setattr(module, "SHORT", rng.choice([0, 24]))
        monkeypatch.setattr(walk, "FEW", rng.choice([0, 96]))
        # Keys of few bits come more than once in a chain, and after different blocks.
        schedule = Schedule(seed, 16 << 20, longest=40, sizes=(1, 1, 2, 4), bits=rng.choice([6, 64]))
        schedule.run(steps=12, evicts=False)
        assert not schedule.evicted
        schedule.compare()


@pytest.mark.parametrize("chunk", range(8, 10))
def test_at_the_bound_it_is_what_was_reported_less_what_it_said_it_evicted(chunk, monkeypatch, request):
    """The digests are of all that was reported; a block that is evicted is lost by all its holders."""
    monkeypatch.setattr(holdings, "LEAST_BYTES", 0)
    monkeypatch.setattr(holdings, "EVICTED_BLOCKS", 4)
    monkeypatch.setattr(blocks, "LEAST_ROWS", 64)
    evicted = 0
    for seed in _seeds(chunk, request.config.getoption("--slow")):
        for module in (index, walk):
            monkeypatch.setattr(module, "SHORT", random.Random(seed).choice([0, 24]))
        schedule = Schedule(seed, 17 << 10, longest=60, sizes=(1,), bits=64)
        schedule.run(steps=20, evicts=True)
        schedule.compare()
        evicted += schedule.evicted
    assert evicted > SCHEDULES
