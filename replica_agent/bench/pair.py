"""Two pools to move slots between: one of this process, one of a peer process, with every transport between them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence

from kvstore.region import make_region
from kvstore.slot import pitch_of
from kvstore.transfer.base import Authorize, Grant, Move, Plan, Region, Transport
from kvstore.transfer.loopback import Loopback, Network
from kvstore.transfer.select import make_transports, start_transports
from replica_agent.bench.peer import HOST, LEASE, SECRET, Peer, fill

_FETCH_S = 10.0


class Pair:
    """Owns the reader's pool and transports, the peer, and in this process a second pool to copy from. Made by `pair`;
    one fetch at a time."""

    def __init__(self, slots: int, block_bytes: int, peer: Peer) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        self.peer = peer
        self.region = make_region(slots, pitch_of(block_bytes))
        self.near = make_region(slots, pitch_of(block_bytes))
        self.moves = [Move(at * 7 % slots, at * 5 % slots) for at in range(slots)]
        self.transports: dict[str, Transport] = {}
        self.unavailable: dict[str, str] = {}
        self._offers = {**peer.offers}

    async def start(self, names: Sequence[str]) -> None:
        """Those that cannot be started are in `unavailable`."""
        for region in (self.near, self.region):
            fill(region, self.block_bytes, range(self.slots))
        started, self.unavailable = await start_transports(make_transports(names, host=HOST), self.region, _nobody)
        self.transports = {each.name: each for each in started}
        network = Network()
        owner, reader = Loopback(network), Loopback(network)
        await owner.start(self.near, _anybody(self.near))
        await reader.start(self.region, _nobody)
        self.transports[reader.name] = reader
        self._offers[owner.name] = owner.offer()

    async def memcpy(self) -> float:
        """Seconds that the moves take from a pool of this process, on a thread, without starting the thread."""
        return await asyncio.to_thread(self._copy, self.near, self.region, self.region.pitch)

    async def fetch(self, name: str, arrived: Callable[[int], None] = lambda index: None) -> float:
        """Seconds that the moves take over a transport. Raises RuntimeError when not all arrive."""
        plan = Plan(
            self._offers[name], HOST, LEASE, SECRET, self.moves, time.monotonic() + _FETCH_S, self.peer.caller(name)
        )
        began = time.perf_counter()
        result = await self.transports[name].fetch(plan, arrived)
        seconds = time.perf_counter() - began
        if result.error:
            raise RuntimeError(f"{result.moved} of {self.slots} slots moved: {result.error}")
        return seconds

    async def cpu_s(self) -> tuple[float, float]:
        """Processor seconds so far, of this process and of the peer."""
        theirs = (await self.peer.ask(cpu=True))["cpu_s"]
        return time.process_time(), float(theirs)

    def _copy(self, source: Region, target: Region, count: int) -> float:
        began = time.perf_counter()
        for move in self.moves:
            to, start = target.address + move.target * target.pitch, source.address + move.source * source.pitch
            ctypes.memmove(to, start, count)
        return time.perf_counter() - began


@contextlib.asynccontextmanager
async def pair(slots: int, block_bytes: int, names: Sequence[str]) -> AsyncIterator[Pair]:
    """A pair with these transports on both sides, as far as this host has them."""
    async with Peer(slots, block_bytes, names) as peer:
        made = Pair(slots, block_bytes, peer)
        await made.start(names)
        try:
            yield made
        finally:
            for transport in made.transports.values():
                await transport.close()
            for region in (made.region, made.near):
                os.close(region.fd)


def _nobody(lease: str, secret: bytes) -> Grant | None:
    return None


def _anybody(region: Region) -> Authorize:
    return lambda lease, secret: Grant(lease, frozenset(range(region.slots)), time.monotonic() + _FETCH_S)
