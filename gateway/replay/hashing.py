"""The hashes and the ring of the published rules that hash, the same in every run and on every machine.

They are those of the simulation that these rules are compared with, not the gateway's own ring: which replica a key
lands on moves the figures of a rule by more than a rule differs from the next.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from hashlib import blake2b

VIRTUAL_NODES = 100


def stable_hash(value: object) -> int:
    """64 bits of a value of plain types, from its `repr`."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big")


class Ring:
    """Replicas 0 to n-1 at 100 points each of a circle. Never changed."""

    def __init__(self, replicas: int, seed: int = 0) -> None:
        salt = (seed,) if seed else ()
        points = sorted(
            (stable_hash(("v", replica, point, *salt)), replica)
            for replica in range(replicas)
            for point in range(VIRTUAL_NODES)
        )
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]

    def walk(self, key: int) -> Iterator[int]:
        """Every replica once, in the order in which it is met going on from `key`."""
        start = bisect(self._places, key)
        seen: set[int] = set()
        for replica in self._replicas[start:] + self._replicas[:start]:
            if replica not in seen:
                seen.add(replica)
                yield replica
