"""PrefixIndex against a naive twin."""

from __future__ import annotations

import random
from array import array

import pytest
from index_picture import Picture

from gateway.placement.index import PrefixIndex
from kvstore.identity import Namespace, token_keys
from kvstore.messages import ROOT_PARENT, Tier, digest_of


class NaiveIndex:
    """What the index is meant to be, without masks or shared state: one dict of (tier, key) -> parent per replica."""

    def __init__(self) -> None:
        self.held: dict[str, dict[tuple[Tier, int], int]] = {}

    def store(self, replica, tier, keys, parents):
        for key, parent in zip(keys, parents, strict=True):
            self.held[replica].setdefault((tier, key), parent)

    def remove(self, replica, tier, keys):
        for key in keys:
            self.held[replica].pop((tier, key), None)

    def match(self, keys, block_units):
        found = {}
        for replica, units in block_units.items():
            length = 0
            while length + units <= len(keys) and (Tier.HBM, keys[length + units - 1]) in self.held.get(replica, {}):
                length += units
            if length:
                found[replica] = length
        return found

    def runs(self, keys, block_units, pools):
        resident, usable, served = {}, {}, {}
        for replica, units in block_units.items():
            held = self.held.get(replica, {})
            pool = held if replica in pools else {}

            def run(start, tier, where, units=units):
                while start + units <= len(keys) and (tier, keys[start + units - 1]) in where:
                    start += units
                return start

            resident[replica] = run(0, Tier.HBM, held)
            usable[replica] = run(resident[replica], Tier.DRAM, pool)
            served[replica] = run(0, Tier.DRAM, pool)
        return tuple({replica: end for replica, end in ends.items() if end} for ends in (resident, usable, served))

    def holders(self, key, tier):
        return {replica for replica, held in self.held.items() if (tier, key) in held}


def _assert_follows(index, naive, replica, key):
    """A stretch is a part of the chain that ends with `key`, and says where the rest goes on."""
    stretch, before = index.stretch(key, replica)
    keys = stretch.tolist()
    assert keys[-1] == key
    parents = {key: parent for (_, key), parent in naive.held[replica].items()}
    for parent, key in zip([before, *keys], keys, strict=False):
        assert parents.get(key, parent) == parent


def _documents(rng: random.Random, count: int) -> list[array]:
    """Unit keys of prompts that share prefixes of random length."""
    prompts: list[list[int]] = [[rng.randrange(1000) for _ in range(16 * rng.randrange(1, 30))]]
    for _ in range(count - 1):
        base = rng.choice(prompts)
        cut = 16 * rng.randrange(0, len(base) // 16 + 1)
        prompts.append(base[:cut] + [rng.randrange(1000) for _ in range(16 * rng.randrange(1, 20))])
    root = Namespace(model="m").root(0)
    return [token_keys(root, prompt) for prompt in prompts]


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_a_naive_twin_under_random_changes(seed):
    rng = random.Random(seed)
    index, naive, recorder = PrefixIndex(), NaiveIndex(), Picture()
    index.add_listener(recorder)
    documents = _documents(rng, 25)
    units = {f"replica-{i}": rng.choice([1, 1, 2, 4]) for i in range(9)}
    for step in range(1500):
        replica = rng.choice(list(units))
        if replica not in naive.held:
            index.add_replica(replica)
            naive.held[replica] = {}
        action = rng.random()
        tier = rng.choice([Tier.HBM, Tier.DRAM])
        keys = rng.choice(documents)[units[replica] - 1 :: units[replica]]
        begin = rng.randrange(len(keys) + 1) if rng.random() < 0.3 else 0
        end = rng.randrange(begin, len(keys) + 1)
        if action < 0.6:
            parents = [keys[i - 1] if i else ROOT_PARENT for i in range(begin, end)]
            index.store(replica, tier, keys[begin:end], parents)
            naive.store(replica, tier, keys[begin:end], parents)
        elif action < 0.9:
            index.remove(replica, tier, keys[begin:end])
            naive.remove(replica, tier, keys[begin:end])
        elif action < 0.95:
            index.clear(replica)
            naive.held[replica].clear()
        else:
            index.remove_replica(replica)
            del naive.held[replica]
        prompt = rng.choice(documents)
        assert index.match(prompt, units) == naive.match(prompt, units)
        pools = rng.sample(sorted(units), rng.randrange(len(units) + 1))
        assert index.runs(prompt, units, pools) == naive.runs(prompt, units, pools)
        if step % 50 == 0:
            index.check()
            for other in naive.held:
                held = naive.held[other]
                expected = sum(digest_of([k for t, k in held if t is tier], tier) for tier in Tier) % 2**64
                assert index.digest(other) == expected
                assert index.held_blocks(other) == len(held)
                for (held_tier, key), parent in list(held.items())[:20]:
                    assert index.parent(key, other) == parent
                    _assert_follows(index, naive, other, key)
                    assert set(index.holders(key, held_tier)) == naive.holders(key, held_tier)
            live = {place: mask for place, mask in recorder.masks.items() if mask}
            assert live == {(t, k): index.holder_mask(k, t) for held in naive.held.values() for t, k in held}
    for replica in list(naive.held):
        index.remove_replica(replica)
    index.check()
    assert index.replicas() == []
    assert len(index) == 0


def test_a_chain_is_followed_in_stretches_as_long_as_its_rows_are_consecutive(monkeypatch):
    monkeypatch.setattr("gateway.placement.index.STRETCH", 8)
    index = PrefixIndex()
    index.add_replica("a")
    chain = list(range(100, 120))
    index.store("a", Tier.HBM, chain, [ROOT_PARENT, *chain[:-1]])
    index.store("a", Tier.HBM, [7], [ROOT_PARENT])
    index.store("a", Tier.HBM, [200, 201], [110, 200])
    assert [part if isinstance(part, int) else part.tolist() for part in index.stretch(119, "a")] == [
        list(range(111, 120)),
        110,
    ]
    assert index.stretch(201, "a")[0].tolist() == [200, 201]
    assert index.stretch(201, "a")[1] == 110, "in the middle of another"
    assert index.stretch(103, "a")[0].tolist() == [100, 101, 102, 103]
    assert index.stretch(103, "a")[1] == ROOT_PARENT
    assert index.stretch(7, "a")[0].tolist() == [7], "the row before it is of another chain"
    assert index.stretch(5, "a")[0].size == 0
    index.remove("a", Tier.HBM, [106])
    assert index.stretch(108, "a")[0].tolist() == [107, 108]
    assert index.stretch(108, "a")[1] == 106


def test_listeners_are_told_parents_of_what_is_stored_just_now():
    index, told = PrefixIndex(), []

    class Listener(Picture):
        def holders_changed(self, change):
            told.append((change.gained, None if change.parents is None else change.parents.tolist()))

    index.add_listener(Listener())
    index.add_replica("a")
    index.store("a", Tier.HBM, [1, 2], [ROOT_PARENT, 1], snapshot=True)
    index.store("a", Tier.HBM, [1, 2, 3, 3], [ROOT_PARENT, 1, 2, 2])
    index.remove("a", Tier.HBM, [3])
    assert told == [(True, None), (True, [2]), (False, None)]


def test_an_orphan_block_is_no_hit_until_its_chain_is_known():
    index = PrefixIndex()
    index.add_replica("a")
    index.store("a", Tier.HBM, [12, 13], [11, 12])
    assert index.match([11, 12, 13], {"a": 1}) == {}
    index.store("a", Tier.HBM, [11], [ROOT_PARENT])
    assert index.match([11, 12, 13], {"a": 1}) == {"a": 3}


def test_only_hbm_is_a_hit():
    index = PrefixIndex()
    index.add_replica("a")
    index.store("a", Tier.DRAM, [11], [ROOT_PARENT])
    assert index.match([11], {"a": 1}) == {}
    assert index.holders(11, Tier.DRAM) == ["a"]


def test_a_pool_goes_on_where_hbm_ends_and_serves_what_it_holds_itself():
    index = PrefixIndex()
    for replica in ("a", "b", "c"):
        index.add_replica(replica)
    keys = [11, 12, 13, 14, 15]
    index.store("a", Tier.HBM, [11, 12, 15], [ROOT_PARENT, 11, 14])
    index.store("a", Tier.DRAM, [11, 13, 14], [ROOT_PARENT, 12, 13])
    index.store("b", Tier.DRAM, [11, 12, 13], [ROOT_PARENT, 11, 12])
    index.store("c", Tier.HBM, [11], [ROOT_PARENT])
    asked = {"a": 1, "b": 1, "c": 1, "nobody": 1}
    runs = index.runs(keys, asked, ["a", "b", "nobody"])
    assert runs.resident == {"a": 2, "c": 1} == index.match(keys, asked)
    assert runs.usable == {"a": 4, "b": 3, "c": 1}, "HBM behind the pool's part is out of reach"
    assert runs.served == {"a": 1, "b": 3}
    assert index.runs(keys, asked, []) == (runs.resident, runs.resident, {})


def test_two_block_sizes_keep_their_own_parents():
    index = PrefixIndex()
    index.add_replica("small")
    index.add_replica("large")
    index.store("small", Tier.HBM, [1, 2, 3, 4], [ROOT_PARENT, 1, 2, 3])
    index.store("large", Tier.HBM, [2, 4], [ROOT_PARENT, 2])
    assert (index.parent(4, "small"), index.parent(4, "large")) == (3, 2)
    assert index.match([1, 2, 3, 4, 5], {"small": 1, "large": 2}) == {"small": 4, "large": 4}
    index.remove("small", Tier.HBM, [4])
    assert index.parent(4, "large") == 2
    index.check()


def test_an_unknown_replica_is_an_error_and_matches_nothing():
    index = PrefixIndex()
    with pytest.raises(KeyError):
        index.store("nobody", Tier.HBM, [1], [0])
    assert index.match([1], {"nobody": 1}) == {}
    index.remove_replica("nobody")


def test_keys_and_parents_of_different_length_are_refused():
    index = PrefixIndex()
    index.add_replica("a")
    with pytest.raises(ValueError, match="2 keys but 1 parents"):
        index.store("a", Tier.HBM, [1, 2], [0])
