"""What every transport owes to those who fetch over it, whatever happens to the owner. The owner is another process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from transfer_support import (
    BLOCK_BYTES,
    DEADLINE_S,
    PITCH,
    PROCESS_TRANSPORTS,
    SLOTS,
    Reader,
    everybody,
    freeze_and_wait,
    kill_and_wait,
    moves,
    on_loop,
    pass_time_until,
)

from kvstore.peer_messages import Offer
from kvstore.region import make_region
from kvstore.transfer.base import Move, Result
from kvstore.transfer.loopback import Loopback, Network
from kvstore.transfer.nixl import Nixl
from kvstore.transfer.select import make_transports
from kvstore.transfer.shm import Shm
from kvstore.transfer.tcp import Tcp
from replica_agent.bench.peer import HOST, Peer, fill

ALL = ["loopback", *PROCESS_TRANSPORTS]


@asynccontextmanager
async def joined(name: str, pitch: int = PITCH) -> AsyncIterator[tuple[Reader, Offer, Peer | None]]:
    """A reader with slots of that size, and an owner it can read from; both end with the context."""
    if name == "loopback":
        network = Network()
        region = make_region(SLOTS, PITCH)
        fill(region, BLOCK_BYTES, range(SLOTS))
        owner = Loopback(network)
        await owner.start(region, everybody(region))
        reader = await Reader.started(Loopback(network), pitch)
        yield reader, owner.offer(), None
        return
    async with Peer(SLOTS, BLOCK_BYTES, [name]) as peer:
        assert not peer.unavailable
        (transport,) = make_transports([name], host=HOST)
        reader = await Reader.started(transport, pitch)
        try:
            yield reader, peer.offers[name], peer
            assert isinstance(transport, Shm | Tcp | Nixl)
            transport.check()
        finally:
            await transport.close()
            os.close(reader.region.fd)


@pytest.mark.parametrize("name", ALL)
async def test_every_slot_arrives_in_order_and_no_other_is_touched(name: str) -> None:
    async with joined(name) as (reader, offer, owner):
        assert reader.transport.reaches(offer)
        some = moves()[:21]
        assert await reader.fetch(reader.plan(offer, owner, what=some)) == Result(21, True)
        others = set(range(SLOTS)) - {move.target for move in some}
        assert not any(any(reader.slot(target)[::4096]) for target in others)
        for _ in range(3):
            assert await reader.fetch(reader.plan(offer, owner)) == Result(SLOTS, True)
        assert await reader.fetch(reader.plan(offer, owner, what=[])) == Result(0, True)


@pytest.mark.parametrize("name", ALL)
async def test_several_fetches_at_once(name: str) -> None:
    async with joined(name) as (reader, offer, owner):
        readers = [reader]
        for _ in range(4):
            readers.append(Reader(reader.transport, reader.region))
        parts = [moves()[at::5] for at in range(5)]
        plans = [each.plan(offer, owner, what=part) for each, part in zip(readers, parts, strict=True)]
        results = await asyncio.gather(*(each.fetch(plan) for each, plan in zip(readers, plans, strict=True)))
        assert results == [Result(len(part), True) for part in parts]


@pytest.mark.parametrize("name", ALL)
async def test_a_deadline_ends_it(name: str) -> None:
    async with joined(name) as (reader, offer, owner):
        assert (await reader.fetch(reader.plan(offer, owner))).moved == SLOTS, "connected"
        plan = reader.plan(offer, owner, seconds=0.3)
        reader.actions[3] = lambda: pass_time_until(plan.deadline)
        result = await reader.fetch(plan)
        assert result.moved >= 4
        # A push has landed as fast as the owner could write; nothing else may have moved on.
        if name != "nixl-push":
            assert result == Result(4, True, "the deadline has passed")
        past = reader.plan(offer, owner, seconds=-1.0)
        assert await reader.fetch(past) == Result(0, True, "the deadline has passed")


@pytest.mark.parametrize("name", ALL)
async def test_cancelling_ends_it_when_the_targets_are_safe(name: str) -> None:
    async with joined(name) as (reader, offer, owner):
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(reader.fetch(reader.plan(offer, owner)))
        reader.actions[3] = lambda: on_loop(loop, task.cancel)
        result = await task
        assert result.moved >= 4
        if name != "nixl-push":
            assert result == Result(4, True, "cancelled")
        reader.actions.clear()
        assert (await reader.fetch(reader.plan(offer, owner))).moved == SLOTS, "it can be used again"


@pytest.mark.parametrize("name", PROCESS_TRANSPORTS)
async def test_closing_ends_it(name: str) -> None:
    async with joined(name) as (reader, offer, owner):
        closing: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        reader.actions[3] = lambda: on_loop(loop, lambda: closing.append(loop.create_task(reader.transport.close())))
        result = await reader.fetch(reader.plan(offer, owner))
        await asyncio.wait_for(closing[0], DEADLINE_S)
        if name != "nixl-push":
            assert result == Result(4, True, "cancelled")
        assert owner is not None
        await owner.kill()


@pytest.mark.parametrize("name", ["loopback", "tcp"])
async def test_nothing_is_served_without_the_lease(name: str) -> None:
    async with joined(name) as (reader, offer, owner):
        result = await reader.fetch(reader.plan(offer, owner, secret=b"another's"))
        assert result == Result(0, True, "the owner refuses: no such lease")
        result = await reader.fetch(reader.plan(offer, owner, what=[Move(SLOTS, 0)]))
        assert result == Result(0, True, "the owner refuses: no such lease")
        assert (await reader.fetch(reader.plan(offer, owner))).moved == SLOTS


async def test_a_lease_that_ends_stops_the_bytes() -> None:
    async with joined("tcp") as (reader, offer, owner):
        assert owner is not None
        loop = asyncio.get_running_loop()
        reader.actions[0] = lambda: asyncio.run_coroutine_threadsafe(owner.ask(over=True), loop).result(DEADLINE_S)
        # More than the kernel has on its way.
        many = moves() * 16
        result = await reader.fetch(reader.plan(offer, owner, what=many))
        assert 0 < result.moved < len(many)
        assert result.stopped


@pytest.mark.parametrize("name", PROCESS_TRANSPORTS)
async def test_an_owner_that_is_killed(name: str) -> None:
    """Between fetches and in the middle of one: never an exception, never bytes that are not the block's."""
    async with joined(name) as (reader, offer, owner):
        assert owner is not None
        reader.actions[3] = lambda: kill_and_wait(owner)
        result = await reader.fetch(reader.plan(offer, owner))
        assert result.moved >= 4
        if name == "shm":
            assert result == Result(SLOTS, True), "its memory outlives it"
        elif name != "nixl-push":
            assert result.stopped
        reader.actions.clear()
        again = await reader.fetch(reader.plan(offer, owner))
        assert again.moved == 0
        assert again.error


@pytest.mark.parametrize("name", PROCESS_TRANSPORTS)
async def test_an_owner_that_is_frozen(name: str) -> None:
    async with joined(name) as (reader, offer, owner):
        assert owner is not None
        assert (await reader.fetch(reader.plan(offer, owner))).moved == SLOTS, "connected"
        freeze_and_wait(owner)
        result = await reader.fetch(reader.plan(offer, owner, seconds=0.5))
        if name in ("shm", "nixl"):
            assert result == Result(SLOTS, True), "neither needs the owner's CPU"
        else:
            assert result.stopped == (name == "tcp")
            assert result.moved < SLOTS
        os.kill(owner.pid, signal.SIGCONT)
        assert await reader.fetch(reader.plan(offer, owner)) == Result(SLOTS, True), "it lives on"


@pytest.mark.parametrize("name", PROCESS_TRANSPORTS)
async def test_an_owner_that_is_frozen_before_the_first_fetch(name: str) -> None:
    async with joined(name) as (reader, offer, owner):
        assert owner is not None
        freeze_and_wait(owner)
        result = await reader.fetch(reader.plan(offer, owner, seconds=0.3))
        if name == "shm":
            assert result == Result(SLOTS, True)
        else:
            # Nobody can say whether what NIXL has been asked for comes after all.
            assert result == Result(0, name == "tcp", "the deadline has passed")
        os.kill(owner.pid, signal.SIGCONT)
        assert await reader.fetch(reader.plan(offer, owner)) == Result(SLOTS, True), "it lives on"


@pytest.mark.parametrize("name", PROCESS_TRANSPORTS)
async def test_an_owner_that_is_restarted(name: str) -> None:
    async with joined(name) as (reader, old, owner):
        assert owner is not None
        assert (await reader.fetch(reader.plan(old, owner))).moved == SLOTS
        await owner.kill()
        async with Peer(SLOTS, BLOCK_BYTES, [name]) as life:
            assert await reader.fetch(reader.plan(life.offers[name], life)) == Result(SLOTS, True)


@pytest.mark.parametrize("name", ALL)
async def test_slots_of_another_size_are_refused(name: str) -> None:
    async with joined(name, PITCH + 4096) as (reader, offer, owner):
        result = await reader.fetch(reader.plan(offer, owner))
        assert result == Result(0, True, f"the owner's slots have {PITCH} bytes, ours {PITCH + 4096}")


@pytest.mark.parametrize("name", PROCESS_TRANSPORTS)
async def test_an_offer_that_makes_no_sense(name: str) -> None:
    async with joined(name) as (reader, _, owner):
        for data in (b"", b"\xc1", b"\x93\x01\x02\x03", b"\x98" + b"\x91" * 5_000, b"\x91" * 5_000):
            offer = Offer(transport=name, data=data)
            reader.transport.reaches(offer)  # says no, or that a fetch will
            result = await reader.fetch(reader.plan(offer, owner))
            assert (result.moved, result.stopped) == (0, True)
