"""What keeps a replica busy beside this gateway's own requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from gateway.fleet.inflight import InFlight
from kvstore.messages import GatewayLoad, Heartbeat

STALE_S = 1.0
"""Agents say something every 250 ms; what was heard longer ago says nothing about now."""

OUTSIDE_S = 1.0
"""What an engine has in excess of all that gateways placed counts once it has been there for so long: engines' figures
are as old as an agent's last look at them, and a request that has just ended is still in them."""


class GatewayId(NamedTuple):
    """A gateway's name, and its life: when it was started, in ns. Two gateways of one name are two."""

    name: str
    epoch: int


class Load(NamedTuple):
    """Requests on a replica, and those of their uncached prompt tokens that wait for their first token."""

    sequences: int
    prefill_tokens: int


NOTHING = Load(0, 0)


class Lasting:
    """The least of a figure over one to two windows of time: what was there all along. 0 until a window has passed."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._until = 0.0
        self._least = self._before = 0

    def see(self, value: int, now: float) -> None:
        """The figure is `value` now."""
        if now < self._until:
            self._least = min(self._least, value)
            return
        self._before = self._least if now < self._until + self._window_s else 0
        self._least, self._until = value, now + self._window_s

    @property
    def value(self) -> int:
        """What lasts; never negative."""
        return max(0, min(self._before, self._least))


class Others:
    """The load that other gateways announced at a replica's agent, and what its engine does for nobody that announces.

    Owns what the last heartbeat said; only the report stream calls `told`. `gateways` are the other gateways that the
    agent hears of, `announced` their load. A figure is good for `STALE_S`: after that
    nothing is known, and the caller has to assume something (`Fleet.views`).
    """

    def __init__(self, me: GatewayId, clock: Callable[[], float] = time.monotonic) -> None:
        self._me = me
        self._clock = clock
        self._heard_at = -STALE_S
        self._outside_sequences = Lasting(OUTSIDE_S)
        self._outside_tokens = Lasting(OUTSIDE_S)
        self.gateways: list[GatewayLoad] = []
        self.announced = NOTHING
        self._load = NOTHING

    def told(self, beat: Heartbeat, own: InFlight) -> None:
        """A heartbeat came; `own` is what this gateway has placed there until now."""
        now = self._heard_at = self._clock()
        self.gateways = [load for load in beat.gateways if (load.gateway, load.epoch) != self._me]
        sequences = sum(load.sequences for load in self.gateways)
        tokens = sum(load.prefill_tokens for load in self.gateways)
        self.announced = Load(sequences, tokens)
        self._outside_sequences.see(beat.running + beat.waiting - sequences - own.sequences, now)
        if beat.queued_prefill_tokens is not None:
            self._outside_tokens.see(beat.queued_prefill_tokens - tokens - own.prefill_tokens, now)
        outside = self.outside
        self._load = Load(sequences + outside.sequences, tokens + outside.prefill_tokens)

    @property
    def fresh(self) -> bool:
        """Whether what was heard is still news."""
        return self._clock() - self._heard_at <= STALE_S

    @property
    def outside(self) -> Load:
        """Of nobody that announces: clients of the engine itself, or gateways that its agent does not hear of."""
        return Load(self._outside_sequences.value, self._outside_tokens.value)

    @property
    def load(self) -> Load | None:
        """All of it; None where nothing has been heard for too long."""
        return self._load if self.fresh else None

    def check(self) -> None:
        """Asserts that the sums are those of the gateways, none of which is this one."""
        assert all((load.gateway, load.epoch) != self._me for load in self.gateways)
        assert self.announced.sequences == sum(load.sequences for load in self.gateways)
        assert self.announced.prefill_tokens == sum(load.prefill_tokens for load in self.gateways)
        assert min(self.outside) >= 0
