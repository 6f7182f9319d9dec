"""The catalogue against a naive twin, and case by case."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from agent_support import MODEL, SEED, chain_of, tokens_of

from kvstore.identity import Namespace, pack_tokens, token_keys, unpack_keys
from kvstore.messages import ROOT_PARENT, Cleared, Removed, Stored, Tier, digest_of
from replica_agent.catalogue import TIERS, Catalogue
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored, EngineHash

ALL = 1_000_000


def catalogue(**more: Any) -> Catalogue:
    return Catalogue(MODEL, SEED, **more)


def store(hashes: list[EngineHash], blocks: list[int], parent: EngineHash | None = None, **more: Any) -> BlockStored:
    size = more.pop("size", 16)
    tokens = [token for block in blocks for token in tokens_of(block, size)]
    fields = {"block_size": size, "tier": Tier.HBM} | more
    return BlockStored(hashes=hashes, parent=parent, tokens=pack_tokens(tokens), **fields)


def remove(*hashes: EngineHash, **more: Any) -> BlockRemoved:
    return BlockRemoved(hashes=list(hashes), **({"tier": Tier.HBM} | more))


def keys(subject: Catalogue, tier: Tier = Tier.HBM) -> set[int]:
    subject.check()
    return set(subject.held(tier)[0])


def test_route_keys_are_those_of_the_prompt() -> None:
    subject = catalogue()
    subject.apply([store([1, 2], [1, 2]), store([3], [3], parent=2)])
    expected = chain_of([1, 2, 3])
    assert keys(subject) == set(expected)
    assert dict(zip(*subject.held(Tier.HBM), strict=True)) == dict(
        zip(expected, [ROOT_PARENT, *expected[:2]], strict=True)
    )


@pytest.mark.parametrize("size", [32, 64, 128])
def test_larger_blocks_are_named_by_their_last_unit(size: int) -> None:
    subject = catalogue()
    subject.apply([store([1, 2], [1, 2], size=size)])
    assert keys(subject) == set(chain_of([1, 2], size=size))
    assert subject.block_size == size


def test_blocks_that_are_no_multiple_of_a_unit_have_no_name() -> None:
    subject = catalogue()
    subject.apply([store([1, 2], [1, 2], size=24)])
    assert keys(subject) == set()
    assert (subject.counts.hashes, subject.counts.unnamed, subject.block_size) == (2, 2, 24)


def test_namespaces_keep_apart() -> None:
    tokens = tokens_of(1)
    cases: dict[EngineHash, tuple[dict[str, Any], Namespace]] = {
        1: ({}, Namespace(MODEL)),
        2: ({"extra": [["salt"]]}, Namespace(MODEL, "", "salt")),
        3: ({"lora": "a", "extra": [["a"]]}, Namespace(MODEL, "a")),
        4: ({"lora": "a", "extra": [["a", "salt"]]}, Namespace(MODEL, "a", "salt")),
        5: ({"lora": "a"}, Namespace(MODEL, "a")),
        6: ({"salt": "salt"}, Namespace(MODEL, "", "salt")),
    }
    for engine_hash, (more, namespace) in cases.items():
        subject = catalogue()
        subject.apply([store([engine_hash], [1], **more)])
        assert keys(subject) == set(token_keys(namespace.root(SEED), tokens)), more


def test_a_salt_is_that_of_the_first_block_only() -> None:
    subject = catalogue()
    subject.apply([store([1, 2], [1, 2], extra=[["salt"], []])])
    root = Namespace(MODEL, "", "salt").root(SEED)
    assert keys(subject) == set(token_keys(root, tokens_of(1) + tokens_of(2)))


@pytest.mark.parametrize(
    "more",
    [{"extra": [["image", 3]]}, {"extra": [[["mm", 3]]]}, {"extra": [[7]]}, {"lora": ""}],
)
def test_what_is_not_understood_is_held_but_never_named(more: dict[str, Any]) -> None:
    subject = catalogue()
    subject.apply([store([1], [1], **more), store([2], [2], parent=1)])
    assert keys(subject) == set()
    assert (subject.counts.hashes, subject.counts.unnamed, subject.counts.orphans) == (2, 2, 0)
    subject.apply([remove(1, 2)])
    assert (subject.counts.hashes, subject.counts.unnamed) == (0, 0)


def test_an_image_in_the_middle_cuts_the_chain_there() -> None:
    subject = catalogue()
    subject.apply([store([1, 2, 3], [1, 2, 3], extra=[[], ["image"], []])])
    assert keys(subject) == set(chain_of([1]))


def test_an_orphan_counts_when_its_root_comes() -> None:
    subject = catalogue()
    subject.apply([store([4], [4], parent=3), store([3], [3], parent=2)])
    assert (keys(subject), subject.counts.orphans) == (set(), 2)
    subject.apply([store([1, 2], [1, 2])])
    assert (keys(subject), subject.counts.orphans) == (set(chain_of([1, 2, 3, 4])), 0)


def test_an_orphan_that_was_removed_does_not_come_back() -> None:
    subject = catalogue()
    subject.apply([store([3], [3], parent=2), remove(3), store([1, 2], [1, 2])])
    assert keys(subject) == set(chain_of([1, 2]))


def test_the_oldest_orphans_are_forgotten() -> None:
    subject = catalogue(max_orphans=2)
    subject.apply([store([10 + block], [block], parent=9) for block in range(5)])
    assert (keys(subject), subject.counts.orphans, subject.counts.forgotten) == (set(), 2, 3)
    subject.apply([store([9], [9])])
    assert keys(subject) == {chain_of([9])[0], chain_of([9, 3])[1], chain_of([9, 4])[1]}


def test_copies_are_counted_and_never_below_zero() -> None:
    subject = catalogue()
    subject.apply([store([1], [1]), store([1], [1]), remove(1)])
    assert keys(subject) == set(chain_of([1]))
    subject.apply([remove(1), remove(1)])
    assert keys(subject) == set()
    subject.apply([store([1], [1])])
    assert keys(subject) == set(chain_of([1]))


def test_a_run_that_is_told_again_is_no_second_copy() -> None:
    """vLLM with `kv_cache_report_mode` full: what a request found cached, in one event from its first block on."""
    subject = catalogue()
    subject.apply([store([1, 2, 3], [1, 2, 3])])
    subject.apply([store([1, 2], [1, 2])])
    subject.apply([store([1, 2, 3], [1, 2, 3]), store([4], [4], parent=3)])
    assert (keys(subject), subject.counts.told_again) == (set(chain_of([1, 2, 3, 4])), 5)
    subject.apply([remove(4), remove(3), remove(2), remove(1)])
    assert (keys(subject), subject.counts.hashes) == (set(), 0)
    subject.apply([store([1, 2], [1, 2])])
    assert keys(subject) == set(chain_of([1, 2])), "it is computed again, and counts"
    subject.apply([store([1, 2, 3], [1, 2, 3]), remove(1)])
    assert keys(subject) == set(chain_of([1, 2, 3])[1:]), "who came late learns of the third"


@pytest.mark.parametrize(
    ("again", "why"),
    [
        ([store([2, 3], [2, 3], parent=1)], "not from the first block on"),
        ([store([5, 6], [5, 6]), store([5, 6], [5, 6])], "two requests computed it in one step"),
    ],
)
def test_a_run_that_was_computed_twice_is(again: list[BlockStored], why: str) -> None:
    subject = catalogue()
    subject.apply([store([1, 2, 3], [1, 2, 3])])
    subject.apply(again)
    twice = again[0].hashes
    held = keys(subject)
    subject.apply([remove(*twice)])
    assert keys(subject) == held, why
    assert subject.counts.told_again == 0


def test_a_first_block_that_is_told_again_with_its_child_is_no_second_copy() -> None:
    subject = catalogue()
    subject.apply([store([1], [1])])
    subject.apply([store([1], [1]), store([5], [5], group=1), store([2], [2], parent=1)])
    assert subject.counts.told_again == 1
    subject.apply([remove(1)])
    assert subject.held(Tier.HBM)[0] == chain_of([1, 2])[1:]


def test_more_copies_than_there_is_room_for_are_taken_off() -> None:
    """A first block told again alone cannot be told from a second copy, until there are too many copies."""
    subject = catalogue()
    subject.capacity_blocks = 5
    subject.apply([store([1, 2], [1, 2])])
    subject.apply([store([2], [2], parent=1)])
    for _ in range(2):
        subject.apply([store([1], [1])])
    subject.apply([remove(1)])
    assert keys(subject) == set(chain_of([1, 2])), "it may be held yet"
    subject.apply([store([3], [3], parent=2)])
    assert (keys(subject), subject.counts.surplus) == (set(chain_of([1, 2, 3])), 0)
    subject.apply([store([4], [4], parent=3)])
    assert (keys(subject), subject.counts.surplus) == (set(chain_of([1, 2, 3, 4])[1:]), 2)
    subject.apply([remove(2)])
    assert keys(subject) == set(chain_of([1, 2, 3, 4])[1:]), "a second copy of which there was no doubt"


def test_two_hashes_of_one_prefix_are_one_key() -> None:
    subject = catalogue()
    subject.apply([store([1], [1]), store([b"one"], [1])])
    subject.apply([remove(1)])
    assert keys(subject) == set(chain_of([1]))
    subject.apply([remove(b"one")])
    assert keys(subject) == set()


def test_tiers_keep_apart() -> None:
    subject = catalogue()
    where_only = BlockStored(hashes=[1], parent=None, tokens=b"", block_size=16, tier=Tier.DRAM)
    subject.apply([where_only])
    assert keys(subject, Tier.DRAM) == set()
    subject.apply([store([1], [1])])
    assert keys(subject) == keys(subject, Tier.DRAM) == set(chain_of([1]))
    assert subject.blocks == 2
    subject.apply([remove(1)])
    assert (keys(subject), keys(subject, Tier.DRAM)) == (set(), set(chain_of([1])))
    subject.apply([store([1], [1]), AllCleared(tier=Tier.DRAM)])
    assert (keys(subject), keys(subject, Tier.DRAM)) == (set(chain_of([1])), set())
    subject.apply([where_only, AllCleared()])
    assert (keys(subject), keys(subject, Tier.DRAM), subject.counts.hashes) == (set(), set(), 0)


def test_only_the_first_full_attention_group_counts() -> None:
    subject = catalogue()
    subject.apply([store([1], [1], group=2, full=True), store([2], [2], parent=1, group=0), remove(1, group=0)])
    assert keys(subject) == set(chain_of([1]))
    subject.apply([store([1], [1], group=3, full=True), remove(1, group=2)])
    assert keys(subject) == set()


def test_changes_are_transitions_only() -> None:
    subject = catalogue()
    subject.apply([store([1, 2], [1, 2])])
    (change,) = subject.take_changes(ALL)
    assert isinstance(change, Stored)
    assert list(unpack_keys(change.keys)) == chain_of([1, 2])
    assert list(unpack_keys(change.parents)) == [ROOT_PARENT, chain_of([1])[0]]
    subject.apply([store([1], [1]), remove(1), store([3], [3]), remove(3)])
    assert not subject.has_changes
    assert subject.take_changes(ALL) == []


def test_what_was_gone_in_between_is_told_to_be_removed_and_stored() -> None:
    subject = catalogue()
    subject.apply([store([1, 2, 3], [1, 2, 3])])
    subject.take_changes(ALL)
    subject.apply([remove(3), remove(2), store([2, 3], [2, 3], parent=1), remove(3)])
    gone, come = subject.take_changes(ALL)
    assert isinstance(gone, Removed) and isinstance(come, Stored)
    assert set(unpack_keys(gone.keys)) == set(chain_of([1, 2, 3])[1:])
    assert list(unpack_keys(come.keys)) == chain_of([1, 2])[1:]
    assert list(unpack_keys(come.parents)) == chain_of([1])
    assert not subject.has_changes
    # In pieces too, and one tier leaves room for the other.
    subject.apply([remove(2), store([2], [2], parent=1), remove(1), store([1], [1]), store([5], [5], tier=Tier.DRAM)])
    taken = [subject.take_changes(1) for _ in range(3)]
    assert [type(change) for changes in taken for change in changes] == [Removed, Stored, Removed, Stored, Stored]
    assert not subject.has_changes


def test_changes_can_be_taken_in_pieces() -> None:
    subject = catalogue()
    subject.apply([store([1, 2, 3], [1, 2, 3])])
    taken = [subject.take_changes(2), subject.take_changes(2)]
    assert [len(unpack_keys(change.keys)) for changes in taken for change in changes] == [2, 1]
    assert not subject.has_changes


def test_stress_against_the_twin() -> None:
    """A random tree of blocks is stored, stored again, removed out of order; deltas rebuild what is held throughout."""
    for seed in range(40):
        rng = random.Random(seed)
        subject = catalogue(max_orphans=10_000)
        # Hash h has parent h // 3 (0: the root), so chains of any shape come about.
        named: dict[EngineHash, int] = {}
        copies: Counter[tuple[EngineHash, Tier]] = Counter()
        mirror: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        left: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        identified: set[EngineHash] = set()
        pooled: set[EngineHash] = set()

        def forget_unheld(engine_hash: EngineHash, copies: Any = copies, pooled: Any = pooled) -> None:
            if not any(copies[engine_hash, each] for each in TIERS) and engine_hash not in pooled:
                identified.discard(engine_hash)  # noqa: B023
                named.pop(engine_hash, None)  # noqa: B023

        for _ in range(200):
            engine_hash = rng.randint(1, 60)
            tier = rng.choice(TIERS)
            action = rng.random()
            if action < 0.2:
                if engine_hash in pooled:
                    pooled.remove(engine_hash)
                    subject.pool_dropped(content_key(engine_hash))
                    forget_unheld(engine_hash)
                else:
                    pooled.add(engine_hash)
                    subject.pool_held(content_key(engine_hash))
            elif action < 0.6:
                subject.apply([store([engine_hash], [engine_hash], parent=engine_hash // 3 or None, tier=tier)])
                copies[engine_hash, tier] += 1
                identified.add(engine_hash)
            elif action < 0.97:
                subject.apply([remove(engine_hash, tier=tier)])
                copies[engine_hash, tier] = max(0, copies[engine_hash, tier] - 1)
                forget_unheld(engine_hash)
            else:
                subject.apply([AllCleared()])
                copies.clear()
                identified.clear()
                named.clear()
            _name_what_can_be(identified, named)
            expected = {each: {named[h] for h in named if copies[h, each]} for each in TIERS}
            expected[Tier.DRAM] |= {named[h] for h in named if h in pooled}
            subject.check()
            assert {each: set(subject.held(each)[0]) for each in TIERS} == expected
            assert subject.digest == sum(digest_of(expected[each], each) for each in TIERS) & (2**64 - 1)
            for each in TIERS:
                left[each] |= mirror[each] - expected[each]
            if rng.random() < 0.3:
                for change in subject.take_changes(rng.randint(1, 5)):
                    if isinstance(change, Cleared):
                        mirror[change.tier].clear()
                        left[change.tier].clear()
                        continue
                    changed = set(unpack_keys(change.keys))
                    if isinstance(change, Stored):
                        assert not changed & mirror[change.tier]
                        mirror[change.tier] |= changed
                    else:
                        assert changed <= mirror[change.tier]
                        mirror[change.tier] -= changed
                        left[change.tier] -= changed
                if not subject.has_changes:
                    assert mirror == expected
                    assert not any(left.values()), "what was gone, if only for a while, has been told"


def content_key(engine_hash: int) -> bytes:
    """The ContentKey that an engine's events call so."""
    return bytes(24) + engine_hash.to_bytes(8, "big")


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("pool_first", [False, True])
def test_what_the_pool_holds_is_in_dram_once_the_engine_has_named_it(as_bytes: bool, pool_first: bool) -> None:
    subject = catalogue()
    names = [content_key(number) for number in (1, 2)]
    hashes: list[EngineHash] = [*names] if as_bytes else [1, 2]
    if pool_first:
        for name in names:
            subject.pool_held(name)
        assert keys(subject, Tier.DRAM) == set()
    subject.apply([store(hashes, [1, 2])])
    if not pool_first:
        for name in names:
            subject.pool_held(name)
            subject.pool_held(name)
    both = set(chain_of([1, 2]))
    assert (keys(subject), keys(subject, Tier.DRAM)) == (both, both)
    # The engine evicts them; its own offloading removes what it never stored.
    subject.apply([remove(*hashes), remove(*hashes, tier=Tier.DRAM)])
    assert (keys(subject), keys(subject, Tier.DRAM)) == (set(), both)
    subject.pool_dropped(names[1])
    assert keys(subject, Tier.DRAM) == set(chain_of([1]))
    subject.pool_dropped(names[1])
    subject.pool_dropped(content_key(99))
    assert subject.counts.hashes == 1


@pytest.mark.parametrize("how", ["reset", "cleared"])
def test_what_the_pool_holds_outlasts_a_reset(how: str) -> None:
    subject = catalogue()
    subject.apply([store([1], [1])])
    subject.pool_held(content_key(1))
    if how == "reset":
        subject.reset(MODEL)
    else:
        subject.apply([AllCleared()])
    assert keys(subject, Tier.DRAM) == set()
    subject.apply([store([1], [1])])
    assert keys(subject, Tier.DRAM) == set(chain_of([1]))
    subject.pool_dropped(content_key(1))
    assert keys(subject, Tier.DRAM) == set()


def _name_what_can_be(identified: set[EngineHash], named: dict[EngineHash, int]) -> None:
    """The twin's rule: a block gets its name when its parent is held and named, or is the root; it then keeps it."""
    found = True
    while found:
        found = False
        for engine_hash in identified - named.keys():
            assert isinstance(engine_hash, int)
            path = [engine_hash]
            while path[0] // 3:
                path.insert(0, path[0] // 3)
            if len(path) == 1 or path[-2] in named:
                named[engine_hash] = chain_of(path)[-1]
                found = True
