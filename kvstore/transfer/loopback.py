"""Both pools in one process. A transport like the others, public because tests of whoever fetches need one that fails
on demand: a `Network` joins the agents of a test, and its `Faults` say what goes wrong between them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.peer_messages import Offer
from kvstore.transfer.base import Arrived, Authorize, Move, Plan, Region, Result, Transport
from kvstore.transfer.job import CANCELLED, DEADLINE, size_error


@dataclass
class Faults:
    """What goes wrong in the fetches of a network from now on; all of it can be changed between and during fetches.

    `stop_after`: the owner fails after so many moves. `corrupt`: a byte is changed in these moves. `hold`: from move
    `hold_at` on, nothing goes on before this event is set. `late`: what a deadline or a cancellation cuts short is
    still on its way, and lands when `Network.land` says so.
    """

    stop_after: int | None = None
    corrupt: frozenset[int] = frozenset()
    hold: asyncio.Event | None = None
    hold_at: int = 0
    late: bool = False


class _Owner(NamedTuple):
    region: Region
    authorize: Authorize


@dataclass
class Network:
    """Who can reach whom: all that start on one network. Owns the moves that are late; used on one event loop."""

    faults: Faults = field(default_factory=Faults)
    _owners: dict[bytes, _Owner] = field(default_factory=dict)
    _late: list[tuple[Region, Region, Move]] = field(default_factory=list)

    def land(self) -> int:
        """The late moves arrive now, with what their sources hold now; says how many."""
        landed, self._late = self._late, []
        for source, target, move in landed:
            _copy(source, target, move)
        return len(landed)


class Loopback(Transport):
    """One agent on a network. Owns its membership; reads the pools of the others where they are."""

    name = "loopback"

    def __init__(self, network: Network) -> None:
        self._network = network
        self._address = secrets.token_bytes(8)
        self._region: Region | None = None

    async def start(self, region: Region, authorize: Authorize) -> None:
        self._region = region
        self._network._owners[self._address] = _Owner(region, authorize)

    def offer(self) -> Offer:
        return Offer(transport=self.name, data=self._address)

    def reaches(self, offer: Offer) -> bool:
        return offer.transport == self.name and offer.data in self._network._owners

    async def fetch(self, plan: Plan, arrived: Arrived) -> Result:
        assert self._region is not None, "started"
        owner = self._network._owners.get(plan.offer.data)
        if owner is None:
            return Result(0, True, "the owner is gone")
        if why := size_error(owner.region.pitch, self._region.pitch):
            return Result(0, True, why)
        for index, move in enumerate(plan.moves):
            why = self._refusal(owner, plan, move) or await self._faulty(plan, index)
            if why:
                late = self._network.faults.late and why in (DEADLINE, CANCELLED)
                if late:
                    self._network._late += [(owner.region, self._region, each) for each in plan.moves[index:]]
                return Result(index, not late, why)
            _copy(owner.region, self._region, move)
            if index in self._network.faults.corrupt:
                at = move.target * self._region.pitch
                self._region.memory[at] ^= 0xFF
            arrived(index)
        return Result(len(plan.moves), True)

    def _refusal(self, owner: _Owner, plan: Plan, move: Move) -> str:
        if plan.offer.data not in self._network._owners:
            return "the owner is gone"
        grant = owner.authorize(plan.lease, plan.secret)
        if grant is None or move.source not in grant.slots or time.monotonic() >= grant.deadline:
            return "the owner refuses: no such lease"
        return ""

    async def _faulty(self, plan: Plan, index: int) -> str:
        """Why the fetch ends before this move; "" when it does not."""
        faults = self._network.faults
        try:
            if faults.hold is not None and index >= faults.hold_at:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(plan.deadline - time.monotonic()):
                        await faults.hold.wait()
            else:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            return CANCELLED
        if time.monotonic() >= plan.deadline:
            return DEADLINE
        return "the owner failed" if faults.stop_after is not None and index >= faults.stop_after else ""

    async def close(self) -> None:
        self._network._owners.pop(self._address, None)


def _copy(source: Region, target: Region, move: Move) -> None:
    pitch = target.pitch
    target.memory[move.target * pitch : (move.target + 1) * pitch] = source.memory[
        move.source * pitch : (move.source + 1) * pitch
    ]
