"""What replicas' reports say of the prompts that they are given, by whomever."""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from gateway.placement.column import Keys

WAIT_S = 1.0
"""A chain that goes on is handed on again no sooner than this. Ages of cached blocks are told apart by minutes."""

MOST_CHAINS = 4_096
MOST_BLOCKS = 1 << 18
"""Above either the oldest is left out: what is used again later is reported again."""


class Use(NamedTuple):
    """`replica` has stored `keys`, the end of a chain whose block before them has the key `before`."""

    replica: str
    before: int
    keys: array[int]


class _Chain:
    """One that a replica stores, its key `end` the last one so far; handed on at `at` as far as `before`."""

    __slots__ = ("at", "before", "end", "keys", "replica")

    def __init__(self, replica: str, before: int, at: float) -> None:
        self.replica = replica
        self.before = self.end = before
        self.at = at
        self.keys = array("Q")


class ReportedUses:
    """Which chains replicas have used lately, by whomever they were placed there.

    A replica that is given a prompt stores what it lacked of it, and then block after block of the answer. The chain
    from the first block to the last of those was used just then. Only a prompt that a replica holds in full, and
    answers with less than a block, leaves no trace.

    A chain is handed on at once when it is first seen, and then every `WAIT_S` as long as it goes on. Owns the chains
    of that time, those that were never handed on in `_new`, the others in `_known`, both in the order of `at`, found by
    their ends. At most `MOST_CHAINS`, a few hundred bytes each, and 8 bytes for each of about `MOST_BLOCKS`.
    """

    def __init__(self) -> None:
        self._new: deque[_Chain] = deque()
        self._known: deque[_Chain] = deque()
        self._ends: dict[tuple[str, int], _Chain] = {}
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._ends)

    def stored(self, replica: str, keys: Keys, parents: Keys, at: float) -> None:
        """`replica` has stored these blocks, at least one, each after that of `parents`."""
        breaks = (parents[1:] != keys[:-1]).nonzero()[0]
        befores = [int(parents[0]), *parents.take(breaks + 1).tolist()]
        packed, begin = array("Q", keys.tobytes()), 0
        for before, last in zip(befores, [*breaks.tolist(), len(packed) - 1], strict=True):
            chain = self._ends.pop((replica, before), None)
            if chain is None:
                self._make_room()
                chain = _Chain(replica, before, at)
                self._new.append(chain)
            chain.keys += packed[begin : last + 1]
            chain.end = packed[last]
            self._blocks += last + 1 - begin
            begin = last + 1
            if (other := self._ends.get((replica, chain.end))) is not None:
                self._end(other)
            self._ends[replica, chain.end] = chain

    def next(self, now: float) -> Use | None:
        """The next use to hand on, if there is one."""
        known = self._known
        while known and (not known[0].end or known[0].at <= now - WAIT_S):
            chain = known.popleft()
            if chain.keys:
                return self._hand_on(chain, now)
            self._end(chain)
        while self._new:
            chain = self._new.popleft()
            if chain.end:
                return self._hand_on(chain, now)
        return None

    def forget(self, replica: str) -> None:
        """What it used is of no interest any more."""
        for chain in (*self._new, *self._known):
            if chain.replica == replica:
                self._end(chain)
        self._new = deque(chain for chain in self._new if chain.end)
        self._known = deque(chain for chain in self._known if chain.end)

    def check(self) -> None:
        """Asserts that exactly the live chains of the queues are found by their ends, and that those are in order."""
        live = [chain for chain in (*self._new, *self._known) if chain.end]
        assert {(chain.replica, chain.end): chain for chain in live} == self._ends
        assert len(live) == len(self._ends)
        assert self._blocks == sum(len(chain.keys) for chain in live)
        for chain in live:
            assert chain.end == (chain.keys[-1] if chain.keys else chain.before)
        for queue in (self._new, self._known):
            assert [chain.at for chain in queue] == sorted(chain.at for chain in queue)
        assert len(self._new) + len(self._known) <= MOST_CHAINS

    def _make_room(self) -> None:
        while len(self._new) + len(self._known) >= MOST_CHAINS or self._blocks >= MOST_BLOCKS:
            self._end((self._known or self._new).popleft())

    def _end(self, chain: _Chain) -> None:
        """It is found no more, and passed over when its turn comes."""
        if chain.end:
            del self._ends[chain.replica, chain.end]
            self._blocks -= len(chain.keys)
            chain.end, chain.keys = 0, array("Q")

    def _hand_on(self, chain: _Chain, now: float) -> Use:
        use = Use(chain.replica, chain.before, chain.keys)
        self._blocks -= len(chain.keys)
        chain.at, chain.before, chain.keys = now, chain.end, array("Q")
        self._known.append(chain)
        return use
