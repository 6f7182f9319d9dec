"""The TCP transport over mutual TLS: blocks arrive as without, and nobody else gets any."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest
from tls_support import ENGINE_NAME, Pki
from transfer_support import BLOCK_BYTES, PITCH, SLOTS, Reader, everybody, moves, pass_time_until

from kvstore.client_tls import client_context
from kvstore.peer_messages import Offer
from kvstore.region import make_region
from kvstore.server_tls import server_context
from kvstore.transfer import tcp_owner
from kvstore.transfer.base import Result
from kvstore.transfer.tcp import Tcp, TcpTls
from replica_agent.bench.peer import HOST, fill


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


def tls_of(certificate: tuple[str, str], ca_file: str, server_name: str = ENGINE_NAME) -> TcpTls:
    return TcpTls(
        server_context(*certificate, ca_file, require=True), client_context(ca_file, *certificate), server_name
    )


@contextlib.asynccontextmanager
async def owning(tls: TcpTls | None) -> AsyncIterator[tuple[Tcp, Offer]]:
    region = make_region(SLOTS, PITCH)
    fill(region, BLOCK_BYTES, range(SLOTS))
    owner = Tcp(HOST, tls=tls)
    await owner.start(region, everybody(region))
    try:
        yield owner, owner.offer()
        assert owner._owner is not None
        owner._owner.check()
    finally:
        await owner.close()
        os.close(region.fd)


@contextlib.asynccontextmanager
async def reading(tls: TcpTls | None) -> AsyncIterator[Reader]:
    reader = await Reader.started(Tcp(HOST, tls=tls))
    try:
        yield reader
        assert isinstance(reader.transport, Tcp)
        reader.transport.check()
    finally:
        await reader.transport.close()
        os.close(reader.region.fd)


async def test_blocks_arrive_and_connections_are_kept(pki: Pki) -> None:
    own = tls_of(pki.engine, pki.ca_file)
    async with owning(own) as (owner, offer), reading(own) as reader:
        assert reader.transport.reaches(offer)
        for _ in range(3):
            assert await reader.fetch(reader.plan(offer)) == Result(SLOTS, True)
        assert await reader.fetch(reader.plan(offer, what=[])) == Result(0, True)
        assert owner._owner is not None
        assert len(owner._owner._readers) == 1, "one connection was enough"
        refused = await reader.fetch(reader.plan(offer, secret=b"x" * 16))
        assert (refused.moved, refused.error) == (0, "the owner refuses: no such lease")
        readers = [Reader(reader.transport, reader.region) for _ in range(4)]
        parts = [moves()[at::4] for at in range(4)]
        results = await asyncio.gather(
            *(each.fetch(each.plan(offer, what=part)) for each, part in zip(readers, parts, strict=True))
        )
        assert results == [Result(len(part), True) for part in parts]


async def test_a_deadline_cuts_it_short(pki: Pki) -> None:
    own = tls_of(pki.engine, pki.ca_file)
    async with owning(own) as (_, offer), reading(own) as reader:
        plan = reader.plan(offer, seconds=1.0)
        reader.actions[3] = lambda: pass_time_until(plan.deadline)
        result = await reader.fetch(plan)
        assert (result.moved, result.stopped, result.error) == (4, True, "the deadline has passed")
        assert await reader.fetch(reader.plan(offer)) == Result(SLOTS, True)


async def test_only_certificates_of_the_authority(pki: Pki) -> None:
    own = tls_of(pki.engine, pki.ca_file)
    async with owning(own) as (_, offer):
        for tls in (
            tls_of(pki.stranger, pki.ca_file),
            tls_of(pki.engine, pki.other_ca_file),
            tls_of(pki.engine, pki.ca_file, "somebody.else"),
        ):
            async with reading(tls) as reader:
                result = await reader.fetch(reader.plan(offer))
                assert (result.moved, result.stopped) == (0, True)
                assert result.error.startswith("the owner failed: "), result.error
                assert not any(reader.region.memory[::4096])
        async with reading(own) as reader:
            assert await reader.fetch(reader.plan(offer)) == Result(SLOTS, True)


async def test_plain_and_encrypted_do_not_reach_each_other(pki: Pki) -> None:
    own = tls_of(pki.engine, pki.ca_file)
    async with owning(own) as (_, encrypted), owning(None) as (_, plain), reading(own) as safe, reading(None) as unsafe:
        assert (safe.transport.reaches(encrypted), safe.transport.reaches(plain)) == (True, False)
        assert (unsafe.transport.reaches(encrypted), unsafe.transport.reaches(plain)) == (False, True)
        result = await unsafe.fetch(unsafe.plan(encrypted))
        assert (result.moved, result.stopped) == (0, True)


async def test_who_says_nothing_is_hung_up_on(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "STALL_S", 0.2)
    async with owning(tls_of(pki.engine, pki.ca_file)) as (owner, _):
        assert owner._owner is not None

        def silent() -> bytes:
            assert owner._owner is not None
            with socket.create_connection((HOST, owner._owner.port), 10) as connection:
                return connection.recv(1)

        assert await asyncio.to_thread(silent) == b""
