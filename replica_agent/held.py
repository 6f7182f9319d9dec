"""The blocks that are reported as held in one tier, by RouteKey."""

from __future__ import annotations

from enum import Enum, auto
from itertools import islice

from kvstore.identity import pack_keys
from kvstore.messages import SHARDS, Change, Cleared, Removed, Stored, Tier, digest_of, shard_of
from replica_agent.cast_off import CastOff

_MASK = (1 << 64) - 1


class _Turn(Enum):
    """What has become of a key since it was last told."""

    COME = auto()
    GONE = auto()
    GONE_AND_BACK = auto()


class HeldKeys:
    """Keys with their parents' keys, by shard; how often each is held; and what has changed since it was last told.

    Several engine hashes can lead to one key (the same tokens, hashed differently): it is held while any of them is.
    One that was told, went, and came back is told to be removed, and then to be stored: a gateway that counted on it
    learns that it was not there all the time (its trust depends on that). One that came and went is not told.
    Owned and mutated by one `Catalogue`. `digest` is kept, not computed. What is cleared is let go of at once and freed
    by `sweep`, a piece at a time.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._more: dict[int, int] = {}
        self._changed: dict[int, _Turn] = {}
        self._cleared = False
        self._cast_off = CastOff()
        self._sum = 0
        self.count = 0

    @property
    def digest(self) -> int:
        """See `kvstore.messages.digest_term`."""
        return self._sum * (2 * self._tier + 1) & _MASK

    @property
    def has_changes(self) -> bool:
        """Whether `take` would say anything."""
        return self._cleared or bool(self._changed)

    def __contains__(self, key: int) -> bool:
        return key in self._shards[shard_of(key)]

    def add(self, key: int, parent: int) -> None:
        """One more engine hash of this key is held."""
        shard = self._shards[shard_of(key)]
        if key in shard:
            self._more[key] = self._more.get(key, 0) + 1
            return
        shard[key] = parent
        self._sum += key
        self.count += 1
        self._turn(key, True)

    def release(self, key: int) -> None:
        """One of them is not any more."""
        more = self._more.pop(key, 0)
        if more:
            if more > 1:
                self._more[key] = more - 1
            return
        del self._shards[shard_of(key)][key]
        self._sum -= key
        self.count -= 1
        self._turn(key, False)

    def _turn(self, key: int, now: bool) -> None:
        # Turns of one key alternate.
        before = self._changed.pop(key, None)
        if now:
            self._changed[key] = _Turn.COME if before is None else _Turn.GONE_AND_BACK
        elif before is not _Turn.COME:
            self._changed[key] = _Turn.GONE

    def clear(self, *, tell: bool) -> None:
        """Nothing is held any more. Whoever begins a new epoch need not be told."""
        self._cast_off.add((*self._shards, self._more, self._changed))
        self._cleared = tell and (self._cleared or bool(self.count) or bool(self._changed))
        self._shards = [{} for _ in range(SHARDS)]
        self._more, self._changed = {}, {}
        self._sum = self.count = 0

    def sweep(self, limit: int) -> bool:
        """Frees about `limit` keys of what was cleared; whether more are left."""
        return self._cast_off.sweep(limit)

    def size(self, shard: int) -> int:
        """Keys in one shard."""
        return len(self._shards[shard])

    def part(self, first: int, end: int) -> tuple[list[int], list[int]]:
        """Keys of shards `first` to `end`, and their parents: copies, so they stay as they were."""
        keys: list[int] = []
        parents: list[int] = []
        for shard in filter(None, self._shards[first:end]):
            keys += shard.keys()
            parents += shard.values()
        return keys, parents

    def take(self, limit: int) -> list[Change]:
        """What has become of up to `limit` keys since the last call: what is gone, then what is held now."""
        changes: list[Change] = []
        if self._cleared:
            self._cleared = False
            changes.append(Cleared(tier=self._tier))
        if len(self._changed) <= limit:
            taken, self._changed = self._changed, {}
        else:
            taken = {key: self._changed.pop(key) for key in list(islice(self._changed, limit))}
        if gone := [key for key, turn in taken.items() if turn is not _Turn.COME]:
            changes.append(Removed(tier=self._tier, keys=pack_keys(gone)))
        if come := [key for key, turn in taken.items() if turn is not _Turn.GONE]:
            shards = self._shards
            parents = [shards[shard_of(key)][key] for key in come]
            changes.append(Stored(tier=self._tier, keys=pack_keys(come), parents=pack_keys(parents)))
        return changes

    def check(self, holders: dict[int, int]) -> None:
        """Asserts that each key is held as often as it has `holders`, stands in its shard, and is counted."""
        held: dict[int, int] = {}
        for number, shard in enumerate(self._shards):
            if not shard:
                continue
            assert all(shard_of(key) == number for key in shard), f"shard {number} has keys of another"
            held |= dict.fromkeys(shard, 1)
        for key, more in self._more.items():
            assert more > 0, f"{key} is in the list of keys held more than once"
            held[key] += more
        assert held == holders
        assert self.count == len(held)
        assert self.digest == digest_of(held, self._tier)
        for key, turn in self._changed.items():
            assert (key in held) == (turn is not _Turn.GONE)
