"""What a listener of the index makes of what it is told."""

from __future__ import annotations

from kvstore.messages import Tier


class Picture:
    """A listener that keeps the holders of every block from what it is told, and the keys that somebody lost."""

    def __init__(self) -> None:
        self.bits: dict[str, int] = {}
        self.masks: dict[tuple[Tier, int], int] = {}
        self.lost: set[int] = set()

    def replica_added(self, replica, bit):
        assert bit not in self.bits.values()
        self.bits[replica] = bit

    def replica_removed(self, replica, bit):
        assert self.bits.pop(replica) == bit
        assert not any(mask & bit for mask in self.masks.values())

    def holders_changed(self, change):
        assert self.bits[change.replica] == change.bit
        keys = change.keys.tolist()
        assert len(set(keys)) == len(keys) > 0
        for at, key in enumerate(keys):
            others = sum(int(masks[at]) << 64 * word for word, masks in change.others)
            with_it = others | change.bit
            before, after = (others, with_it) if change.gained else (with_it, others)
            assert self.masks.get((change.tier, key), 0) == before
            self.masks[change.tier, key] = after
        if not change.gained:
            self.lost.update(keys)
