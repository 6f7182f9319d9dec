"""Leases: for how long, and for whom, slots of a pool stay as they are while a peer reads them."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.errors import PoolError
from kvstore.pool import Held, Pool
from kvstore.transfer.base import Grant


class Lease(NamedTuple):
    """What a reader got: the first `len(held)` blocks it asked for, until `expires` on the owner's clock. Without
    blocks there is no lease, and nothing to renew or release."""

    id: str
    held: list[Held]
    expires: float


class Busy(NamedTuple):
    """No lease now, though blocks are held: readers and the engine have `pinned` of the `limit` slots they may pin."""

    pinned: int
    limit: int


class _Entry(NamedTuple):
    """One lease, of the reader who knows `secret`. Immutable: a thread that looks it up sees all of it or nothing."""

    secret: bytes
    held: tuple[Held, ...]
    slots: frozenset[int]
    ttl_s: float
    expires: float
    clears: int


class Leases:
    """Owns which slots are leased, and pins them in the pool.

    Called by the pool's thread alone, but for `authorize`, which any thread may call and whose answer is valid until
    its deadline. A lease ends once: by `release`, or by `expire` after its time. Not believed, though its slots stay as
    they are until then, is one that is over, and one granted before the pool was cleared.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        max_ttl_s: float = 30.0,
        hold_s: float = 60.0,
        pinned_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `pinned_share` of the pool's slots may be pinned after a grant. Those of a lease that ended
        unreleased are kept for another `hold_s` seconds, in case its reader still reads: the longest deadline of a
        transfer. Raises PoolError, naming the setting."""
        for name, value in (("max_ttl_s", max_ttl_s), ("hold_s", hold_s), ("pinned_share", pinned_share)):
            if not value > 0:
                raise PoolError(f"{name}: must be above 0, got {value}")
        self.expired = 0
        """Number of leases that ended unreleased."""
        self._pool = pool
        self._max_ttl_s = max_ttl_s
        self._hold_s = hold_s
        self._limit = int(pinned_share * pool.region.slots)
        self._clock = clock
        self._leases: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def pins(self) -> int:
        """Slots pinned for all of them; one that several name counts as often."""
        return sum(len(entry.held) for entry in self._leases.values())

    def grant(self, secret: bytes, keys: Sequence[bytes], ttl_s: float) -> Lease | Busy:
        """Pin the longest run of `keys` that is held and may be pinned, for `ttl_s` seconds or the longest allowed,
        for the one reader who knows `secret`.

        Raises PoolError for a `ttl_s` that is not above 0.
        """
        if not ttl_s > 0:
            raise PoolError(f"ttl_s: must be above 0, got {ttl_s}")
        now = self._clock()
        held = self._pool.pin(keys)
        found = bool(held)
        while held and self._pool.counts.pinned > self._limit:
            self._pool.unpin([held.pop()])
        if not held:
            return Busy(self._pool.counts.pinned, self._limit) if found else Lease("", [], now)
        lease = secrets.token_hex(16)
        ttl_s = min(ttl_s, self._max_ttl_s)
        # The slots once, and not for each look: a transport takes one every few slots, on threads of its own.
        slots = frozenset(each.slot for each in held)
        self._leases[lease] = _Entry(secret, tuple(held), slots, ttl_s, now + ttl_s, self._pool.clears)
        return Lease(lease, held, now + ttl_s)

    def renew(self, lease: str, secret: bytes) -> float | None:
        """Seconds the lease has from now on; None for one that is unknown, another's, over, or of a cleared pool."""
        entry = self._believed(lease, secret)
        if entry is None:
            return None
        self._leases[lease] = entry._replace(expires=self._clock() + entry.ttl_s)
        return entry.ttl_s

    def release(self, lease: str, secret: bytes, *, copied: int | None = None) -> bool:
        """The reader reads no more; whether the lease held from its grant until now. Then the reader has the first
        `copied` blocks (None: all), and the pool evicts its own first. Without effect for an unknown or another's."""
        entry = self._proven(lease, secret)
        if entry is None:
            return False
        believed = self._believed(lease, secret) is not None
        del self._leases[lease]
        taken = (len(entry.held) if copied is None else copied) if believed else 0
        self._pool.unpin(entry.held[:taken], shared=True)
        self._pool.unpin(entry.held[taken:])
        return believed

    def authorize(self, lease: str, secret: bytes) -> Grant | None:
        """What may be read for this lease now; None for one that is unknown, another's, over, or of a cleared pool."""
        entry = self._believed(lease, secret)
        if entry is None:
            return None
        return Grant(lease, entry.slots, entry.expires)

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self._clock()
        for lease, entry in [each for each in self._leases.items() if each[1].expires <= now]:
            del self._leases[lease]
            self.expired += 1
            self._pool.unpin(entry.held, hold_s=self._hold_s)

    def check(self) -> None:
        """Asserts that every leased slot is pinned, in its use, at least once for each lease that names it."""
        named: dict[Held, int] = {}
        for entry in self._leases.values():
            assert entry.held, "a lease on nothing"
            for held in entry.held:
                named[held] = named.get(held, 0) + 1
        for held, leases in named.items():
            assert self._pool.pins(held) >= leases, f"{held} is leased {leases} times, pinned {self._pool.pins(held)}"

    def _proven(self, lease: str, secret: bytes) -> _Entry | None:
        entry = self._leases.get(lease)
        return entry if entry is not None and hmac.compare_digest(entry.secret, secret) else None

    def _believed(self, lease: str, secret: bytes) -> _Entry | None:
        entry = self._proven(lease, secret)
        if entry is None or entry.expires <= self._clock() or entry.clears != self._pool.clears:
            return None
        return entry
