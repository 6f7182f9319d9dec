"""What a pool tells of its blocks, passed on a little later: who waits for such a block is answered first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from replica_agent.catalogue import Catalogue

DELAY_S = 0.01
"""Reports of blocks that came or went wait for so long. For 128 blocks of a fetch the catalogue and a delta to each
gateway take half a millisecond, and an engine had to wait for that: `bench transfer`."""

MOST_A_TURN = 1_024
"""Blocks before other tasks have their turn; a pool that is cleared tells of all it had."""


class PoolNews:
    """Owns what the pool has told and the catalogue has not heard yet, in order; used on one event loop. `changed` is
    called once the catalogue has heard some."""

    def __init__(self, catalogue: Catalogue, changed: Callable[[], object]) -> None:
        self._catalogue = catalogue
        self._changed = changed
        self._news: deque[tuple[bytes, bool]] = deque()
        self._timer: asyncio.Handle | None = None

    def __len__(self) -> int:
        """News that wait."""
        return len(self._news)

    @property
    def balance(self) -> int:
        """By how many blocks what waits will change what the catalogue knows of: a look at each, for checks."""
        return sum(1 if held else -1 for _, held in self._news)

    def block_held(self, key: bytes) -> None:
        """A block can be had from the pool."""
        self._add(key, True)

    def block_dropped(self, key: bytes) -> None:
        """A block cannot be had from it any more."""
        self._add(key, False)

    def check(self) -> None:
        """Asserts that what waits will be passed on."""
        assert bool(self._news) == (self._timer is not None)

    def _add(self, key: bytes, held: bool) -> None:
        self._news.append((key, held))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._pass_on)

    def _pass_on(self) -> None:
        for _ in range(min(MOST_A_TURN, len(self._news))):
            key, held = self._news.popleft()
            if held:
                self._catalogue.pool_held(key)
            else:
                self._catalogue.pool_dropped(key)
        self._timer = asyncio.get_running_loop().call_soon(self._pass_on) if self._news else None
        self._changed()
