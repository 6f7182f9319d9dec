"""Shared memory: only the pool that was offered is mapped, and an owner that is gone is let go."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from transfer_support import BLOCK_BYTES, PITCH, SLOTS, Reader, everybody

from kvstore.peer_messages import Offer
from kvstore.region import make_region
from kvstore.transfer import shm
from kvstore.transfer.base import Move, Result
from kvstore.transfer.shm import Shm
from replica_agent.bench.peer import Peer, fill

WAIT_S = 10.0


def changed(offer: Offer, **fields: object) -> Offer:
    """The offer with other values; fields by their place."""
    values = msgspec.msgpack.decode(offer.data)
    for place, value in fields.items():
        values[int(place.removeprefix("at"))] = value
    return Offer(transport="shm", data=msgspec.msgpack.encode(values))


def offered(fd: int, offer: Offer) -> Offer:
    """An offer of another file of this process, true in every field."""
    status = os.fstat(fd)
    return changed(offer, at1=os.getpid(), at2=fd, at3=os.urandom(16), at4=status.st_dev, at5=status.st_ino)


async def test_only_the_pool_that_was_offered_is_mapped() -> None:
    region = make_region(SLOTS, PITCH)
    fill(region, BLOCK_BYTES, range(SLOTS))
    owner = Shm()
    await owner.start(region, everybody(region))
    reader = await Reader.started(Shm())
    offer = owner.offer()
    assert await reader.fetch(reader.plan(offer)) == Result(SLOTS, True)

    other = make_region(SLOTS, PITCH)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, SLOTS * PITCH)
    with tempfile.TemporaryFile() as file:
        file.truncate(SLOTS * PITCH)
        short = make_region(SLOTS - 1, PITCH)
        for told, why in (
            (changed(offer, at2=other.fd, at3=b"new"), "the owner is gone"),
            (changed(offer, at2=100_000), "No such file"),
            (offered(unsealed, offer), "it is not sealed against shrinking"),
            (offered(short.fd, offer), "it is not the file that was offered"),
            (offered(file.fileno(), offer), "Invalid argument"),
        ):
            result = await reader.fetch(reader.plan(told))
            assert (result.moved, result.stopped) == (0, True)
            assert why in result.error
    assert await reader.fetch(reader.plan(offered(other.fd, offer), what=[])) == Result(0, True)
    os.close(unsealed)
    await owner.close()
    await reader.transport.close()


async def test_slots_beyond_the_pool_are_not_read() -> None:
    region = make_region(SLOTS, PITCH)
    owner = Shm()
    await owner.start(region, everybody(region))
    reader = await Reader.started(Shm())
    for source in (-1, SLOTS, 1 << 50):
        plan = reader.plan(owner.offer(), what=[Move(source, 0)])
        assert await reader.fetch(plan) == Result(0, True, f"the owner has no slot {source}")
    await owner.close()
    await reader.transport.close()


async def test_another_host_is_not_reached() -> None:
    owner = Shm()
    region = make_region(SLOTS, PITCH)
    await owner.start(region, everybody(region))
    assert owner.reaches(owner.offer())
    assert not owner.reaches(changed(owner.offer(), at0="another boot"))
    assert not owner.reaches(changed(owner.offer(), at5=1))
    assert not owner.reaches(Offer(transport="shm", data=b"junk"))
    assert not owner.reaches(Offer(transport="tcp", data=owner.offer().data))
    await owner.close()


async def test_the_memory_of_an_owner_that_died_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "IDLE_S", 0.05)
    reader = await Reader.started(Shm())
    async with Peer(SLOTS, BLOCK_BYTES, ["shm"]) as peer:
        assert await reader.fetch(reader.plan(peer.offers["shm"])) == Result(SLOTS, True)
        assert read_only_pools()

    async def unmapped() -> None:
        while read_only_pools():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(unmapped(), WAIT_S)
    await reader.transport.close()


def read_only_pools() -> list[str]:
    """Pools of others in this process's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "kvstore-pool" in line and " r--s " in line]
