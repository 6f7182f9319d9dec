"""Leases in frames between two agents of one host: the same answers as over HTTP, and what becomes of bad peers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from agent_support import DEADLINE_S, until
from kv_support import Agent, agent, hello, keys_of

from kvstore.frames import Frames
from kvstore.namespace import KvNamespace, pack_content_keys
from kvstore.peer_frames import MAX_FRAME, Ask, Knock, Tell, pack, unpack
from kvstore.peer_messages import Door, LeaseGrant, LeaseProof, LeaseRequest
from kvstore.transfer.host import host_identity
from replica_agent.errors import PeerError
from replica_agent.kv import lease_channel, lease_socket
from replica_agent.kv import peers as peers_module
from replica_agent.kv.lease_channel import LeaseChannel
from replica_agent.kv.peers import Peers

KEYS = keys_of(*range(4))
SECRET = b"s" * 16


def asking(**more: object) -> LeaseRequest:
    facts = msgspec.structs.asdict(hello())
    fields = {
        "reader": "me",
        "secret": SECRET,
        "request": "r",
        "namespace": KvNamespace(**{name: facts[name] for name in KvNamespace.__struct_fields__}),
        "keys": pack_content_keys(KEYS),
        "ttl_s": 10.0,
        "transports": ["shm"],
    }
    return LeaseRequest(**(fields | more))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def reading(token: str | None = None) -> AsyncIterator[Peers]:
    peers = Peers(token)
    try:
        yield peers
        peers.check()
    finally:
        await peers.close()


@contextlib.asynccontextmanager
async def owning(directory: Path, token: str | None = None) -> AsyncIterator[Agent]:
    async with agent(directory, token=token, transports="shm") as subject:
        await subject.connect()
        await subject.engine.save(KEYS)
        yield subject
        await until(lambda: not subject.kv.lease_socket.connections, "hung up")
        await subject.quiet()


async def befriend(peers: Peers, url: str) -> LeaseGrant:
    """A first lease, over HTTP, after which the door is open. It is given back."""
    grant = await peers.lease(url, asking(), DEADLINE_S)
    await until(lambda: url in peers._channels, "the door opens")
    assert await peers.release(url, grant.lease, SECRET, 4, DEADLINE_S)
    return grant


async def test_what_is_asked_in_frames_is_answered_as_over_http(tmp_path: Path) -> None:
    async with owning(tmp_path) as subject, reading() as peers:
        await befriend(peers, subject.url)
        assert subject.gate.seen == ["/v1/leases"]
        grant = await peers.lease(subject.url, asking(), DEADLINE_S)
        assert (len(grant.slots), subject.pool.counts.pinned) == (4, 4)
        assert await peers.renew(subject.url, grant.lease, SECRET, DEADLINE_S) == 10
        for lease, secret in ((grant.lease, b"x" * 16), ("none", SECRET)):
            with pytest.raises(PeerError, match="status 404"):
                await peers.renew(subject.url, lease, secret, DEADLINE_S)
            assert not await peers.release(subject.url, lease, secret, None, DEADLINE_S)
        assert await peers.release(subject.url, grant.lease, SECRET, 4, DEADLINE_S)
        namespace = msgspec.structs.replace(asking().namespace, dtype="float16")
        for request, code in (
            (asking(secret=b"short"), "status"),
            (asking(keys=b"short"), "status"),
            (asking(ttl_s=-1.0), "status"),
            (asking(namespace=namespace), "namespace"),
        ):
            with pytest.raises(PeerError) as refused:
                await peers.lease(subject.url, request, DEADLINE_S)
            assert refused.value.code == code
        assert subject.gate.seen == ["/v1/leases"]


async def test_what_is_too_long_for_a_frame_goes_over_http(tmp_path: Path) -> None:
    async with owning(tmp_path) as subject, reading() as peers:
        await befriend(peers, subject.url)
        with pytest.raises(PeerError) as refused:
            await peers.lease(subject.url, asking(keys=bytes(MAX_FRAME)), DEADLINE_S)
        # It may hang up before all is sent.
        assert refused.value.code in ("status", "unreachable")
        assert subject.gate.seen == ["/v1/leases"] * 2


async def test_an_agent_that_comes_back_is_found_over_http_again(tmp_path: Path) -> None:
    async with reading() as peers:
        async with agent(tmp_path, transports="shm") as subject:
            await subject.connect()
            await subject.engine.save(KEYS)
            await befriend(peers, subject.url)
            url, port = subject.url, int(subject.url.rpartition(":")[2])
        async with agent(tmp_path, transports="shm", port=port) as subject:
            await subject.connect()
            await subject.engine.save(KEYS)
            assert subject.url == url
            await befriend(peers, url)
            assert subject.gate.seen == ["/v1/leases"]
            grant = await peers.lease(url, asking(), DEADLINE_S)
            assert await peers.release(url, grant.lease, SECRET, 4, DEADLINE_S)
            assert subject.gate.seen == ["/v1/leases"]


async def test_only_the_token_opens_the_door(tmp_path: Path) -> None:
    async with owning(tmp_path, token="secret") as subject:
        door = subject.kv.lease_service.door
        assert door is not None
        for token, welcome in (("secret", True), ("wrong", False), (None, False)):
            channel = await LeaseChannel.open(door, token)
            told = channel.ask("release", "none", msgspec.msgpack.encode(LeaseProof(secret=SECRET)))
            if welcome:
                assert (await told).status == 200
            else:
                with pytest.raises(ConnectionError):
                    await told
            channel.close()
            await until(lambda channel=channel: not channel.alive)  # type: ignore[misc]


async def test_an_owner_without_a_pool_that_can_be_mapped_has_no_door(tmp_path: Path) -> None:
    async with agent(tmp_path, transports="tcp") as subject, reading() as peers:
        await subject.connect()
        await subject.engine.save(KEYS)
        grant = await peers.lease(subject.url, asking(transports=["tcp"]), DEADLINE_S)
        assert grant.door is None
        await peers.release(subject.url, grant.lease, SECRET, None, DEADLINE_S)


# Readers that do not behave.


@pytest.mark.parametrize(
    "said",
    [
        b"no frame, though it is long enough",
        struct.pack(">I", MAX_FRAME + 1),
        pack(Tell(1, 200, b"")),
        pack(Knock("wrong")),
        pack(Knock("")) + pack(Knock("")),
        struct.pack(">I", 100) + b"the rest never comes",
        pack(Knock("")) + struct.pack(">I", 100) + b"nor does this one's",
        b"",
    ],
)
async def test_a_reader_that_makes_no_sense_or_is_slow_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(lease_socket, "FRAME_S", 0.1)
    async with owning(tmp_path) as subject:
        reader, writer = await _connect(subject.kv.lease_service.door)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        writer.close()


async def test_a_reader_that_takes_no_answers_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_socket, "MAX_FRAME", 65_536)
    async with owning(tmp_path) as subject:
        _, writer = await _connect(subject.kv.lease_service.door)
        writer.write(pack(Knock("")))
        # It sends until nobody reads any more.
        flood = pack(Ask(1, "renew", "none", msgspec.msgpack.encode(LeaseProof(secret=SECRET)))) * 100
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    writer.write(flood)
                    await writer.drain()
                    await asyncio.sleep(0)


async def test_one_connection_more_than_allowed_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_socket, "MAX_CONNECTIONS", 2)
    async with owning(tmp_path) as subject:
        door = subject.kv.lease_service.door
        kept = [await _connect(door) for _ in range(2)]
        await until(lambda: subject.kv.lease_socket.connections == 2)
        reader, writer = await _connect(door)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        subject.kv.check()
        for _, each in [*kept, (reader, writer)]:
            each.close()


# Owners that do not.


@contextlib.asynccontextmanager
async def behind(
    door: Door, answer: Callable[[Ask, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[LeaseChannel]:
    """A channel to an owner that answers in its own way."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames, knocked = Frames(MAX_FRAME), False
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                for body in frames.feed(data):
                    if knocked:
                        await answer(unpack(body, Ask), writer)
                    knocked = True
        writer.close()
        closed.set()

    closed = asyncio.Event()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(door.name)
    async with await asyncio.start_unix_server(serve, sock=listener):
        channel = await LeaseChannel.open(door, None)
        try:
            yield channel
        finally:
            channel.close()
            await until(lambda: not channel.alive and closed.is_set())
            channel.check()


def some_door() -> Door:
    return Door(host=host_identity(), name=b"\0test-" + secrets.token_hex(8).encode())


@pytest.mark.parametrize("said", [b"\xff" * 8, struct.pack(">I", 3) + b"\xc1\xc1\xc1", pack(Knock("x")), None])
async def test_an_owner_that_lies_ends_the_channel(said: bytes | None) -> None:
    async def answer(ask: Ask, writer: asyncio.StreamWriter) -> None:
        if said is None:
            writer.close()
        else:
            writer.write(said)

    async with behind(some_door(), answer) as channel:
        told = channel.ask("renew", "l", b"")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(told, DEADLINE_S)
        with pytest.raises(ConnectionError):
            channel.ask("renew", "l", b"")


async def test_an_owner_that_says_nothing_costs_the_time_given_and_a_late_grant_is_given_back() -> None:
    door, asked, late = some_door(), list[Ask](), asyncio.Event()

    async def answer(ask: Ask, writer: asyncio.StreamWriter) -> None:
        asked.append(ask)
        if ask.verb == "lease":
            await late.wait()
            grant = LeaseGrant(lease="late", ttl_s=1, slots=[1], generations=[1], pitch=1, offers=[])
            writer.write(pack(Tell(ask.number, 200, msgspec.msgpack.encode(grant))))

    async with behind(door, answer) as channel, reading() as peers:
        peers._channels["http://owner"] = channel
        with pytest.raises(PeerError) as refused:
            await peers.lease("http://owner", asking(), 0.05)
        assert refused.value.code == "timeout"
        late.set()
        await until(lambda: [ask.verb for ask in asked] == ["lease", "release"], "given back")
        assert asked[1].lease == "late"


async def test_an_owner_that_is_silent_for_long_is_asked_in_frames_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "LATE_GRANT_S", 0.1)

    async def answer(ask: Ask, writer: asyncio.StreamWriter) -> None:
        pass

    async with behind(some_door(), answer) as channel, reading() as peers:
        peers._channels["http://127.0.0.1:1"] = channel
        with pytest.raises(PeerError) as refused:
            await peers.lease("http://127.0.0.1:1", asking(), 0.05)
        assert refused.value.code == "timeout"
        await until(lambda: not channel.alive)
        with pytest.raises(PeerError) as refused:
            await peers.lease("http://127.0.0.1:1", asking(), DEADLINE_S)
        assert refused.value.code == "unreachable"


async def test_a_door_that_is_not_there_is_tried_once(tmp_path: Path) -> None:
    async with owning(tmp_path) as subject, reading() as peers:
        subject.kv.lease_service.door = some_door()
        for _ in range(3):
            grant = await peers.lease(subject.url, asking(), DEADLINE_S)
            await until(lambda: not peers._background)
            assert await peers.release(subject.url, grant.lease, SECRET, 4, DEADLINE_S)
        assert not peers._channels and len(peers._shut) == 1
        # On another host nobody tries.
        subject.kv.lease_service.door = Door(host="another", name=b"\0x")
        peers._shut.clear()
        grant = await peers.lease(subject.url, asking(), DEADLINE_S)
        assert await peers.release(subject.url, grant.lease, SECRET, 4, DEADLINE_S)
        assert not peers._shut


async def test_a_channel_that_is_not_used_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_channel, "IDLE_S", 0.05)
    async with owning(tmp_path) as subject, reading() as peers:
        await befriend(peers, subject.url)
        await until(lambda: not peers._channels[subject.url].alive, "idle")
        # And is opened again.
        await befriend(peers, subject.url)
        assert subject.gate.seen[:1] == ["/v1/leases"] and len(subject.gate.seen) >= 2


@pytest.mark.parametrize("seed", range(3))
async def test_stress_against_a_table(seed: int) -> None:
    """Answers in any order, questions given up, and at last the end of the connection: each question gets its own."""
    rng = random.Random(seed)
    held: list[tuple[Ask, asyncio.StreamWriter]] = []

    async def answer(ask: Ask, writer: asyncio.StreamWriter) -> None:
        held.append((ask, writer))
        while held and rng.random() < 0.6:
            ask, writer = held.pop(rng.randrange(len(held)))
            writer.write(pack(Tell(ask.number, 200, ask.body)))
            if rng.random() < 0.1:
                writer.write(pack(Tell(ask.number + 10_000, 200, b"nobody asked")))

    async with behind(some_door(), answer) as channel:
        naive: dict[bytes, asyncio.Future[Tell]] = {}
        for step in range(400):
            body = b"%d" % step
            naive[body] = channel.ask("renew", "l", body)
            if rng.random() < 0.2:
                naive.pop(rng.choice([*naive])).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            for asked, told in [*naive.items()]:
                if told.done():
                    assert naive.pop(asked) is told and told.result().body == asked
            # A callback takes a question out of the table one turn after it has its answer.
            assert len(naive) <= len(channel._waiting)
            channel.check()
        await until(lambda: sum(not told.done() for told in naive.values()) <= len(held))
        left = [told for told in naive.values() if not told.done()]
        channel.close()
        results = await asyncio.gather(*left, return_exceptions=True)
        assert all(isinstance(result, ConnectionError) for result in results)
        await until(lambda: not channel._waiting)


async def _connect(door: Door | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert door is not None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    await asyncio.get_running_loop().sock_connect(connection, door.name)
    return await asyncio.open_unix_connection(sock=connection)
