"""What the tests of the agent's pool run: whole agents with their sockets and HTTP, and engines that save and load."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agent_support import DEADLINE_S, serving, until
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.engine_messages import Accepted, EngineHello, Loading, Nothing, Pending, Ready
from kvstore.hint import Hint
from kvstore.messages import FetchRecord
from kvstore.namespace import SLOT_LAYOUT
from kvstore.pool import Pool
from kvstore.transfer.base import Transport
from kvstore.transfer.loopback import Loopback, Network
from replica_agent.app import create_app
from replica_agent.engines.pool_client import PoolClient, Reserved
from replica_agent.kv.service import KvService
from replica_agent.replica import Replica
from replica_agent.settings import load_settings

BLOCK_BYTES = 5_000
BLOCK_TOKENS = 16
HOLD_S = 0.2
_T = TypeVar("_T")


def key_of(number: int) -> bytes:
    """The ContentKey of a numbered block."""
    return hashlib.sha256(f"block {number}".encode()).digest()


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def payload_of(key: bytes, size: int = BLOCK_BYTES) -> bytes:
    """What the block of this name holds, whoever computes it."""
    return hashlib.shake_128(key).digest(size)


def hello(**more: Any) -> EngineHello:
    """An engine whose blocks have BLOCK_BYTES bytes."""
    fields = {
        "engine_id": "life-1",
        "role": "both",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
        "layout": SLOT_LAYOUT,
        "block_size": BLOCK_TOKENS,
        "block_bytes": BLOCK_BYTES,
        "hash_algorithm": "sha256",
        "identity": {"model": "m", "weights": "w"},
    }
    return EngineHello(**(fields | more))


class Engine:
    """One engine's connection to its agent, with questions that do not block the test's event loop."""

    def __init__(self, client: PoolClient) -> None:
        self.client = client

    @classmethod
    async def connect(cls, path: Path, **more: Any) -> Engine:
        return cls(await asyncio.to_thread(PoolClient, str(path), hello(**more)))

    async def ask(self, verb: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.to_thread(verb, *args)

    async def save(self, keys: Sequence[bytes], parent: bytes = b"") -> int:
        """Writes blocks as an engine does; how many became visible by it."""
        reserved = await self.ask(self.client.reserve, keys, parent)
        wanted = [(key, place) for key, place in zip(keys, reserved, strict=True) if place is not None]
        for key, place in wanted:
            self.client.slot(place.slot)[:] = payload_of(key)
        return await self.commit(wanted)

    async def commit(self, wanted: Sequence[tuple[bytes, Reserved]], written: bool = True) -> int:
        keys, places = [key for key, _ in wanted], [place for _, place in wanted]
        return await self.ask(self.client.commit, keys, places, [written] * len(keys))

    async def prepare(
        self, request: str, keys: Sequence[bytes], hint: Hint | None = None, *, cached: int = 0, tokens: int = 0
    ) -> Pending | Accepted | Nothing:
        tokens = tokens or (cached + len(keys)) * BLOCK_TOKENS + 1
        return await self.ask(self.client.prepare, request, keys, cached, tokens, hint)

    async def poll(self, request: str) -> Pending | Accepted | Loading | Ready | Nothing:
        return await self.ask(self.client.poll, request)

    async def settled(self, request: str) -> Ready | Nothing:
        """Polls until it is ready or over."""
        deadline = time.monotonic() + DEADLINE_S
        while not isinstance(answer := await self.poll(request), Ready | Nothing):
            assert time.monotonic() < deadline, answer
            await asyncio.sleep(0.002)
        return answer

    async def load(self, request: str, keys: Sequence[bytes], hint: Hint | None = None, **more: Any) -> int:
        """The whole of a load, as an engine does it; how many blocks were copied. Wrong bytes fail the test."""
        if isinstance(await self.prepare(request, keys, hint, **more), Nothing):
            return 0
        answer = await self.settled(request)
        if isinstance(answer, Nothing):
            return 0
        for key, slot in zip(keys, answer.slots, strict=False):
            assert bytes(self.client.slot(slot)) == payload_of(key), "an engine was given other bytes"
        await self.ask(self.client.release, request, len(answer.slots), 0.001)
        return len(answer.slots)

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


class Gate:
    """An agent's HTTP, which keeps requests to a path that ends so waiting, before or after they have been answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.ending = ""
        self.after = False
        self.reached = 0
        self.seen: list[str] = []
        self.open = asyncio.Event()

    def shut(self, ending: str, *, after: bool = False) -> None:
        self.ending, self.after, self.reached = ending, after, 0
        self.open.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope["path"])
        waits = bool(self.ending) and scope["path"].endswith(self.ending)

        async def sent(message: Message) -> None:
            if waits and self.after and message["type"] == "http.response.start":
                await self._wait()
            await send(message)

        if waits and not self.after:
            await self._wait()
        await self._app(scope, receive, sent)

    async def _wait(self) -> None:
        self.reached += 1
        await self.open.wait()


class Agent:
    """A whole agent in this process: its HTTP, its socket, and the engine connected to it."""

    def __init__(self, replica: Replica, kv: KvService, url: str, gate: Gate) -> None:
        self.replica = replica
        self.gate = gate
        self.kv = kv
        self.url = url
        self.engines: list[Engine] = []
        self.records: list[FetchRecord] = []

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    @property
    def name(self) -> str:
        return self.replica.settings.replica_id

    @property
    def pool(self) -> Pool:
        assert self.kv.keeper.pool is not None
        return self.kv.keeper.pool

    @property
    def record(self) -> FetchRecord:
        """The only one."""
        (record,) = self.records
        return record

    def slot_of(self, key: bytes) -> int:
        """Where the pool has a block."""
        (held,) = self.pool.pin([key])
        self.pool.unpin([held])
        return held.slot

    async def connect(self, **more: Any) -> Engine:
        assert self.replica.settings.kv_socket is not None
        self.engines.append(await Engine.connect(self.replica.settings.kv_socket, **more))
        await until(lambda: bool(self.kv.keeper.transports), "transports")
        return self.engine

    def hint(self, blocks: int, *, request: str = "r", deadline_ms: int = 10_000, **more: Any) -> Hint:
        """Names this agent as the source."""
        fields = {"source": self.replica.settings.replica_id, "url": self.url} | more
        secret = self.replica.settings.token or ""
        return Hint(request=request, blocks=blocks, deadline_ms=deadline_ms, **fields).signed(secret)

    async def quiet(self) -> None:
        """Nothing is held for anybody any more, and every part is sound."""

        def idle() -> bool:
            self.kv.keeper.expire()
            self.kv.check()
            counts, leases = self.pool.counts, self.kv.keeper.leases
            held = counts.reserved or counts.quarantined or counts.pinned or self.kv.searches.pins
            return not (held or leases or len(self.kv.searches) or not self.kv.fetches.idle)

        await until(idle, "nothing held")


async def both_quiet(source: Agent, reader: Agent) -> None:
    """See `Agent.quiet`."""
    await source.quiet()
    await reader.quiet()


_names = itertools.count()


@contextlib.asynccontextmanager
async def agent(
    directory: Path,
    network: Network | None = None,
    *,
    token: str | None = None,
    port: int = 0,
    lease_s: float = DEADLINE_S,
    hold_s: float = HOLD_S,
    clock: Callable[[], float] = time.monotonic,
    **flags: str,
) -> AsyncIterator[Agent]:
    """An agent with a pool, whose transports are those of `network`, or the ones that its flags name. It waits longer
    for a peer than in a deployment, so that a busy machine decides nothing."""
    flags = {"replica-id": f"replica-{next(_names)}", "pool-bytes": str(64 * 8_192)} | flags
    flags = {"engine": "http://127.0.0.1:1", "kv-socket": str(directory / f"{flags['replica-id']}.sock")} | flags
    argv = [text for name, value in flags.items() for text in (f"--{name}", value)]
    settings = load_settings(argv, {"REPLICA_AGENT_TOKEN": token} if token else {})
    replica = Replica(settings)
    transports: list[Transport] | None = [Loopback(network)] if network else None
    made: list[Agent] = []

    def tell(record: FetchRecord) -> None:
        replica.hub.fetched(record)
        made[0].records.append(record)

    kv = replica.kv = KvService(
        settings,
        listener=replica.pool_news,
        tell=tell,
        transports=transports,
        hold_s=hold_s,
        lease_s=lease_s,
        clock=clock,
    )
    gate = Gate(create_app(replica))
    async with serving(gate, port) as url:
        made.append(Agent(replica, kv, url, gate))
        following = asyncio.create_task(replica.run())
        try:
            await until(lambda: following.done() or settings.kv_socket.exists(), "socket")  # type: ignore[union-attr]
            yield made[0]
        finally:
            for engine in made[0].engines:
                await engine.close()
            gate.open.set()
            replica.hub.close()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@contextlib.asynccontextmanager
async def pair(directory: Path, network: Network, **flags: str) -> AsyncIterator[tuple[Agent, Agent]]:
    """Two agents on one network, each with an engine."""
    async with agent(directory, network, **flags) as source, agent(directory, network, **flags) as reader:
        await source.connect()
        await reader.connect()
        yield source, reader
