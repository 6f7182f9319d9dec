"""Peers that crawl or lie, readers that die, and a transport that is not there: nothing is left, no answer is other."""

from __future__ import annotations

import asyncio
import importlib
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from agent_support import DEADLINE_S, serving, until
from kv_faults import (
    AHEAD,
    BLOCK_BYTES,
    PITCH,
    POOL,
    SIZE,
    TCP,
    Engine,
    agent_process,
    always_fetch,
    engine,
    engine_settings,
    leaving_nothing,
    recorded,
    tokens,
    told,
    within,
)
from kv_link import HOST, Link
from kv_support import Agent, agent
from loopback_ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from kvstore.hint import Hint
from kvstore.messages import FetchOutcome
from kvstore.namespace import unpack_content_keys
from kvstore.peer_messages import LeaseGrant, LeaseRelease, LeaseRequest, Offer
from kvstore.region import make_region
from kvstore.slot import seal
from kvstore.transfer.base import Grant
from kvstore.transfer.nixl_agent import MODULES
from kvstore.transfer.tcp import Tcp

BLOCKS = 12
PROMPT = tokens(31, BLOCKS * SIZE + 5)


@pytest.fixture(autouse=True)
async def _nothing_left() -> AsyncIterator[None]:
    async with leaving_nothing():
        yield


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    always_fetch(monkeypatch)


async def test_slow_source_costs_no_more_than_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 MB/s where the figures promise a hundred times as much: what comes in time is used, and the figures learn."""
    monkeypatch.setattr("replica_agent.reference.connector.DECISION_S", DEADLINE_S)
    blocks, size = 24, 64
    settings = {"block_size": size, "kv_tokens": 4 * blocks * size}
    pool = TCP | {"pool-bytes": str(64 * 1024 * 1024)}
    port = free_port()
    async with Link(port) as data:
        flags = pool | {"data-port": str(port), "data-advertise": f"{HOST}:{data.port}"}
        async with agent(tmp_path, **flags) as source, agent(tmp_path, **pool) as reader:
            async with engine(source, **settings) as one, engine(reader, **settings) as two:
                data.rate = 10e6
                expected = blocks * size * BLOCK_BYTES / SIZE / data.rate
                for seed in range(60, 68):
                    prompt = tokens(seed, blocks * size + 5)
                    await one.teach(prompt)
                    text, recompute_s = await one.timed(prompt)
                    with within(200, recompute_s):
                        said = await two.complete(prompt, source.hint(blocks, deadline_ms=200))
                    assert said.text == text
                    record = await recorded(reader, seed - 59)
                    if record.outcome is FetchOutcome.DECLINED or record.predicted_fetch_s > expected / 2:
                        break
                    assert (record.outcome, record.reason) in (
                        (FetchOutcome.PARTIAL, "deadline"),
                        (FetchOutcome.LATE, "deadline"),
                        (FetchOutcome.FAILED, "timeout"),
                    )
                    assert said.cached == record.loaded * size < blocks * size
                else:
                    pytest.fail(f"what the link carries is still not known: {reader.kv.estimates.links}")
                await source.quiet()
                await reader.quiet()


class Liar:
    """An owner of a pool with bytes of its own, sealed under whatever keys it was asked for, in generation 1."""

    def __init__(self) -> None:
        self.grants: Callable[[LeaseRequest, Liar], LeaseGrant | Response] = lambda asked, liar: liar.grant(asked)
        self.held = False
        self.asked = 0
        self.region = make_region(64, PITCH)
        self.transport = Tcp(HOST)
        self.app = Starlette(
            routes=[
                Route("/v1/leases", self._lease, methods=["POST"]),
                Route("/v1/leases/{lease}/release", self._release, methods=["POST"]),
            ]
        )

    def grant(self, asked: LeaseRequest, **lies: Any) -> LeaseGrant:
        keys = unpack_content_keys(asked.keys)
        for slot, key in enumerate(keys):
            memory = self.region.memory[slot * PITCH : (slot + 1) * PITCH]
            memory[:BLOCK_BYTES] = secrets.token_bytes(BLOCK_BYTES)
            seal(memory, BLOCK_BYTES, key, 1)
        honest: dict[str, Any] = {
            "lease": "lie",
            "ttl_s": 10.0,
            "slots": list(range(len(keys))),
            "generations": [1] * len(keys),
            "pitch": PITCH,
            "offers": [self.transport.offer()],
        }
        return LeaseGrant(**(honest | lies))

    async def _lease(self, request: Request) -> Response:
        self.asked += 1
        asked = msgspec.msgpack.decode(await request.body(), type=LeaseRequest)
        answer = self.grants(asked, self)
        return answer if isinstance(answer, Response) else Response(msgspec.msgpack.encode(answer))

    async def _release(self, request: Request) -> Response:
        return Response(msgspec.msgpack.encode(LeaseRelease(held=self.held)))


def lying(**lies: Any) -> Callable[[LeaseRequest, Liar], LeaseGrant]:
    return lambda asked, liar: liar.grant(asked, **lies)


def unwritten(asked: LeaseRequest, liar: Liar) -> LeaseGrant:
    grant = liar.grant(asked)
    return msgspec.structs.replace(grant, slots=[63 - slot for slot in grant.slots])


def reversed_slots(asked: LeaseRequest, liar: Liar) -> LeaseGrant:
    grant = liar.grant(asked)
    return msgspec.structs.replace(grant, slots=grant.slots[::-1])


LIES: Sequence[tuple[str, Callable[[LeaseRequest, Liar], LeaseGrant | Response], bool, str]] = (
    ("a lease that it does not confirm", lying(), False, "lease_not_held"),
    ("more slots than were asked for", lying(slots=[*range(40)], generations=[1] * 40), True, "nonsense"),
    ("other blocks", reversed_slots, True, "wrong_bytes"),
    ("slots that nobody wrote", unwritten, True, "wrong_bytes"),
    ("generations of before", lying(generations=[7] * BLOCKS), True, "wrong_bytes"),
    ("slots that it has not", lying(slots=[10**6] * BLOCKS), True, "broken"),
    ("slots below the first", lying(slots=[-1] * BLOCKS), True, "nonsense"),
    ("no generations", lying(generations=[]), True, "nonsense"),
    ("a generation too many", lying(generations=[1] * (BLOCKS + 1)), True, "nonsense"),
    ("a lease of no name", lying(lease=""), True, "nonsense"),
    ("a lease that is a path", lying(lease="../hello"), True, "nonsense"),
    ("more ways to reach it than there are", lying(offers=[Offer(transport="tcp", data=b"")] * 17), True, "nonsense"),
    ("slots of another size", lying(pitch=2 * PITCH), True, "no_transport"),
    ("no way to reach it", lying(offers=[]), True, "no_transport"),
    ("noise", lambda asked, liar: Response(b"\xc1\xff noise"), True, "nonsense"),
    (
        "another message",
        lambda asked, liar: Response(msgspec.msgpack.encode(LeaseRelease(held=True))),
        True,
        "nonsense",
    ),
    ("an error", lambda asked, liar: Response(status_code=500), True, "status"),
    ("another place", lambda asked, liar: RedirectResponse("/v1/leases"), True, "status"),
)


@pytest.mark.usefixtures("_eager")
async def test_wrong_bytes_are_never_served_by_an_owner_that_lies(tmp_path: Path) -> None:
    """Whatever it says, the answer is that of an engine alone. Its bytes would change every one of them."""
    liar = Liar()
    await liar.transport.start(
        liar.region, lambda lease, secret: Grant(lease, frozenset(range(64)), time.monotonic() + 60)
    )
    async with serving(liar.app) as url, agent(tmp_path, **TCP) as reader, engine(reader) as two:
        for number, (name, grants, held, reason) in enumerate(LIES):
            liar.grants, liar.held = grants, held
            prompt = tokens(40 + number, len(PROMPT))
            expected = await two.computed(prompt)
            hint = Hint(request="r", source=f"liar {number}", url=url, blocks=BLOCKS, deadline_ms=20_000)
            assert await two.complete(prompt, hint) == (expected, 0), name
            record = await recorded(reader, number + 1)
            assert (record.reason, record.loaded, record.moved) == (reason, 0, 0), name
            assert liar.asked == number + 1, name
            await reader.quiet()
        wrong = {kind: count for kind, count in reader.kv.wrong_bytes.items() if count}
        assert wrong == {"lease": 1, "key": 1, "trailer": 1, "generation": 1}
        # Were they believed, it would show.
        liar.grants, liar.held = lying(), True
        hint = Hint(request="r", source="liar", url=url, blocks=BLOCKS, deadline_ms=20_000)
        said = await two.complete(PROMPT, hint)
        assert said.cached == BLOCKS * SIZE
        assert said.text != await two.computed(PROMPT)
    await liar.transport.close()


@pytest.mark.usefixtures("_eager")
async def test_a_reader_that_is_killed_leaves_no_lease(tmp_path: Path) -> None:
    """Its engine computes and finds the next one; the owner's slots come back when the lease is over."""
    port = free_port()
    async with Link(port) as data:
        flags = TCP | {"data-port": str(port), "data-advertise": f"{HOST}:{data.port}"}
        async with agent(tmp_path, **flags) as source, engine(source) as one:
            await one.teach(PROMPT)
            expected = await one.computed(PROMPT)
            async with (
                agent_process(tmp_path, "reader", **(TCP | {"lease-ttl": "0.5"})) as reader,
                engine(reader) as two,
            ):
                data.stop_at = AHEAD + 5 * PITCH
                request = asyncio.create_task(two.complete(PROMPT, source.hint(BLOCKS)))
                await asyncio.wait_for(data.stopped.wait(), 15)
                leases = source.kv.keeper.leases
                assert leases is not None and len(leases) == 1
                assert source.pool.counts.pinned == BLOCKS
                await reader.kill()
                assert await request == (expected, 0)
                data.cut()
                data.resume()
                await until(lambda: leases.expired == 1, "the lease is over")
                await source.quiet()
                await reader.start()
                await until(lambda: two.connected, "connected again")
                await reader.ready()
                await two.reset()
                assert await two.complete(PROMPT, source.hint(BLOCKS)) == (expected, BLOCKS * SIZE)
                assert [each["outcome"] for each in await reader.fetches()] == ["fetched"]
                await source.quiet()
                await reader.quiet()


@pytest.mark.usefixtures("_eager")
async def test_a_reading_engine_that_is_killed_leaves_no_pin_and_no_slot(tmp_path: Path) -> None:
    port = free_port()
    async with Link(port) as data:
        flags = TCP | {"data-port": str(port), "data-advertise": f"{HOST}:{data.port}"}
        async with agent(tmp_path, **flags) as source, engine(source) as one, agent(tmp_path, **TCP) as reader:
            await one.teach(PROMPT)
            expected = await one.computed(PROMPT)
            assert reader.replica.settings.kv_socket is not None
            settings = engine_settings(reader.replica.settings.kv_socket, port=free_port())
            flags = {
                "--model": settings.model,
                "--served-model-name": "tiny",
                "--port": str(settings.port),
                "--kv-tokens": str(settings.kv_tokens),
                "--dtype": "float32",
                "--threads": "1",
                "--kv-events-endpoint": "none",
                "--kv-replay-endpoint": "none",
                "--kv-socket": str(reader.replica.settings.kv_socket),
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "replica_agent.reference",
                *(text for flag in flags.items() for text in flag),
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                await until(lambda: reader.kv.engine_connected and bool(reader.kv.keeper.transports), "connected")
                data.stop_at = AHEAD + 5 * PITCH
                async with httpx.AsyncClient(base_url=f"http://{HOST}:{settings.port}", trust_env=False) as http:
                    two = Engine(http, None)  # type: ignore[arg-type]
                    await until(lambda: _answers(http), "up")
                    request = asyncio.create_task(two.complete(PROMPT, source.hint(BLOCKS)))
                    await asyncio.wait_for(data.stopped.wait(), 15)
                    assert reader.pool.counts.reserved == BLOCKS
                    process.kill()
                    await process.wait()
                    with pytest.raises(httpx.HTTPError):
                        await request
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            data.resume()
            await reader.quiet()
            await source.quiet()
            assert told(reader) == [(FetchOutcome.CANCELLED, "engine_gone")]
            async with engine(reader) as three:
                assert await three.complete(PROMPT, source.hint(BLOCKS)) == (expected, BLOCKS * SIZE)
                await reader.quiet()


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


async def test_an_engine_whose_own_agent_is_frozen_computes(tmp_path: Path) -> None:
    async with agent_process(tmp_path, "own", **POOL) as own, engine(own) as subject:
        expected = await subject.computed(PROMPT)
        await subject.teach(PROMPT)
        await subject.http.post("/reset_prefix_cache")
        own.freeze()
        for seed in (50, 51):
            await subject.complete(tokens(seed, 100))
        assert await subject.complete(PROMPT) == (expected, 0)
        own.thaw()
        await until(lambda: subject.connected, "connected again")
        await own.ready()
        # The reset that the agent slept through is carried out before anything is sought again.
        await subject.teach(tokens(52, 100))
        assert (await subject.complete(tokens(50, 100))).cached == 96
        await own.quiet()


@pytest.mark.usefixtures("_eager")
async def test_agents_work_without_nixl_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError):
            importlib.import_module(name)
    flags = POOL | {"transports": "nixl,tcp"}
    async with agent(tmp_path, **flags) as source, agent(tmp_path, **flags) as reader:
        async with engine(source) as one, engine(reader) as two:
            await until(lambda: all("tcp" in _names(each) for each in (source, reader)), "tcp")
            async with httpx.AsyncClient(trust_env=False) as http:
                kv = (await http.get(f"{reader.url}/health")).json()["kv"]
            assert kv["transports"] == ["tcp"]
            assert list(kv["unavailable"]) == ["nixl"]
            assert "nixl" in kv["unavailable"]["nixl"]
            await one.teach(PROMPT)
            expected = await one.computed(PROMPT)
            assert await two.complete(PROMPT, source.hint(BLOCKS)) == (expected, BLOCKS * SIZE)
            assert (await recorded(reader)).transport == "tcp"


def _names(subject: Agent) -> list[str]:
    return [transport.name for transport in subject.kv.keeper.transports]
