"""The TCP transport against peers that do not keep to the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from agent_support import until
from transfer_support import BLOCK_BYTES, PITCH, SLOTS, Reader, everybody, nobody

from kvstore.errors import TransportUnavailable
from kvstore.peer_messages import Offer
from kvstore.region import make_region
from kvstore.transfer import tcp_owner
from kvstore.transfer.base import Grant, Result
from kvstore.transfer.tcp import Tcp
from replica_agent.bench.peer import HOST, LEASE, SECRET, fill

WAIT_S = 10.0


@contextlib.asynccontextmanager
async def owner_and_reader() -> AsyncIterator[tuple[Reader, Offer, int]]:
    region = make_region(SLOTS, PITCH)
    fill(region, BLOCK_BYTES, range(SLOTS))
    owner, reading = Tcp(HOST), Tcp(HOST)
    await owner.start(region, everybody(region))
    reader = await Reader.started(reading)
    try:
        yield reader, owner.offer(), msgspec.msgpack.decode(owner.offer().data)[0]
    finally:
        await reading.close()
        await owner.close()


def said(port: int, what: bytes, *, half: bool = False) -> bytes:
    """What an owner answers to bytes before it hangs up; `half`: they end there."""
    with socket.create_connection((HOST, port), WAIT_S) as connection:
        # An owner that hangs up with bytes unread resets the connection, maybe while these are being sent.
        with contextlib.suppress(ConnectionError):
            connection.sendall(what)
            if half:
                connection.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(4096):
                found += part
    return found


async def test_garbage_is_hung_up_on() -> None:
    rng = random.Random(7)
    async with owner_and_reader() as (reader, offer, port):
        for what in (
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            b"\0\0\0\0",
            b"\xff\xff\xff\xff",
            b"\x03\0\0\0abc",
            b"\x04\0\0\0\x93\xa1x\x01",
            (5_000).to_bytes(4, "little") + b"\x91" * 5_000,
            rng.randbytes(100_000),
        ):
            assert await asyncio.to_thread(said, port, what) == b"", what[:10]
        assert await asyncio.to_thread(said, port, b"\x50\0\0\0half an ask", half=True) == b""
        assert await reader.fetch(reader.plan(offer)) == Result(SLOTS, True)


async def test_slots_that_no_pool_has_are_refused() -> None:
    async with owner_and_reader() as (_, _, port):
        for slots in ([-1], [SLOTS], [1 << 40]):
            body = msgspec.msgpack.encode(("lease", b"secret of a benchmark", slots))
            answer = await asyncio.to_thread(said, port, len(body).to_bytes(4, "little") + body, half=True)
            assert b"no such lease" in answer


async def test_the_lease_is_looked_at_once_for_several_slots() -> None:
    """What a look costs may grow with the lease, so one for each slot would cost the square of a prompt's length."""
    region = make_region(SLOTS, PITCH)
    fill(region, BLOCK_BYTES, range(SLOTS))
    looks = []

    def authorize(lease: str, secret: bytes) -> Grant | None:
        looks.append(lease)
        return everybody(region)(lease, secret)

    owner, reading = Tcp(HOST), Tcp(HOST)
    await owner.start(region, authorize)
    reader = await Reader.started(reading)
    assert await reader.fetch(reader.plan(owner.offer())) == Result(SLOTS, True)
    assert len(looks) == 1 + SLOTS // tcp_owner.AT_ONCE
    await reading.close()
    await owner.close()


async def test_no_more_readers_than_there_are_threads_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "MAX_CONNECTIONS", 2)
    async with owner_and_reader() as (reader, offer, port):
        # Each is being answered, and takes so little of it that it stays so.
        ask = msgspec.msgpack.encode((LEASE, SECRET, [*range(SLOTS)] * 16))
        frame = len(ask).to_bytes(4, "little") + ask
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                connection = stack.enter_context(socket.create_connection((HOST, port), WAIT_S))
                connection.sendall(frame)
                assert await asyncio.to_thread(connection.recv, 100)
            result = await reader.fetch(reader.plan(offer))
            assert (result.moved, result.stopped) == (0, True)
            assert result.error.startswith("the owner failed")
        # With the others gone there is room again, as soon as their threads have noticed.
        for _ in range(1000):
            if (await reader.fetch(reader.plan(offer))) == Result(SLOTS, True):
                break
        else:
            pytest.fail("the owner never had room again")


async def test_a_process_that_has_no_thread_to_spare_serves_again_when_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def none_to_spare(thread: threading.Thread) -> None:
        if thread.name == "tcp-reader":
            raise RuntimeError("can't start new thread")
        start(thread)

    async with owner_and_reader() as (reader, offer, _):
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", none_to_spare)
            result = await reader.fetch(reader.plan(offer))
            assert (result.moved, result.stopped) == (0, True)
        assert await reader.fetch(reader.plan(offer)) == Result(SLOTS, True)


async def test_who_asks_nothing_makes_room_for_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "MAX_CONNECTIONS", 2)
    owner = tcp_owner.Owner(HOST, 0, make_region(SLOTS, PITCH), nobody)
    ask = msgspec.msgpack.encode(("lease", b"wrong", [0]))
    frame = len(ask).to_bytes(4, "little") + ask

    async def answered(connection: socket.socket, idle: int) -> None:
        connection.sendall(frame)
        assert b"no such lease" in await asyncio.to_thread(connection.recv, 100)
        await until(lambda: len(owner._idle) == idle, "idle again")

    with contextlib.ExitStack() as stack:
        first, second, third, fourth = (stack.enter_context(socket.socket()) for _ in range(4))
        for connection, idle in ((first, 1), (second, 2), (third, 2)):
            connection.connect((HOST, owner.port))
            await answered(connection, idle)
        assert await asyncio.to_thread(first.recv, 100) == b""
        await answered(second, 2)
        fourth.connect((HOST, owner.port))
        await answered(fourth, 2)
        # The third had been idle for longer than the second.
        assert await asyncio.to_thread(third.recv, 100) == b""
        await answered(second, 2)
        owner.check()
    await asyncio.to_thread(owner.close)


def nothing(connection: socket.socket) -> None:
    """Takes the ask and answers nothing."""


def noise(connection: socket.socket) -> None:
    connection.sendall(b"\x05\0\0\0noise")


def endless(connection: socket.socket) -> None:
    connection.sendall(b"\xff\xff\xff\x7f")


def half(connection: socket.socket) -> None:
    """Agrees, and stops in the middle of the second slot."""
    connection.sendall(b"\x02\0\0\0\x91\xa0" + bytes(PITCH + 1000))
    connection.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("answer", [nothing, noise, endless, half])
async def test_an_owner_that_answers_nonsense(answer: Callable[[socket.socket], None]) -> None:
    reading = Tcp(HOST)
    reader = await Reader.started(reading)
    with socket.create_server((HOST, 0)) as server, contextlib.ExitStack() as stack:

        def serve() -> None:
            connection, _ = server.accept()
            stack.enter_context(connection)
            connection.recv(4096)
            answer(connection)

        offer = Offer(transport="tcp", data=msgspec.msgpack.encode((server.getsockname()[1], PITCH)))
        serving = asyncio.create_task(asyncio.to_thread(serve))
        plan = reader.plan(offer, seconds=0.3 if answer is nothing else WAIT_S)
        result = await reading.fetch(plan, lambda index: None)
        await serving
    assert (result.moved, result.stopped) == (1 if answer is half else 0, True)
    assert (
        result.error == "the deadline has passed" if answer is nothing else result.error.startswith("the owner failed")
    )
    await reading.close()


async def test_nobody_listens() -> None:
    reading = Tcp(HOST)
    reader = await Reader.started(reading)
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    offer = Offer(transport="tcp", data=msgspec.msgpack.encode((port, PITCH)))
    result = await reader.fetch(reader.plan(offer))
    assert (result.moved, result.stopped) == (0, True)
    assert result.error.startswith(f"cannot connect to {HOST}:{port}")
    await reading.close()


@pytest.mark.parametrize("host", ["a" * 64 + ".invalid", "a\0b"])
async def test_a_host_that_cannot_be_one(host: str) -> None:
    reader = await Reader.started(Tcp(HOST))
    offer = Offer(transport="tcp", data=msgspec.msgpack.encode((1, PITCH, host)))
    result = await reader.fetch(reader.plan(offer))
    assert (result.moved, result.stopped) == (0, True)
    assert result.error.startswith("cannot connect to ")
    await reader.transport.close()


async def test_peers_connect_where_they_are_told_to() -> None:
    region = make_region(SLOTS, PITCH)
    fill(region, BLOCK_BYTES, range(SLOTS))
    listening = Tcp(HOST)
    await listening.start(region, everybody(region))
    port = msgspec.msgpack.decode(listening.offer().data)[0]
    owner, reading = Tcp(HOST, advertise=(HOST, port)), Tcp(HOST)
    await owner.start(region, everybody(region))
    reader = await Reader.started(reading)
    plan = dataclasses.replace(reader.plan(owner.offer()), owner_host="192.0.2.1")
    assert await reader.fetch(plan) == Result(SLOTS, True)
    for transport in (reading, owner, listening):
        await transport.close()


async def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(TransportUnavailable, match=r"^tcp: cannot listen on 192\.0\.2\.1:0"):
        await Reader.started(Tcp("192.0.2.1"))
