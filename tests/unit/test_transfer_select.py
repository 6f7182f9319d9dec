"""Which transports an agent ends up with, and which it takes."""

from __future__ import annotations

import socket
import sys

import pytest
from transfer_support import PITCH, SLOTS, needs_nixl, nobody

from kvstore.peer_messages import Offer
from kvstore.region import make_region
from kvstore.transfer import nixl_agent
from kvstore.transfer.select import NAMES, choose, make_transports, start_transports
from kvstore.transfer.shm import Shm
from kvstore.transfer.tcp import Tcp


def test_they_are_made_in_the_order_given() -> None:
    assert [each.name for each in make_transports(NAMES)] == [*NAMES]
    assert [each.name for each in make_transports(["tcp", "shm"])] == ["tcp", "shm"]
    assert make_transports([]) == []


@pytest.mark.parametrize("names", [["smoke"], ["tcp", "tcp"], [""]])
def test_other_names_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="expected different ones of shm, nixl, tcp, nixl-push, got"):
        make_transports(names)


async def test_those_that_cannot_be_had_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MODULES", ("no_such_wheel",))
    region = make_region(SLOTS, PITCH)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        transports, missing = await start_transports(make_transports(NAMES, port=port), region, nobody)
    assert [each.name for each in transports] == ["shm"]
    assert sorted(missing) == ["nixl", "nixl-push", "tcp"]
    assert missing["nixl"] == "nixl: no wheel of NIXL is installed; see `make install`"
    assert missing["tcp"].startswith(f"tcp: cannot listen on 127.0.0.1:{port}")
    for transport in transports:
        await transport.close()


async def test_the_first_of_ones_own_that_reaches_is_taken() -> None:
    region = make_region(SLOTS, PITCH)
    owners, _ = await start_transports(make_transports(["tcp", "shm"]), region, nobody)
    offers = [each.offer() for each in owners]
    readers, _ = await start_transports(make_transports(["shm", "tcp"]), region, nobody)
    chosen = choose(readers, offers)
    assert chosen is not None
    assert (type(chosen[0]), chosen[1]) == (Shm, offers[1])
    elsewhere = [Offer(transport="shm", data=b"another host"), offers[0]]
    chosen = choose(readers, elsewhere)
    assert chosen is not None
    assert (type(chosen[0]), chosen[1]) == (Tcp, offers[0])
    assert choose(readers, elsewhere[:1]) is None
    assert choose([], offers) is None
    for transport in (*owners, *readers):
        await transport.close()


@needs_nixl
async def test_nixl_is_one_agent_for_both_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    region = make_region(SLOTS, PITCH)
    transports, missing = await start_transports(make_transports(["nixl", "nixl-push"]), region, nobody)
    assert not missing
    assert transports[0].offer().data == transports[1].offer().data
    for transport in transports:
        await transport.close()
    assert capfd.readouterr() == ("", "")
    assert "nixl" not in sys.modules, "the package that imports torch"
