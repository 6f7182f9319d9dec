"""Leases on a pool, case by case; `test_kvstore_pool_stress` compares them with a naive twin."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pool_support import BLOCK_BYTES, Clock, chain, make_pool, store

from kvstore.errors import PoolError
from kvstore.lease import Busy, Lease, Leases
from kvstore.pool import Held, Pool
from kvstore.slot import verify

SECRET = b"sixteen bytes .."
KEYS = chain("a", "b", "c", "d")


def leased(slots: int = 8, blocks: int = 3, **settings: Any) -> tuple[Clock, Pool, Leases, Lease]:
    """A lease of 10 s on a pool that holds the first `blocks` of KEYS."""
    clock = Clock()
    pool = make_pool(slots, clock)
    store(pool, KEYS[:blocks])
    leases = Leases(pool, clock=clock, **settings)
    lease = leases.grant(SECRET, KEYS, 10.0)
    assert isinstance(lease, Lease)
    return clock, pool, leases, lease


def test_a_lease_pins_the_longest_run_until_it_is_released() -> None:
    clock, pool, leases, lease = leased()
    assert [held.slot for held in lease.held] == [0, 1, 2]
    assert (lease.expires, len(leases), pool.counts.pinned) == (clock.now + 10, 1, 3)
    leases.check()
    assert leases.release(lease.id, SECRET)
    assert (len(leases), pool.counts.pinned) == (0, 0)
    assert not leases.release(lease.id, SECRET), "once"
    leases.check()
    pool.check()


def test_an_expired_lease_fails_the_reader() -> None:
    clock, pool, leases, lease = leased(hold_s=60.0)
    clock.now += 10
    assert leases.authorize(lease.id, SECRET) is None
    assert leases.renew(lease.id, SECRET) is None
    assert not leases.release(lease.id, SECRET), "also when nobody has swept it yet"
    assert (pool.counts.pinned, leases.expired) == (0, 0), "but its reader has said that it is done"


def test_an_unconfirmed_reader_has_no_copy() -> None:
    """What a reader must not believe it copied is not evicted for it."""
    clock = Clock()
    pool = make_pool(2, clock)
    store(pool, chain("old"))
    store(pool, KEYS[:1])
    leases = Leases(pool, clock=clock)
    lease = leases.grant(SECRET, KEYS, 10.0)
    assert isinstance(lease, Lease)
    clock.now += 10
    assert not leases.release(lease.id, SECRET, copied=1)
    store(pool, chain("new"))
    assert (pool.lookup(KEYS), pool.lookup(chain("old"))) == (1, 0)


def test_slots_of_a_lease_that_ran_out_are_not_reused_while_its_reader_may_still_read() -> None:
    clock, pool, leases, lease = leased(slots=3, pinned_share=1.0, hold_s=60.0)
    clock.now += 10
    leases.expire()
    assert (len(leases), leases.expired) == (0, 1)
    assert not leases.release(lease.id, SECRET)
    assert pool.lookup(KEYS) == 3, "held still"
    clock.now += 59
    assert store(pool, chain("new")) == [None]
    for key, held in zip(KEYS, lease.held, strict=False):
        verify(pool.view(held.slot), BLOCK_BYTES, key, held.generation)
    clock.now += 1
    assert store(pool, chain("new")) == [Held(2, 2)]
    leases.check()
    pool.check()


def test_a_renewed_lease_lasts_as_long_again() -> None:
    clock, _, leases, lease = leased()
    clock.now += 9
    assert leases.renew(lease.id, SECRET) == 10
    clock.now += 9
    leases.expire()
    grant = leases.authorize(lease.id, SECRET)
    assert grant is not None and grant.deadline == clock.now + 1
    assert leases.release(lease.id, SECRET)


def test_a_lease_is_its_readers_alone() -> None:
    _, pool, leases, lease = leased()
    for secret in (b"sixteen bytes ,,", b"", SECRET + b"."):
        assert leases.authorize(lease.id, secret) is None
        assert leases.renew(lease.id, secret) is None
        assert not leases.release(lease.id, secret)
    assert leases.authorize("", SECRET) is None
    assert pool.counts.pinned == 3
    grant = leases.authorize(lease.id, SECRET)
    assert grant == (lease.id, frozenset({0, 1, 2}), lease.expires)
    other = leases.grant(SECRET, KEYS, 1.0)
    assert isinstance(other, Lease) and other.id != lease.id and len(other.id) == 32


def test_a_cleared_pool_fails_the_reader() -> None:
    _, pool, leases, lease = leased()
    pool.clear()
    assert leases.authorize(lease.id, SECRET) is None
    assert leases.renew(lease.id, SECRET) is None
    leases.check()
    store(pool, KEYS[:1])
    fresh = leases.grant(SECRET, KEYS, 1.0)
    assert isinstance(fresh, Lease) and fresh.held[0] not in lease.held
    for key, held in zip(KEYS, lease.held, strict=False):
        verify(pool.view(held.slot), BLOCK_BYTES, key, held.generation)
    assert not leases.release(lease.id, SECRET)
    assert leases.release(fresh.id, SECRET)
    assert pool.counts.quarantined == 0
    pool.check()


@pytest.mark.parametrize(("copied", "left"), [(None, 0), (3, 0), (2, 1), (0, 3)])
def test_what_the_reader_has_now_is_evicted_first(copied: int | None, left: int) -> None:
    """Older blocks of the pool outlive what a peer holds too; blocks that were not copied go by their use."""
    clock = Clock()
    pool = make_pool(6, clock)
    old = [chain("old", index)[1] for index in range(3)]
    for key in old:
        store(pool, [key])
    new = [chain("new", index)[1] for index in range(3)]
    for key in new:
        store(pool, [key])
    leases = Leases(pool, clock=clock)
    for index, key in enumerate(new):
        lease = leases.grant(SECRET, [key], 1.0)
        assert isinstance(lease, Lease)
        assert leases.release(lease.id, SECRET, copied=1 if copied is None or index < copied else 0)
    store(pool, chain("x", 1, 2))
    assert sum(pool.lookup([key]) for key in new) == left
    assert sum(pool.lookup([key]) for key in old) == 3 - left


def test_copied_counts_from_the_first_block_on() -> None:
    _, pool, leases, lease = leased(slots=4, pinned_share=1.0)
    assert leases.release(lease.id, SECRET, copied=0)
    store(pool, chain("other"))
    lease_of_other = leases.grant(SECRET, chain("other"), 1.0)
    assert isinstance(lease_of_other, Lease)
    assert leases.release(lease_of_other.id, SECRET)
    store(pool, chain("next"))
    assert (pool.lookup(KEYS), pool.lookup(chain("other"))) == (3, 0)


def test_nothing_held_is_nothing_leased() -> None:
    _, pool, leases, _ = leased(blocks=0)
    assert leases.grant(SECRET, KEYS, 5.0) == ("", [], pool._clock())
    assert len(leases) == 0
    assert not leases.release("", SECRET)


def test_no_more_is_pinned_than_a_share_of_the_pool() -> None:
    """The rest of the pool can be written whatever readers do."""
    clock, pool, leases, lease = leased(slots=8, blocks=3, pinned_share=0.5)
    others = chain("other", 1, 2)
    store(pool, others)
    partial = leases.grant(SECRET, others, 10.0)
    assert isinstance(partial, Lease) and len(partial.held) == 1
    assert leases.grant(SECRET, others[1:], 10.0) == Busy(pinned=4, limit=4)
    again = leases.grant(SECRET, KEYS, 10.0)
    assert isinstance(again, Lease) and len(again.held) == 3, "the same slots once more cost nothing"
    clock.now += 10
    leases.expire()
    assert isinstance(leases.grant(SECRET, others[1:], 10.0), Busy), "those of readers that ran out count on"
    clock.now += 60
    pool.expire()
    assert isinstance(leases.grant(SECRET, others, 10.0), Lease)
    assert lease.held == again.held
    pool.check()
    leases.check()


def test_the_longest_term_is_the_owners() -> None:
    clock, _, leases, _ = leased(max_ttl_s=20.0)
    lease = leases.grant(SECRET, KEYS, 1e9)
    assert isinstance(lease, Lease) and lease.expires == clock.now + 20
    assert leases.renew(lease.id, SECRET) == 20


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_a_term_that_makes_no_sense_is_named(ttl_s: float) -> None:
    _, pool, leases, _ = leased()
    with pytest.raises(PoolError, match=r"^ttl_s: must be above 0"):
        leases.grant(SECRET, KEYS, ttl_s)
    assert (len(leases), pool.counts.pinned) == (1, 3)


@pytest.mark.parametrize("setting", ["max_ttl_s", "hold_s", "pinned_share"])
def test_bad_settings_are_named(setting: str) -> None:
    with pytest.raises(PoolError, match=f"^{setting}: must be above 0"):
        Leases(make_pool(1), **{setting: 0.0})


def test_any_thread_may_ask_what_is_authorized() -> None:
    """An answer is a whole grant or none, whatever the pool's thread does meanwhile."""
    _, _, leases, lease = leased()
    slots = frozenset(held.slot for held in lease.held)
    ids = [lease.id]
    done = threading.Event()
    wrong: list[object] = []

    def ask() -> None:
        while not done.is_set():
            grant = leases.authorize(ids[-1], SECRET)
            if grant is not None and grant.slots != slots:
                wrong.append(grant)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(2_000):
            fresh = leases.grant(SECRET, KEYS, 10.0)
            assert isinstance(fresh, Lease)
            ids.append(fresh.id)
            leases.renew(fresh.id, SECRET)
            leases.release(fresh.id, SECRET)
    finally:
        done.set()
        asking.join()
    assert not wrong
