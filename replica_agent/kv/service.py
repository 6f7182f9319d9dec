"""The agent's side of KV: its engine's socket, its pool, its peers, joined."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.engine_messages import EngineHello, Refused
from kvstore.messages import FetchRecord, FetchState
from kvstore.pool import PoolListener
from kvstore.transfer.base import Transport
from kvstore.transfer.select import make_transports
from replica_agent.kv.decision import Estimates
from replica_agent.kv.engine_session import EngineSession
from replica_agent.kv.engine_socket import EngineSocket, Greeting
from replica_agent.kv.fetch import LEASE_S, Surroundings
from replica_agent.kv.fetches import Fetches
from replica_agent.kv.lease_service import LeaseService
from replica_agent.kv.lease_socket import LeaseSocket
from replica_agent.kv.peers import Peers
from replica_agent.kv.pool_keeper import HOLD_S, PoolKeeper
from replica_agent.kv.records import FetchLog
from replica_agent.kv.search import Desk
from replica_agent.kv.searches import Searches
from replica_agent.settings import Settings

_logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 0.5

MAX_REPLACED = 64
"""Lives remembered whose place another one took while they were connected."""

TWO_ENGINES = (
    "engine_id: another engine has connected since, and an agent serves one; if both are to run, give each an agent "
    "and a --kv-socket of its own"
)


class KvService:
    """Owns every part of an agent that has to do with blocks, and which life of the engine is connected.

    An engine that connects under another id is another life: what the last one had asked for is released, what it was
    writing quarantined, and its connections are ended; the pool's blocks stay. A life whose place was taken is refused
    while its successor is there: otherwise two engines on one socket would hang up on each other for ever. Used on one
    event loop; `run` ends when cancelled, and leaves nothing behind.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        listener: PoolListener,
        tell: Callable[[FetchRecord], None],
        transports: Sequence[Transport] | None = None,
        hold_s: float = HOLD_S,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`listener` is told which blocks the pool holds, `tell` what came of each search. `transports` are the ones of
        the settings unless given; `hold_s` is how long what may still be read or written is kept, `lease_s` how long a
        peer's answer to a lease request is waited for."""
        assert settings.kv_socket is not None
        if transports is None:
            transports = make_transports(
                settings.transports,
                host=settings.host,
                port=settings.data_port,
                advertise=settings.data_advertise,
                tls=None if settings.tls is None else settings.tls.transport,
            )
        self.socket = EngineSocket(settings.kv_socket, self)
        self.keeper = PoolKeeper(
            pool_bytes=settings.pool_bytes, transports=transports, listener=listener, hold_s=hold_s, clock=clock
        )
        self.lease_service = LeaseService(self.keeper)
        self.lease_socket = LeaseSocket(self.lease_service, settings.token)
        self.estimates = Estimates(margin=settings.fetch_margin, clock=clock)
        self.log = FetchLog(settings.replica_id, tell, clock=clock)
        self.fetches = Fetches(self.log, self.estimates)
        self.peers = Peers(settings.token, tls=settings.tls, clock=clock)
        self.wrong_bytes: Counter[str] = Counter(
            dict.fromkeys(("trailer", "key", "generation", "checksum", "lease"), 0)
        )
        desk = Desk(
            mode=settings.fetch,
            secret=settings.token or "",
            replica=settings.replica_id,
            estimates=self.estimates,
            fetches=self.fetches,
            log=self.log,
            hold_s=hold_s,
            clock=clock,
        )
        self.searches = Searches(desk)
        self._settings = settings
        self._lease_s = lease_s
        self._clock = clock
        self._secret = secrets.token_bytes(16)
        self._sessions: set[EngineSession] = set()
        self._replaced: deque[str] = deque(maxlen=MAX_REPLACED)
        self.refusal = ""
        """Why the last engine that said hello was refused, "" when it was not."""
        self.loads = True
        """Whether the engine that is connected takes blocks from the pool."""

    @property
    def engine_connected(self) -> bool:
        """Whether an engine has said hello and is still there."""
        return bool(self._sessions)

    async def run(self) -> None:
        """Serves the engine until cancelled. Raises SocketTaken."""
        self.socket.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.socket.run())
                tasks.create_task(self.keeper.run())
                tasks.create_task(self.lease_socket.run())
                tasks.create_task(self._expire())
        finally:
            # Fetches first: their transports and the way to their owners are still there while they end.
            await self.fetches.close()
            await self.keeper.close()
            await self.peers.close()

    async def greet(self, hello: EngineHello, hang_up: Callable[[], object]) -> Greeting:
        """An engine connects."""
        greeting = await self._greet(hello, hang_up)
        self.refusal = greeting.answer.reason if isinstance(greeting.answer, Refused) else ""
        return greeting

    async def _greet(self, hello: EngineHello, hang_up: Callable[[], object]) -> Greeting:
        if hello.engine_id in self._replaced and any(each.engine_id != hello.engine_id for each in self._sessions):
            return Greeting(Refused(reason=TWO_ENGINES))
        answer = await self.keeper.admit(hello)
        pool, namespace, board = self.keeper.pool, self.keeper.namespace, self.keeper.board
        if isinstance(answer, Refused) or pool is None or namespace is None or board is None:
            return Greeting(answer)
        for session in [each for each in self._sessions if each.engine_id != hello.engine_id]:
            if session.engine_id not in self._replaced:
                self._replaced.append(session.engine_id)
            session.close()
            session.hang_up()
        around = Surroundings(
            pool=pool,
            board=board,
            namespace=namespace,
            transports=self.keeper.transports,
            peers=self.peers,
            reader=self._settings.replica_id,
            secret=self._secret,
            ttl_s=self._settings.lease_ttl_s,
            lease_s=self._lease_s,
            ranks=hello.tp * hello.pp,
            spawn=self.fetches.spawn,
            clock=self._clock,
            wrong_bytes=self.wrong_bytes,
        )
        session = EngineSession(
            around,
            self.searches,
            self.estimates,
            engine_id=hello.engine_id,
            rank=None if hello.role == "scheduler" else hello.rank,
            writer=None if hello.role == "scheduler" else self.keeper.writer(hello.rank),
            block_tokens=hello.block_size,
            cleared=self._cleared,
            closed=self._sessions.discard,
            hang_up=hang_up,
            clock=self._clock,
        )
        self._sessions.add(session)
        self.loads = hello.loads
        _logger.info("engine %s connected as %s, rank %d", hello.engine_id, hello.role, hello.rank)
        return Greeting(answer, session, pool.region.fd)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The engine's fitted speed, None until it is known."""
        return self.estimates.prefill_tokens_per_s

    @property
    def fetch_state(self) -> FetchState | None:
        """What gateways must know, None while no engine is connected."""
        pool, namespace = self.keeper.pool, self.keeper.namespace
        if pool is None or namespace is None or not self._sessions:
            return None
        return FetchState(
            namespace=namespace.digest.hex(),
            acts=self._settings.fetch == "on" and self.loads,
            slots=pool.region.slots,
            link=self.estimates.link,
            links=self.estimates.links,
        )

    def health(self) -> dict[str, Any]:
        """What `/health` says of it."""
        pool = self.keeper.pool
        return {
            "socket": str(self._settings.kv_socket),
            "engine_connected": self.engine_connected,
            "fetch": self._settings.fetch,
            "pool": None if pool is None else {"slots": pool.region.slots, **pool.counts._asdict()},
            "transports": [transport.name for transport in self.keeper.transports],
            "unavailable": self.keeper.unavailable,
        }

    def held(self) -> dict[str, int]:
        """What is kept for somebody, or until some time has passed: all zero when nothing is going on, but `held`."""
        pool, leases = self.keeper.pool, self.keeper.leases
        slots = {} if pool is None else pool.counts._asdict()
        slots.pop("free", None)
        return slots | {
            "counters": 0 if self.keeper.board is None else len(self.keeper.board),
            "leases": 0 if leases is None else len(leases),
            "searches": len(self.searches),
            "fetches": len(self.fetches),
            "winding_down": not self.fetches.idle,
            "writing": sum(session.writing for session in self._sessions),
        }

    def check(self) -> None:
        """Asserts what must hold in each part, and that every pin in the pool is somebody's."""
        self.keeper.check()
        self.lease_socket.check()
        self.peers.check()
        self.searches.check()
        self.fetches.check()
        self.estimates.check()
        self.log.check()
        pool, leases = self.keeper.pool, self.keeper.leases
        if pool is not None and leases is not None:
            pins = leases.pins + self.searches.pins
            assert pool.all_pins == pins, f"{pool.all_pins} pins in the pool, {pins} of leases and searches"

    def _cleared(self) -> None:
        """The engine dropped its cache on purpose: nothing of before may be served, nor be on its way."""
        self.searches.end_all("cleared")
        if self.keeper.pool is not None:
            self.keeper.pool.clear()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self.searches.expire()
            for session in self._sessions:
                session.expire()
            self.keeper.expire()
