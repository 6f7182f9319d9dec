"""What one user of a NIXL connection owes to the others."""

from __future__ import annotations

import asyncio
import time

import pytest
from transfer_support import DEADLINE_S, PITCH, SLOTS, needs_nixl, nobody

from kvstore.errors import TransferError, TransportUnavailable
from kvstore.region import make_region
from kvstore.transfer.base import Result
from kvstore.transfer.job import Job
from kvstore.transfer.nixl import Nixl
from kvstore.transfer.nixl_agent import NixlAgent, Steps

HOST = "127.0.0.1"


@needs_nixl
def test_a_move_that_fails_ends_no_other_of_its_peer() -> None:
    reader, owner = NixlAgent(HOST), NixlAgent(HOST)
    reader.open(make_region(SLOTS, PITCH))
    address = owner.open(make_region(SLOTS, PITCH))
    slots = list(range(SLOTS))
    moved: list[int] = []

    def broken(index: int) -> None:
        raise TransferError("it failed")

    def both() -> Steps:
        """Takes turns as the agent's thread does: one move fails when the other has begun."""
        good = reader.move("READ", address, slots, slots, Job(time.monotonic() + DEADLINE_S), moved.append)
        bad = reader.move("READ", address, slots, slots, Job(time.monotonic() + DEADLINE_S), broken)
        while not moved:
            yield next(good)
        assert (yield from bad).error == "it failed"
        return (yield from good)

    try:
        assert reader.submit(both()).result(DEADLINE_S) == Result(SLOTS, True)
        # And whoever comes next connects anew.
        again = reader.move("READ", address, slots, slots, Job(time.monotonic() + DEADLINE_S), moved.append)
        assert reader.submit(again).result(DEADLINE_S) == Result(SLOTS, True)
        assert moved == slots * 2
        reader.check()
    finally:
        reader.close()
        owner.close()


async def test_a_host_that_cannot_be_told_from_others_has_no_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise FileNotFoundError("no boot_id")

    monkeypatch.setattr("kvstore.transfer.nixl.host_identity", unknown)
    with pytest.raises(TransportUnavailable, match="no boot_id"):
        await asyncio.wait_for(Nixl(NixlAgent(HOST)).start(make_region(SLOTS, PITCH), nobody), DEADLINE_S)
