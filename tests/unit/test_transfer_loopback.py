"""The transport for tests, and what it does on demand."""

from __future__ import annotations

import asyncio

import pytest
from transfer_support import BLOCK_BYTES, PITCH, SLOTS, Reader, everybody, moves

from kvstore.errors import WrongBytes
from kvstore.peer_messages import Offer
from kvstore.region import make_region
from kvstore.slot import verify
from kvstore.transfer.base import Result
from kvstore.transfer.loopback import Faults, Loopback, Network
from replica_agent.bench.peer import GENERATION, fill, key_of

WAIT_S = 10.0


async def joined(network: Network) -> tuple[Reader, Offer, Loopback]:
    region = make_region(SLOTS, PITCH)
    fill(region, BLOCK_BYTES, range(SLOTS))
    owner = Loopback(network)
    await owner.start(region, everybody(region))
    return await Reader.started(Loopback(network)), owner.offer(), owner


async def test_an_owner_fails_after_so_many() -> None:
    network = Network(Faults(stop_after=5))
    reader, offer, _ = await joined(network)
    assert await reader.fetch(reader.plan(offer)) == Result(5, True, "the owner failed")
    network.faults = Faults()
    assert await reader.fetch(reader.plan(offer)) == Result(SLOTS, True)


async def test_bytes_are_corrupted_where_asked() -> None:
    network = Network(Faults(corrupt=frozenset({2})))
    reader, offer, _ = await joined(network)
    plan = reader.plan(offer)
    assert await reader.transport.fetch(plan, lambda index: None) == Result(SLOTS, True)
    for index, move in enumerate(moves()):
        if index == 2:
            with pytest.raises(WrongBytes):
                verify(reader.slot(move.target), BLOCK_BYTES, key_of(move.source), GENERATION)
        else:
            verify(reader.slot(move.target), BLOCK_BYTES, key_of(move.source), GENERATION)


async def test_a_fetch_is_held_until_it_is_let_go() -> None:
    network = Network(Faults(hold=asyncio.Event(), hold_at=3))
    reader, offer, _ = await joined(network)
    reached = asyncio.Event()
    reader.actions[2] = reached.set
    task = asyncio.create_task(reader.fetch(reader.plan(offer)))
    await asyncio.wait_for(reached.wait(), WAIT_S)
    assert not task.done()
    assert network.faults.hold is not None
    network.faults.hold.set()
    assert await asyncio.wait_for(task, WAIT_S) == Result(SLOTS, True)


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_what_was_given_up_lands_late(how: str) -> None:
    network = Network(Faults(hold=asyncio.Event(), hold_at=3, late=True))
    reader, offer, _ = await joined(network)
    reached = asyncio.Event()
    reader.actions[2] = reached.set
    task = asyncio.create_task(reader.fetch(reader.plan(offer, seconds=0.05 if how == "deadline" else WAIT_S)))
    await asyncio.wait_for(reached.wait(), WAIT_S)
    if how == "cancel":
        task.cancel()
    result = await asyncio.wait_for(task, WAIT_S)
    assert result == Result(3, False, "the deadline has passed" if how == "deadline" else "cancelled")
    late = moves()[3]
    assert not any(reader.slot(late.target)[:100])
    assert network.land() == SLOTS - 3
    verify(reader.slot(late.target), BLOCK_BYTES, key_of(late.source), GENERATION)
    assert network.land() == 0


async def test_an_owner_that_left() -> None:
    network = Network()
    reader, offer, owner = await joined(network)
    await owner.close()
    assert not reader.transport.reaches(offer)
    assert await reader.fetch(reader.plan(offer)) == Result(0, True, "the owner is gone")
