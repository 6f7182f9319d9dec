"""The engine's socket: who may connect, what is refused and why, and what a broken connection costs: itself."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from agent_support import DEADLINE_S, until
from kv_support import BLOCK_BYTES, Agent, Engine, agent, hello, key_of, keys_of

from kvstore import engine_messages as wire
from kvstore.namespace import pack_content_keys
from kvstore.transfer.loopback import Network
from replica_agent.engines.errors import PoolGone, PoolRefused
from replica_agent.errors import SocketTaken
from replica_agent.kv.engine_socket import EngineSocket, Greeting

KEYS = keys_of(*range(4))


async def raw(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(path))


async def answer(reader: asyncio.StreamReader) -> wire.Answer:
    async with asyncio.timeout(DEADLINE_S):
        length = wire.frame_length(await reader.readexactly(4))
        return wire.decode_answer(await reader.readexactly(length))


async def test_the_file_is_there_for_as_long_as_the_agent_and_for_its_group(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        path = subject.kv.socket.path
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o660
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert not path.exists()


class Nobody:
    async def greet(self, hello: wire.EngineHello, hang_up: Any) -> Greeting:
        return Greeting(wire.Refused(reason="nobody"))


async def test_what_a_dead_agent_left_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first, second = EngineSocket(path, Nobody()), EngineSocket(path, Nobody())
    first.listen()
    first.listen()
    with pytest.raises(SocketTaken, match=r"--kv-socket: another agent answers at .*kv\.sock"):
        second.listen()
    first.close()
    second.listen()
    second.close()
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(SocketTaken, match=r"--kv-socket: .*no socket"):
        EngineSocket(tmp_path / "file", Nobody()).listen()
    assert (tmp_path / "file").read_text() == "keep me"
    with pytest.raises(SocketTaken, match=r"--kv-socket: .*No such file"):
        EngineSocket(tmp_path / "none" / "kv.sock", Nobody()).listen()


def test_a_socket_that_cannot_be_made_is_one_line_that_names_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "none" / "kv.sock"
    done = subprocess.run(
        [sys.executable, "-m", "replica_agent", "--engine", "http://127.0.0.1:1", "--port", "0", "--kv-socket", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "INFO" not in line] == [
        f"replica_agent: --kv-socket: cannot listen at {path}: No such file or directory"
    ]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"protocol": 99}, "protocol: this agent speaks 2, not 99"),
        ({"block_bytes": 0}, "block_bytes: must be above 0, got 0"),
        ({"block_bytes": 10**9}, "--pool-bytes: 524288 is less than one block"),
        ({"dtype": "float7"}, "dtype: 'float7'"),
        ({"kv_heads": 4, "tp": 3}, "tp: 3 ranks and 4 KV heads"),
        ({"tp": 2, "rank": 2}, "rank: there is no rank 2"),
        ({"tp": 100_000, "pp": 100_000}, "tp, pp: expected 1 to 1024 ranks"),
        ({"layers": 0}, "layers: "),
    ],
)
async def test_an_engine_that_cannot_be_served_is_told_which_field(
    tmp_path: Path, facts: dict[str, Any], reason: str
) -> None:
    async with agent(tmp_path, Network()) as subject:
        with pytest.raises(PoolRefused) as refused:
            await Engine.connect(subject.kv.socket.path, **facts)
        assert str(refused.value).startswith(reason)
        assert subject.kv.keeper.pool is None
        await subject.connect()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block_bytes": BLOCK_BYTES + 1, "engine_id": "2"}, "block_bytes: .* restart the agent"),
        ({"tp": 2, "engine_id": "2"}, "tp, pp: .* restart the agent"),
        ({"identity": {"model": "m", "weights": "x"}}, "its ranks disagree: weights: 'w' here, 'x' there"),
    ],
)
async def test_a_second_engine_must_fit_the_pool(tmp_path: Path, facts: dict[str, Any], reason: str) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        await engine.save(KEYS)
        with pytest.raises(PoolRefused, match=reason):
            await Engine.connect(subject.kv.socket.path, **facts)
        assert await engine.load("r", KEYS) == 4


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">I", wire.MAX_FRAME_BYTES + 1),
        struct.pack(">I", 3) + b"abc",
        wire.encode(wire.Lookup(request="r", keys=b"short")),
        wire.encode(wire.Lookup(request="r", keys=bytes(32 * 70_000))),
        wire.encode(wire.Commit(keys=KEYS[0], slots=[], generations=[], written=[])),
        wire.encode(wire.Prepare(request="r", keys=KEYS[0], cached_blocks=-1, prompt_tokens=1)),
        wire.encode(hello()),
        b"",
    ],
    ids=["long", "garbage", "keys", "many", "lengths", "negative", "hello", "end"],
)
async def test_what_is_no_question_ends_its_connection_alone(tmp_path: Path, frame: bytes) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        await engine.save(KEYS)
        reader, writer = await raw(subject.kv.socket.path)
        writer.write(wire.encode(hello()))
        assert isinstance(await answer(reader), wire.Welcome)
        writer.write(wire.encode(wire.Reserve(keys=key_of(50), parent=b"")))
        assert isinstance(await answer(reader), wire.Reserved)
        writer.write(frame)
        if not frame:
            writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await until(lambda: subject.kv.socket.connections == 1)
        assert subject.pool.counts.quarantined == 1
        assert await engine.load("r", KEYS) == 4
        await subject.quiet()


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 1) + b"x", wire.encode(wire.Clear())])
async def test_who_does_not_say_hello_gets_nothing(tmp_path: Path, first: bytes) -> None:
    async with agent(tmp_path, Network()) as subject:
        reader, writer = await raw(subject.kv.socket.path)
        writer.write(first)
        assert await reader.read() == b""
        writer.close()
        await subject.connect()


async def test_a_frame_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        monkeypatch.setattr("replica_agent.kv.engine_socket.HELLO_S", 0.05)
        for start in (wire.encode(hello())[:20], b""):
            reader, writer = await raw(subject.kv.socket.path)
            writer.write(start)
            assert await reader.read() == b""
            writer.close()
        # A connection that is merely silent stays.
        assert await engine.ask(engine.client.lookup, "r", KEYS) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to connect as somebody else")
async def test_only_the_same_user_is_talked_to() -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        path.chmod(0o711)
        async with agent(path, Network()) as subject:
            # Even where the file lets others in, the agent looks at who it is.
            subject.kv.socket.path.chmod(0o666)
            await refuses_nobody(subject)


async def refuses_nobody(subject: Agent) -> None:
    path = subject.kv.socket.path
    code = (
        "import os, sys, socket; os.setgid(65534); os.setuid(65534)\n"
        "peer = socket.socket(socket.AF_UNIX); peer.connect(sys.argv[1])\n"
        "peer.sendall(bytes.fromhex(sys.argv[2])); sys.stdout.buffer.write(peer.recv(4096))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(path), wire.encode(hello()).hex(), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert wire.decode_answer(out[4:]) == wire.Refused(
        reason="uid: this agent runs as 0 and the engine as 65534; they must be one"
    )
    assert not subject.kv.engine_connected


async def test_questions_sent_at_once_are_answered_in_order(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        reader, writer = await raw(subject.kv.socket.path)
        writer.write(wire.encode(hello()))
        assert isinstance(await answer(reader), wire.Welcome)
        reserve = wire.encode(wire.Reserve(keys=pack_content_keys(KEYS), parent=b""))
        writer.write(reserve + wire.encode(wire.Observe(tokens=1, attended=1, seconds=1)) + reserve)
        first, second, third = [await answer(reader) for _ in range(3)]
        assert isinstance(first, wire.Reserved) and min(first.slots) >= 0
        assert isinstance(second, wire.Done)
        assert isinstance(third, wire.Reserved) and third.slots == [-1] * 4
        writer.close()
        await subject.quiet()


async def test_a_block_is_there_once_every_rank_that_writes_has_committed(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        ranks = [await subject.connect(tp=2, pp=2, rank=rank, role="worker") for rank in range(4)]
        places = [await each.ask(each.client.reserve, KEYS, b"") for each in ranks]
        assert all(place == places[0] for place in places)
        for rank, each in enumerate(ranks):
            assert await each.ask(each.client.lookup, "r", KEYS) == 0
            wanted = [(key, place) for key, place in zip(KEYS, places[rank], strict=True) if place is not None]
            assert await each.commit(wanted) == (4 if rank == 3 else 0)
        assert await ranks[0].ask(ranks[0].client.lookup, "r", KEYS) == 4
        # One rank that cannot write, or goes away, takes the block with it.
        more = keys_of(10, 11)
        places = [await each.ask(each.client.reserve, more, b"") for each in ranks]
        for each in ranks[1:]:
            await each.commit([(key, place) for key, place in zip(more, places[0], strict=True) if place])
        assert places[0][0] is not None
        await ranks[0].commit([(more[0], places[0][0])], written=False)
        await ranks[0].close()
        await until(lambda: subject.pool.counts.reserved == 0)
        assert await ranks[1].ask(ranks[1].client.lookup, "r", more) == 0
        await subject.quiet()


async def test_a_rank_whose_share_another_writes_saves_nothing(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        one, two = [await subject.connect(kv_heads=1, tp=2, rank=rank) for rank in range(2)]
        assert await two.ask(two.client.reserve, KEYS, b"") == [None] * 4
        assert await one.save(KEYS) == 4
        assert await two.load("r", KEYS) == 4
        await one.ask(one.client.release, "r", 4, 0.001)
        await subject.quiet()


async def test_blocks_stay_pinned_until_every_rank_has_copied_them(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        scheduler = await subject.connect(tp=2, role="scheduler")
        ranks = [await subject.connect(tp=2, rank=rank, role="worker") for rank in range(2)]
        for each in ranks:
            await each.save(KEYS)
        # A scheduler writes no share, and copies none.
        assert await scheduler.ask(scheduler.client.reserve, keys_of(10, 11), b"") == [None] * 2
        assert isinstance(await scheduler.prepare("r", KEYS), wire.Accepted)
        assert all([isinstance(await each.settled("r"), wire.Ready) for each in ranks])
        for _ in range(2):
            await ranks[1].ask(ranks[1].client.release, "r", 3, 0.002)
            assert subject.kv.searches.pins == 4
        await ranks[0].ask(ranks[0].client.release, "r", 4, 0.001)
        assert subject.kv.searches.pins == 0
        # Of use is what all have.
        assert (subject.record.loaded, subject.record.copy_s) == (3, 0.002)
        await subject.quiet()


async def test_a_scheduler_that_is_not_interested_any_more_speaks_for_all_ranks(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        scheduler = await subject.connect(tp=2, role="scheduler")
        ranks = [await subject.connect(tp=2, rank=rank, role="worker") for rank in range(2)]
        for each in ranks:
            await each.save(KEYS)
        await scheduler.prepare("r", KEYS)
        await ranks[0].settled("r")
        await scheduler.ask(scheduler.client.cancel, "r")
        assert isinstance(await ranks[1].poll("r"), wire.Nothing)
        await ranks[1].ask(ranks[1].client.release, "r", 0, 0.0)
        assert (len(subject.kv.searches), subject.kv.searches.pins) == (0, 0)


async def test_the_agent_hangs_up_when_it_stops(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
    with pytest.raises(PoolGone):
        await engine.poll("r")
