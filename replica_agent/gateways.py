"""What each gateway has placed on this replica: where gateways learn of each other's placements."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from kvstore.messages import MAX_GATEWAYS, GatewayLoad

SILENT_S = 1.0
"""A gateway not heard of for this long counts no more: it says something every 250 ms."""


class Gateways:
    """The last load that each gateway announced, by its name and life.

    Owns the loads, in the order in which they were heard; at most `limit` of them. `announced` changes them, and both
    it and `heard` forget those that are too old, so what they give is true for the moment only.
    """

    def __init__(self, limit: int = MAX_GATEWAYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._loads: OrderedDict[tuple[str, int], tuple[float, GatewayLoad]] = OrderedDict()
        self.announcements = 0
        self.forgotten = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._loads)

    def announced(self, load: GatewayLoad) -> bool | None:
        """Takes a load up: whether other gateways must hear of it, or None when there are too many gateways."""
        self._forget()
        name = load.gateway, load.epoch
        known = self._loads.pop(name, None)
        if known is None and len(self._loads) >= self._limit:
            self.refused += 1
            return None
        self._loads[name] = self._clock(), load
        self.announcements += 1
        # A gateway that is alone has nobody to tell, not even that it is there.
        return len(self._loads) > 1 and (known is None or known[1] != load)

    def heard(self) -> list[GatewayLoad]:
        """The loads of all gateways heard of within `SILENT_S`."""
        self._forget()
        return [load for _, load in self._loads.values()]

    def check(self) -> None:
        """Asserts that there are no more than the limit, in the order of their times, each under its own name."""
        assert len(self._loads) <= self._limit
        times = [at for at, _ in self._loads.values()]
        assert times == sorted(times)
        assert all(name == (load.gateway, load.epoch) for name, (_, load) in self._loads.items())

    def _forget(self) -> None:
        oldest = self._clock() - SILENT_S
        while self._loads and next(iter(self._loads.values()))[0] < oldest:
            self._loads.popitem(last=False)
            self.forgotten += 1
