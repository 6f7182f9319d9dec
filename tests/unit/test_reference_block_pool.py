"""The block pool against a naive twin."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from reference_support import fold

from kvstore.identity import ROOT_BLOCK_HASH, engine_block_hash, wire_block_hash
from replica_agent.reference.block_pool import BlockPool, CachedBlock

SIZE = 4


def contents(tokens: list[int]) -> list[CachedBlock]:
    result: list[CachedBlock] = []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = result[-1].hash if result else None
        run = tuple(tokens[start : start + SIZE])
        result.append(CachedBlock(engine_block_hash(parent or ROOT_BLOCK_HASH, run), parent, run))
    return result


def hold(pool: BlockPool, tokens: list[int]) -> list[int]:
    blocks = pool.allocate(len(tokens) // SIZE)
    pool.store(blocks, contents(tokens))
    return blocks


class NaivePool:
    """The same promises by exhaustive search: a list of free blocks in order of reuse, and what each block holds."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.holds: dict[int, bytes] = {}
        self.order = list(range(num_blocks))

    def lookup(self, hashes: list[bytes]) -> int:
        known = set(self.holds.values())
        return next((index for index, each in enumerate(hashes) if each not in known), len(hashes))

    def acquire(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] += 1
        self.order = [block for block in self.order if self.refs[block] == 0]

    def allocate(self, count: int) -> list[int]:
        taken = self.order[:count]
        for block in taken:
            self.holds.pop(block, None)
        self.acquire(taken)
        return taken

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.order.insert(len(self.order) if block in self.holds else 0, block)


def test_content_survives_release_until_its_block_is_reused() -> None:
    pool = BlockPool(4, SIZE)
    blocks = hold(pool, list(range(8)))
    pool.release(blocks)
    assert pool.lookup(each.hash for each in contents(list(range(8)))) == blocks
    pool.allocate(3)
    # The two blocks that never held anything went first, then the tail; the head is left.
    assert pool.lookup(each.hash for each in contents(list(range(8)))) == blocks[:1]
    pool.check()


def test_one_hash_in_two_blocks_is_stored_twice_and_removed_twice() -> None:
    pool = BlockPool(2, SIZE)
    tokens = [1, 2, 3, 4]
    (first,), (second,) = hold(pool, tokens), hold(pool, tokens)
    pool.release([first])
    pool.release([second])
    assert [(copies, refs) for _, copies, refs in pool.cached()] == [(2, 0)]
    pool.allocate(1)
    assert pool.lookup([contents(tokens)[0].hash]) == [second]
    pool.allocate(1)
    kinds = [type(event).__name__ for event in pool.drain()]
    assert kinds == ["BlockStored", "BlockStored", "BlockRemoved", "BlockRemoved"]
    pool.check()


def test_a_run_of_blocks_is_one_event_with_its_parent() -> None:
    pool = BlockPool(4, SIZE)
    named = contents(list(range(12)))
    blocks = pool.allocate(3)
    pool.store(blocks[:1], named[:1], salt="s")
    pool.store(blocks[1:], named[1:], salt="s")
    head, tail = (msgspec.to_builtins(event) for event in pool.drain())
    assert (head["parent_block_hash"], head["extra_keys"]) == (None, [["s"]])
    assert tail["parent_block_hash"] == wire_block_hash(named[0].hash)
    assert tail["extra_keys"] == [None, None]
    assert tail["token_ids"] == list(range(4, 12))


def test_clear_forgets_blocks_in_use_too() -> None:
    pool = BlockPool(4, SIZE)
    blocks = hold(pool, [1, 2, 3, 4])
    pool.clear()
    assert pool.cached() == []
    assert pool.generation == 1
    pool.release(blocks)
    pool.check()
    assert pool.free == 4


def test_releasing_twice_is_noticed() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


@pytest.mark.parametrize("seed", range(8))
def test_stress_against_the_naive_twin(seed: int) -> None:
    rng = random.Random(seed)
    pool, naive = BlockPool(24, SIZE), NaivePool(24)
    tables: list[list[int]] = []
    held: Counter[int] = Counter()
    for _ in range(400):
        action = rng.choices(("start", "end", "clear"), (60, 38, 2))[0]
        if action == "start":
            # Few first tokens, so that prefixes are shared often.
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randint(1, 6))]
            named = contents(tokens)
            hits = pool.lookup(each.hash for each in named)
            assert len(hits) == naive.lookup([each.hash for each in named])
            new = len(named) - len(hits)
            if new + pool.idle(hits) > pool.free:
                continue
            pool.acquire(hits)
            naive.acquire(hits)
            fresh = pool.allocate(new)
            assert fresh == naive.allocate(new)
            pool.store(fresh, named[len(hits) :])
            naive.holds.update(zip(fresh, (each.hash for each in named[len(hits) :]), strict=True))
            tables.append(hits + fresh)
        elif action == "end" and tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.release(table)
            naive.release(table)
        elif action == "clear":
            pool.clear()
            naive.holds.clear()
        pool.check()
        assert pool.references() == list(naive.refs.values())
        held = fold((msgspec.to_builtins(event) for event in pool.drain()), held)
        assert held == Counter(wire_block_hash(each) for each in naive.holds.values())
    for table in tables:
        pool.release(table)
    pool.check()
    assert pool.free == 24
