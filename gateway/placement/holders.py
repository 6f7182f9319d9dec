"""What listeners of the index are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gateway.placement.column import Keys
from kvstore.messages import Tier

WORD = 64
"""Replicas in one word of a holder set: bit b of word w stands for the replica whose bit is 1 << (64 w + b)."""

_WORD = (1 << WORD) - 1


class Change(NamedTuple):
    """Blocks, each once, that one replica got (`gained`) or lost in one tier.

    `others` are their holders in that tier besides `replica`, before and after: pairs of a word's number and an array
    of that word of every block's holder set, words without any left out. `just_now` the replica has stored or evicted
    them; not so what a snapshot tells of, what is lost with the reports, and what the index drops for lack of room.
    `parents` are the keys of the blocks before those stored just now. Arrays are valid during the call.
    """

    replica: str
    bit: int
    tier: Tier
    gained: bool
    keys: Keys
    others: Sequence[tuple[int, Keys]]
    just_now: bool = False
    parents: Keys | None = None


class HoldersListener(Protocol):
    """Told of every change, after the index has made it."""

    def replica_added(self, replica: str, bit: int) -> None:
        """`bit` stands for `replica` from now on; it holds nothing yet."""

    def replica_removed(self, replica: str, bit: int) -> None:
        """`replica` holds nothing any more, and `bit` may be given to another."""

    def holders_changed(self, change: Change) -> None:
        """A replica got or lost blocks."""


def words(mask: int) -> dict[int, int]:
    """The words of a holder mask that are not 0, by number."""
    if 0 < mask <= _WORD:
        return {0: mask}
    found, word = {}, 0
    while mask:
        if mask & _WORD:
            found[word] = mask & _WORD
        mask >>= WORD
        word += 1
    return found
