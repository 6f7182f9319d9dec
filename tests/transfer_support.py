"""What the tests of transports share: a reader's side of a fetch that acts at a given slot, and owners to read from."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvstore.errors import TransferError
from kvstore.peer_messages import Offer
from kvstore.region import make_region
from kvstore.slot import pitch_of, verify
from kvstore.transfer.base import Authorize, Grant, Move, Plan, Region, Result, Transport
from replica_agent.bench.peer import GENERATION, HOST, LEASE, SECRET, Peer, key_of

SLOTS = 64
BLOCK_BYTES = 60_000
PITCH = pitch_of(BLOCK_BYTES)
DEADLINE_S = 20.0
BETWEEN_PROCESSES = ("shm", "tcp", "nixl", "nixl-push")

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl_cu13") is None,
    reason="no wheel of NIXL is installed",
)
PROCESS_TRANSPORTS = [
    pytest.param(name, marks=needs_nixl) if name.startswith("nixl") else name for name in BETWEEN_PROCESSES
]


def moves(count: int = SLOTS) -> list[Move]:
    """Scattered on both sides."""
    return [Move((index * 7 + 3) % SLOTS, (index * 5 + 1) % SLOTS) for index in range(count)]


def nobody(lease: str, secret: bytes) -> Grant | None:
    """An `Authorize` of one whom nobody may read."""
    return None


def everybody(region: Region) -> Authorize:
    """An `Authorize` that knows the one lease of `Reader`."""

    def authorize(lease: str, secret: bytes) -> Grant | None:
        if (lease, secret) != (LEASE, SECRET):
            return None
        return Grant(lease, frozenset(range(region.slots)), time.monotonic() + DEADLINE_S)

    return authorize


class Reader:
    """One transport with an empty pool, and a plan's worth of calls. Whatever has arrived is verified at once."""

    def __init__(self, transport: Transport, region: Region) -> None:
        self.transport = transport
        self.region = region
        self.arrived: list[int] = []
        self.actions: dict[int, Callable[[], object]] = {}

    @classmethod
    async def started(cls, transport: Transport, pitch: int = PITCH) -> Reader:
        reader = cls(transport, make_region(SLOTS, pitch))
        await transport.start(reader.region, nobody)
        return reader

    def slot(self, target: int) -> memoryview:
        return self.region.memory[target * PITCH : (target + 1) * PITCH]

    def plan(
        self,
        offer: Offer,
        owner: Peer | None = None,
        *,
        what: Sequence[Move] | None = None,
        seconds: float = DEADLINE_S,
        secret: bytes = SECRET,
    ) -> Plan:
        call = owner.caller(self.transport.name) if owner is not None else _no_call
        planned = moves() if what is None else what
        return Plan(offer, HOST, LEASE, secret, planned, time.monotonic() + seconds, call)

    async def fetch(self, plan: Plan) -> Result:
        """Its result, with what every transport owes checked: order, bytes that are there when they are reported, and
        a reason for whatever did not move."""
        self.arrived = []

        def arrived(index: int) -> None:
            move = plan.moves[index]
            verify(self.slot(move.target), BLOCK_BYTES, key_of(move.source), GENERATION)
            self.arrived.append(index)
            if (action := self.actions.get(index)) is not None:
                action()

        result = await self.transport.fetch(plan, arrived)
        assert self.arrived == list(range(result.moved))
        assert bool(result.error) == (result.moved < len(plan.moves)), result
        return result


def on_loop(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
    """Act on the event loop from whatever thread a fetch runs on, and return when the loop has dealt with it."""
    if threading.current_thread() is threading.main_thread():
        action()
        return
    done = threading.Event()

    def later(turns: int) -> None:
        if turns:
            loop.call_soon(later, turns - 1)
        else:
            done.set()

    loop.call_soon_threadsafe(lambda: (action(), later(20)))
    assert done.wait(DEADLINE_S)


def kill_and_wait(owner: Peer) -> None:
    """From any thread: the process is gone when this returns, but for its exit status."""
    os.kill(owner.pid, signal.SIGKILL)
    wait_for_state(owner.pid, "Z")


def freeze_and_wait(owner: Peer) -> None:
    """All its threads have stopped when this returns."""
    os.kill(owner.pid, signal.SIGSTOP)
    wait_for_state(owner.pid, "T")


def wait_for_state(pid: int, state: str) -> None:
    """Until all threads of a process are in that state, or gone."""
    deadline = time.monotonic() + DEADLINE_S
    while thread_states(pid) - {state}:
        assert time.monotonic() < deadline, f"process {pid} does not come to state {state}"


def thread_states(pid: int) -> set[str]:
    """The kernel's letters for what the threads of a process do."""
    states = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                states.add(Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0])
    return states


def pass_time_until(deadline: float) -> None:
    """Holds a fetch up, on its own thread, until its deadline has passed."""
    while time.monotonic() < deadline:
        pass


async def _no_call(message: bytes) -> bytes:
    raise TransferError("this transport calls nobody")
