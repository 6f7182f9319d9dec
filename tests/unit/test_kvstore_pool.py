"""The pool, case by case; `test_kvstore_pool_stress` compares it with its naive twin."""

from __future__ import annotations

from typing import Any

import pytest
from pool_support import BLOCK_BYTES, Clock, Visible, chain, make_pool, payload, store, write

from kvstore.errors import PoolError, WrongBytes
from kvstore.pool import Counts, Held, Pool
from kvstore.region import make_region
from kvstore.slot import PAGE, seal, verify

A, B, C, D = chain("a", "b", "c", "d")
OTHER = chain("other", 1, 2, 3)


def one(given: list[Held | None]) -> Held:
    (held,) = given
    assert held is not None
    return held


def test_what_was_stored_is_found_pinned_and_verifies() -> None:
    visible = Visible()
    pool = make_pool(4, listener=visible)
    first, second = pool.reserve([A, B])
    assert first is not None and second is not None
    assert (pool.lookup([A, B]), visible.keys) == (0, set()), "nothing is visible before it is committed"
    write(pool, A, first)
    assert pool.commit(0, A, first)
    assert (pool.lookup([A, B, C]), visible.keys) == (1, {A})
    write(pool, B, second)
    assert pool.commit(0, B, second)
    assert not pool.commit(0, B, second), "once"
    assert (pool.lookup([A, B, C]), pool.lookup([C]), pool.lookup([]), visible.keys) == (2, 0, 0, {A, B})
    assert pool.pin([A, B, C]) == [first, second]
    for key, held in ((A, first), (B, second)):
        verify(pool.view(held.slot), BLOCK_BYTES, key, held.generation)
        assert pool.view(held.slot)[:BLOCK_BYTES] == payload(key)
    assert pool.counts == Counts(free=2, reserved=0, held=2, quarantined=0, pinned=2)
    pool.unpin([first, second])
    assert pool.counts == Counts(free=2, reserved=0, held=2, quarantined=0, pinned=0)
    pool.check()


def test_a_block_is_written_once() -> None:
    pool = make_pool(4)
    store(pool, [A])
    assert pool.reserve([A, B])[0] is None, "held"
    assert pool.reserve([B], A) == [None], "being written"
    pool.check()


def test_partial_ranks_are_invisible() -> None:
    visible = Visible()
    pool = make_pool(4, ranks=3, listener=visible)
    held = one(pool.reserve([A], rank=0))
    assert pool.reserve([A], rank=0) == [None], "each rank writes its share once"
    assert pool.reserve([A], rank=2) == pool.reserve([A], rank=1) == [held], "all into the same use of one slot"
    for rank in (2, 0, 0):
        write(pool, A, held, rank)
        assert not pool.commit(rank, A, held)
        assert (pool.lookup([A]), pool.pin([A]), visible.keys) == (0, [], set())
    write(pool, A, held, 1)
    assert pool.commit(1, A, held)
    assert pool.pin([A]) == [held]
    verify(pool.view(held.slot), BLOCK_BYTES, A, held.generation)
    pool.check()


def test_ranks_that_never_commit_do_not_keep_a_slot_for_ever() -> None:
    clock = Clock()
    pool = make_pool(1, clock, ranks=2, quarantine_s=10)
    held = one(pool.reserve([A], rank=0))
    pool.reserve([A], rank=1)
    assert not pool.commit(0, A, held)
    clock.now += 9
    assert pool.reserve([B], rank=0) == [None]
    clock.now += 1
    # Given up, and the other rank may be writing still.
    assert pool.reserve([B], rank=0) == [None]
    assert pool.counts == Counts(free=0, reserved=0, held=0, quarantined=1, pinned=0)
    assert not pool.commit(1, A, held)
    clock.now += 10
    assert one(pool.reserve([B], rank=0)) == Held(held.slot, held.generation + 1)
    pool.check()


def test_a_block_that_one_writes_whole_is_not_shared_with_ranks() -> None:
    """The agent fetches what a rank of its engine is computing, or the other way round."""
    pool = make_pool(4, ranks=2)
    fetched = one(pool.reserve([A]))
    assert pool.reserve([A], rank=0) == [None]
    assert not pool.commit(0, A, fetched)
    saved = one(pool.reserve([B], rank=0))
    assert pool.reserve([B]) == [None]
    assert not pool.admit(B, saved)
    pool.abandon(fetched)
    assert pool.counts.free == 3, "nobody else was writing"
    pool.check()


def test_a_fetched_block_keeps_the_checksum_that_was_verified() -> None:
    """Bytes that change between verification and use are noticed, and not vouched for by a new checksum."""
    pool = make_pool(2)
    held = one(pool.reserve([A]))
    slot = pool.view(held.slot)
    slot[:BLOCK_BYTES] = payload(A)
    seal(slot, BLOCK_BYTES, A, 4_711)
    verify(slot, BLOCK_BYTES, A, 4_711)
    assert pool.admit(A, held)
    verify(slot, BLOCK_BYTES, A, held.generation)
    assert pool.pin([A]) == [held]
    pool.unpin([held])
    other = one(pool.reserve([B], A))
    slot = pool.view(other.slot)
    seal(slot, BLOCK_BYTES, B, 1)
    slot[17] = 1
    assert pool.admit(B, other)
    with pytest.raises(WrongBytes, match="bytes"):
        verify(slot, BLOCK_BYTES, B, other.generation)


@pytest.mark.parametrize("call", ["commit", "admit"])
def test_what_is_not_reserved_under_these_names_is_not_committed(call: str) -> None:
    pool = make_pool(2)
    held = one(pool.reserve([A]))

    def offered(key: bytes, held: Held) -> bool:
        return pool.commit(0, key, held) if call == "commit" else pool.admit(key, held)

    wrong = [(B, held), (A, Held(held.slot, 0)), (A, Held(held.slot, 2)), (A, Held(1 - held.slot, held.generation))]
    # Slot numbers come over a socket: any number may.
    wrong += [(A, Held(-1, 1)), (A, Held(held.slot - 2, 1)), (A, Held(2, 1)), (A, Held(2**63, 1))]
    assert not any(offered(key, use) for key, use in wrong)
    pool.abandon(Held(held.slot - 2, held.generation))
    pool.abandon(Held(held.slot, held.generation + 1), stopped=False)
    assert pool.counts == Counts(free=1, reserved=1, held=0, quarantined=0, pinned=0)
    assert offered(A, held)
    pool.abandon(held)
    assert pool.lookup([A]) == 1
    pool.check()


def test_a_late_write_is_quarantined() -> None:
    clock = Clock()
    pool = make_pool(2, clock, quarantine_s=10)
    late = one(pool.reserve([A]))
    pool.abandon(late, stopped=False)
    assert pool.counts == Counts(free=1, reserved=0, held=0, quarantined=1, pinned=0)
    stored = store(pool, [A, B])
    assert stored[0] is not None and stored[0].slot != late.slot and stored[1] is None
    clock.now += 9.9
    pool.view(late.slot)[:] = b"\xee" * PAGE
    assert not pool.commit(0, A, late) and not pool.admit(A, late)
    (held,) = pool.pin([A])
    verify(pool.view(held.slot), BLOCK_BYTES, A, held.generation)
    clock.now += 0.1
    pool.expire()
    assert pool.counts.free == 1
    (again,) = store(pool, [B], A)
    assert again == Held(late.slot, late.generation + 1)
    verify(pool.view(again.slot), BLOCK_BYTES, B, again.generation)
    pool.check()


def test_an_abandoned_slot_whose_writer_stopped_is_free_at_once() -> None:
    pool = make_pool(1)
    held = one(pool.reserve([A]))
    pool.abandon(held)
    pool.abandon(held)
    assert pool.counts.free == 1
    assert one(pool.reserve([A])).generation == held.generation + 1
    pool.check()


def test_an_abandoned_slot_waits_for_the_other_ranks() -> None:
    pool = make_pool(2, ranks=2)
    for key, rank_0_is_done in ((A, True), (B, False)):
        held = one(pool.reserve([key], rank=0))
        pool.reserve([key], rank=1)
        if rank_0_is_done:
            pool.commit(0, key, held)
        pool.abandon(held)
        assert (pool.counts.quarantined == 0) == rank_0_is_done
    pool.check()


def test_a_full_pool_sheds_stores_and_evicts_nothing_pinned() -> None:
    visible = Visible()
    pool = make_pool(3, listener=visible)
    store(pool, [A, B, C])
    pinned = pool.pin([A, B, C])
    assert store(pool, OTHER[:2]) == [None, None]
    assert visible.keys == {A, B, C}
    pool.unpin(pinned[2:])
    stored = store(pool, OTHER[:2])
    assert stored == [Held(pinned[2].slot, 2), None], "the tail went; B and A are pinned"
    assert visible.keys == {A, B, OTHER[0]}
    for key, held in zip((A, B), pinned, strict=False):
        verify(pool.view(held.slot), BLOCK_BYTES, key, held.generation)
    pool.check()


def test_tails_go_before_heads() -> None:
    pool = make_pool(4)
    store(pool, [A, B, C, D])
    for index, expected in enumerate((3, 2, 1, 0)):
        store(pool, chain(index))
        assert pool.lookup([A, B, C, D]) == expected
        pool.check()


def test_a_head_that_becomes_a_leaf_goes_by_its_own_last_use() -> None:
    pool = make_pool(3)
    store(pool, [A, B])
    store(pool, OTHER[:1])
    pool.unpin(pool.pin([A]))
    store(pool, chain(1))
    assert (pool.lookup([A, B]), pool.lookup(OTHER)) == (1, 1), "B, the oldest leaf"
    store(pool, chain(2))
    assert (pool.lookup([A, B]), pool.lookup(OTHER)) == (1, 0), "A was used since"
    pool.check()


def test_least_recently_used_goes_first_and_a_touch_counts_for_the_run() -> None:
    pool = make_pool(4)
    store(pool, [A, B])
    store(pool, OTHER[:2])
    pool.unpin(pool.pin([A, B]))
    store(pool, chain(1, 2))
    assert (pool.lookup([A, B]), pool.lookup(OTHER)) == (2, 0)
    pool.check()


def test_looking_up_is_no_use() -> None:
    pool = make_pool(2)
    store(pool, [A])
    store(pool, [OTHER[0]])
    pool.lookup([A])
    store(pool, chain(1))
    assert pool.lookup([A]) == 0


def test_shared_goes_first_until_it_is_used_again() -> None:
    pool = make_pool(3)
    for key in (A, OTHER[0], chain(1)[0]):
        store(pool, [key])
    for key in (OTHER[0], chain(1)[0]):
        pool.unpin(pool.pin([key]), shared=True)
    pool.unpin(pool.pin([OTHER[0]]))
    store(pool, chain(2))
    assert [pool.lookup([key]) for key in (A, OTHER[0], chain(1)[0])] == [1, 1, 0]
    store(pool, chain(3))
    assert [pool.lookup([key]) for key in (A, OTHER[0])] == [0, 1], "nothing is shared any more: the oldest"
    pool.check()


@pytest.mark.parametrize("parent_is_given", [True, False])
def test_no_block_makes_room_for_the_one_that_follows_it(parent_is_given: bool) -> None:
    """Behind a missing block it could never be hit."""
    pool = make_pool(2)
    store(pool, [A, B])
    assert (store(pool, [C], B) if parent_is_given else store(pool, [A, B, C])[2:]) == [None]
    assert pool.lookup([A, B]) == 2
    store(pool, OTHER)
    assert (pool.lookup([A, B]), pool.lookup(OTHER)) == (0, 2), "others make room as far as they go"
    pool.check()


def test_a_hold_keeps_blocks_readable_and_unevicted() -> None:
    clock = Clock()
    pool = make_pool(1, clock)
    store(pool, [A])
    (held,) = pool.pin([A])
    pool.unpin([held], hold_s=5)
    assert (pool.counts.pinned, pool.lookup([A]), store(pool, [OTHER[0]])) == (1, 1, [None])
    assert pool.pin([A]) == [held], "still good to use"
    pool.unpin([held])
    pool.unpin(pool.pin([A]), hold_s=2)
    clock.now += 2
    assert store(pool, [OTHER[0]]) == [None], "a shorter hold does not end a longer one"
    clock.now += 3
    assert store(pool, [OTHER[0]]) == [Held(held.slot, held.generation + 1)]
    pool.check()


def test_clear_drops_what_is_held_and_frees_it_when_it_is_let_go_of() -> None:
    clock, visible = Clock(), Visible()
    pool = make_pool(5, clock, quarantine_s=10, listener=visible)
    store(pool, [A, B, C])
    (pinned,) = pool.pin([A])
    pool.unpin(pool.pin([A, B])[1:], hold_s=20)
    reserved = one(pool.reserve([D], C))
    pool.clear()
    pool.check()
    assert (pool.clears, visible.keys, pool.lookup([A]), pool.pin([A])) == (1, set(), 0, [])
    # Free: C and the one never used. Kept: A (pinned twice), B (on hold), D (its writer was not told).
    assert pool.counts == Counts(free=2, reserved=0, held=0, quarantined=3, pinned=1)
    assert not pool.commit(0, D, reserved)
    stored = store(pool, [A, B])
    assert {held.slot for held in stored if held} & {pinned.slot, reserved.slot} == set()
    verify(pool.view(pinned.slot), BLOCK_BYTES, A, pinned.generation)
    pool.unpin([pinned])
    assert pool.counts.free == 0
    pool.unpin([pinned])
    assert pool.counts.free == 1, "at the last unpin"
    for passed, free in ((10, 2), (10, 3)):
        clock.now += passed
        pool.expire()
        assert pool.counts.free == free
    pool.check()


def test_unpinning_what_is_not_pinned_is_noticed() -> None:
    pool = make_pool(2)
    store(pool, [A])
    held = pool.pin([A])
    assert pool.pins(held[0]) == 1
    pool.unpin(held)
    assert (pool.pins(held[0]), pool.pins(held[0]._replace(generation=2))) == (0, 0)
    with pytest.raises(AssertionError, match="not pinned"):
        pool.unpin(held)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block_bytes": 0}, "block_bytes"),
        ({"block_bytes": PAGE}, "block_bytes"),
        ({"ranks": 0}, "ranks"),
        ({"quarantine_s": 0.0}, "quarantine_s"),
        ({"quarantine_s": float("nan")}, "quarantine_s"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(PoolError, match=f"^{named}: "):
        Pool(make_region(2, PAGE), **{"block_bytes": BLOCK_BYTES, **settings})


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_grid_is_an_error(rank: int) -> None:
    pool = make_pool(2, ranks=2)
    with pytest.raises(PoolError, match=r"^rank: must be between 0 and 1"):
        pool.reserve([A], rank=rank)
    with pytest.raises(PoolError, match=r"^rank: "):
        pool.commit(rank, A, Held(0, 1))
