"""What replicas are believed to hold beyond what they reported."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from gateway.placement.holders import Change
from kvstore.messages import Tier


class Claim:
    """One placed prompt that is not reported yet. Made by `PendingClaims.claim`; `live` until released in any way."""

    __slots__ = ("deadline", "fresh_units", "keys", "live", "replica")

    def __init__(self, replica: str, keys: Sequence[int], fresh_units: int, deadline: float) -> None:
        self.replica = replica
        self.keys = keys
        self.fresh_units = fresh_units
        self.deadline = deadline
        self.live = bool(keys)


class PendingClaims:
    """Prefixes of requests that were placed and whose blocks no report has shown yet.

    With them a burst with one prefix stays together, and the second request of it is predicted as a hit. Owns the live
    claims and, per replica, how often each of their keys is claimed. A claim ends when its last key is reported (as a
    listener of the index), when its owner releases it, or at its deadline, whichever is first. One whose request was
    answered is believed for `grace_s` more: its blocks are there, and the report of them is on its way.
    """

    def __init__(
        self, ttl_s: float = 60.0, clock: Callable[[], float] = time.monotonic, *, grace_s: float = 2.0
    ) -> None:
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._clock = clock
        self._counts: dict[str, dict[int, int]] = {}
        self._fresh: dict[str, int] = {}
        self._awaited: dict[int, list[Claim]] = {}
        self._deadlines: deque[Claim] = deque()
        self._settled: deque[tuple[float, Claim]] = deque()

    def __len__(self) -> int:
        """Replicas with live claims."""
        return len(self._counts)

    def claim(self, replica: str, keys: Sequence[int], held_units: int = 0, block_units: int = 1) -> Claim:
        """Claims the whole blocks of a prompt's unit `keys`, of which `held_units` are reported already.

        A prompt that is reported in full, or has no whole block, gives a claim that is over at once.
        """
        self.expire()
        units = len(keys) // block_units * block_units
        if units <= held_units:
            return Claim(replica, (), 0, 0.0)
        fresh = units - max(held_units, self.match(replica, keys, block_units))
        claim = Claim(replica, keys[:units], fresh, self._clock() + self._ttl_s)
        # Counter.update counts in C: 0.3 ms for a prompt of 100,000 tokens.
        self._counts.setdefault(replica, Counter()).update(claim.keys)  # type: ignore[arg-type]
        self._fresh[replica] = self._fresh.get(replica, 0) + claim.fresh_units
        self._awaited.setdefault(claim.keys[-1], []).append(claim)
        self._deadlines.append(claim)
        return claim

    def release(self, claim: Claim) -> None:
        """Ends a claim; a claim that is over already is no error."""
        if not claim.live:
            return
        claim.live = False
        counts = self._counts[claim.replica]
        for key in claim.keys:
            left = counts[key] - 1
            if left:
                counts[key] = left
            else:
                del counts[key]
        if not counts:
            del self._counts[claim.replica]
        self._fresh[claim.replica] -= claim.fresh_units
        waiting = self._awaited[claim.keys[-1]]
        waiting.remove(claim)
        if not waiting:
            del self._awaited[claim.keys[-1]]

    def settle(self, claim: Claim) -> None:
        """The request was answered: the claim ends with the report of its last key, or after the grace."""
        if claim.live:
            self._settled.append((self._clock() + self._grace_s, claim))

    def expire(self) -> None:
        """Ends the claims whose deadline has passed."""
        if not self._deadlines:
            return
        now = self._clock()
        queue, settled = self._deadlines, self._settled
        while settled and (not settled[0][1].live or settled[0][0] <= now):
            self.release(settled.popleft()[1])
        while queue and (not queue[0].live or queue[0].deadline <= now):
            self.release(queue.popleft())

    def match(self, replica: str, keys: Sequence[int], block_units: int = 1) -> int:
        """The longest prefix of `keys` claimed on `replica`, in units, whole blocks only."""
        counts = self._counts.get(replica)
        if not counts or not keys or keys[0] not in counts:
            return 0
        # Keys are chained and claims whole, so a claimed key means that all before it are claimed.
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in counts:
                low = middle
            else:
                high = middle - 1
        return low // block_units * block_units

    def fresh_units(self, replica: str) -> int:
        """Units that live claims will add to what `replica` reports; a prefix is counted with the first to claim it."""
        return self._fresh.get(replica, 0)

    def clear(self, replica: str) -> None:
        """Ends all claims on a replica."""
        for claim in [claim for claim in self._deadlines if claim.live and claim.replica == replica]:
            self.release(claim)

    def replica_added(self, replica: str, bit: int) -> None:
        """Index listener: nothing is claimed there yet."""

    def replica_removed(self, replica: str, bit: int) -> None:
        """Index listener: what was placed on a replica that left is not coming."""
        self.clear(replica)

    def holders_changed(self, change: Change) -> None:
        """Index listener: a claim is over when its last block is reported."""
        if not self._awaited or not change.gained or change.tier is not Tier.HBM:
            return
        for key in self._awaited.keys() & change.keys.tolist():
            for claim in [claim for claim in self._awaited[key] if claim.replica == change.replica]:
                self.release(claim)

    def check(self) -> None:
        """Asserts that counts, fresh units and awaited keys are those of the live claims."""
        live = [claim for claim in self._deadlines if claim.live]
        counts: dict[str, Counter[int]] = {}
        fresh: dict[str, int] = {}
        for claim in live:
            counts.setdefault(claim.replica, Counter()).update(claim.keys)
            fresh[claim.replica] = fresh.get(claim.replica, 0) + claim.fresh_units
        assert counts == self._counts
        assert all(units == fresh.get(replica, 0) for replica, units in self._fresh.items())
        assert set(fresh) <= set(self._fresh)
        assert sum(len(waiting) for waiting in self._awaited.values()) == len(live)


class LearnedClaims:
    """What this gateway placed on replicas that report nothing: believed to be held until it is old or crowded out.

    Owns, per replica, an LRU of unit keys with the time each was last placed. A prompt's keys are kept tail first, so
    a prefix always outlives what hangs below it, as in an engine. Bounded per replica; a prompt longer than the bound
    keeps its head.
    """

    def __init__(self, ttl_s: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._placed: dict[str, OrderedDict[int, float]] = {}

    def record(self, replica: str, keys: Sequence[int], capacity_units: int) -> None:
        """A prompt with these unit keys was placed on `replica`, which can hold `capacity_units` in all."""
        now = self._clock()
        placed = self._placed.setdefault(replica, OrderedDict())
        for key in reversed(keys[:capacity_units]):
            placed[key] = now
            placed.move_to_end(key)
        while len(placed) > capacity_units:
            placed.popitem(last=False)
        while placed and next(iter(placed.values())) <= now - self._ttl_s:
            placed.popitem(last=False)

    def match(self, replica: str, keys: Sequence[int], block_units: int = 1) -> int:
        """The longest prefix of `keys` that `replica` is believed to hold, in units, whole blocks only."""
        placed = self._placed.get(replica)
        if not placed:
            return 0
        oldest = self._clock() - self._ttl_s
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if placed.get(keys[middle - 1], oldest) > oldest:
                low = middle
            else:
                high = middle - 1
        return low // block_units * block_units

    def clear(self, replica: str) -> None:
        """Forgets what was placed on a replica: it restarted or left."""
        self._placed.pop(replica, None)

    def held_units(self, replica: str) -> int:
        """Units remembered for `replica`, some of them perhaps too old to count."""
        return len(self._placed.get(replica, ()))

    def check(self) -> None:
        """Asserts that times ascend from the first to go to the last."""
        for placed in self._placed.values():
            stamps = list(placed.values())
            assert stamps == sorted(stamps)
