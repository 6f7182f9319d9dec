"""The agent's pool of KV blocks, whose blocks they are, and the ways peers can reach them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvstore.board import BOARD_BYTES, Board
from kvstore.engine_messages import ENGINE_PROTOCOL_VERSION, EngineHello, Refused, Welcome
from kvstore.errors import GeometryError, PoolError, TransportUnavailable
from kvstore.geometry import KvGeometry
from kvstore.layout import share_of
from kvstore.lease import Leases
from kvstore.namespace import KvNamespace
from kvstore.pool import Pool, PoolListener
from kvstore.region import make_region, populate
from kvstore.slot import pitch_of
from kvstore.transfer.base import Transport

_logger = logging.getLogger(__name__)

HOLD_S = 60.0
"""How long what might still be read or written is not reused: longer than the longest deadline of a transfer."""

RETRY_S = 30.0
"""Between two attempts to start a transport that may be there later: a port is taken, or an address not there yet."""

MAX_RANKS = 1_024


class PoolKeeper:
    """Owns the pool, its leases, the namespace its blocks belong to, and the transports that reach it.

    The pool is made when the first engine connects, because only then a block's size is known, and is then there for
    the agent's life: nothing of another size ever fits. Its blocks are named by content, so they outlast the engine
    that saved them; an engine of another namespace finds an empty pool. Used on one event loop.
    """

    def __init__(
        self,
        *,
        pool_bytes: int,
        transports: Sequence[Transport],
        listener: PoolListener,
        hold_s: float = HOLD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool: Pool | None = None
        self.leases: Leases | None = None
        self.board: Board | None = None
        self.namespace: KvNamespace | None = None
        self.engine_id = ""
        self.hold_s = hold_s
        self.transports: list[Transport] = []
        """Those that were started, best first."""
        self.unavailable: dict[str, str] = {}
        """Why the others were not; those that may be there later are tried again."""
        self._pool_bytes = pool_bytes
        self._candidates = transports
        self._listener = listener
        self.clock = clock
        self._one_hello = asyncio.Lock()
        self._made = asyncio.Event()
        self._closed = False
        self._writers: list[int] = []

    async def admit(self, hello: EngineHello) -> Welcome | Refused:
        """Makes or checks the pool for an engine. After a welcome `engine_id` is that engine's."""
        namespace = KvNamespace(
            layout=hello.layout,
            dtype=hello.dtype,
            block_size=hello.block_size,
            layers=hello.layers,
            kv_heads=hello.kv_heads,
            head_dim=hello.head_dim,
            block_bytes=hello.block_bytes,
            hash_algorithm=hello.hash_algorithm,
            identity=hello.identity,
        )
        if hello.protocol != ENGINE_PROTOCOL_VERSION:
            return Refused(reason=f"protocol: this agent speaks {ENGINE_PROTOCOL_VERSION}, not {hello.protocol}")
        async with self._one_hello:
            try:
                writers = _writers(hello)
                if self.pool is None:
                    self.pool = await self._make(hello.block_bytes, len(writers))
            except (PoolError, GeometryError) as error:
                return Refused(reason=str(error))
            reason = self._refusal(hello, namespace, len(writers))
            if reason:
                return Refused(reason=reason)
            self._take_over(hello.engine_id, namespace)
            self._writers = writers
            self._made.set()
            region = self.pool.region
            return Welcome(slots=region.slots, pitch=region.pitch, block_bytes=self.pool.block_bytes)

    def writer(self, rank: int) -> int | None:
        """The number under which a rank commits; None for one whose share another rank writes."""
        return self._writers.index(rank) if rank in self._writers else None

    def expire(self) -> None:
        """Lets go of what only time kept."""
        if self.pool is not None and self.leases is not None:
            self.leases.expire()
            self.pool.expire()

    async def run(self) -> None:
        """Once there is a pool, starts the transports and takes its memory; ends when no transport is waited for."""
        await self._made.wait()
        assert self.pool is not None
        waited_for = await self._start(self._candidates)
        try:
            await asyncio.to_thread(populate, self.pool.region, lambda: not self._closed)
        except PoolError as error:
            _logger.error("--pool-bytes: %s", error)
        while waited_for:
            await asyncio.sleep(RETRY_S)
            waited_for = await self._start(waited_for)

    async def _start(self, transports: Sequence[Transport]) -> list[Transport]:
        """Those that may be there later."""
        assert self.pool is not None and self.leases is not None
        waited_for = []
        # One by one, and each is used as soon as it is there: the slow ones to start are not the first choice.
        for transport in transports:
            try:
                await transport.start(self.pool.region, self.leases.authorize)
            except TransportUnavailable as error:
                if error.passes:
                    waited_for.append(transport)
                if self.unavailable.get(transport.name) != str(error):
                    self.unavailable[transport.name] = str(error)
                    level = logging.WARNING if error.passes else logging.INFO
                    _logger.log(level, "no transport %s: %s", transport.name, error)
            else:
                if self.unavailable.pop(transport.name, None) is not None:
                    _logger.warning("transport %s is there now", transport.name)
                self.transports.append(transport)
                self.transports.sort(key=self._candidates.index)
        return waited_for

    async def close(self) -> None:
        """Closes the transports; the pool's memory stays, somebody may have mapped it."""
        self._closed = True
        started = self.transports[:]
        self.transports.clear()
        await asyncio.gather(*(transport.close() for transport in started), return_exceptions=True)

    def check(self) -> None:
        """Asserts that pool and leases agree."""
        if self.pool is not None and self.leases is not None:
            self.pool.check()
            self.leases.check()
        if self.board is not None:
            self.board.check()

    async def _make(self, block_bytes: int, ranks: int) -> Pool:
        if block_bytes < 1:
            raise PoolError(f"block_bytes: must be above 0, got {block_bytes}")
        pitch = pitch_of(block_bytes)
        slots = self._pool_bytes // pitch
        if not slots:
            raise PoolError(f"--pool-bytes: {self._pool_bytes} is less than one block with its trailer, {pitch}")
        # Mapping many pages takes a while.
        region = await asyncio.to_thread(make_region, slots, pitch, BOARD_BYTES)
        self.board = Board(region.tail)
        pool = Pool(
            region, block_bytes, ranks=ranks, quarantine_s=self.hold_s, listener=self._listener, clock=self.clock
        )
        self.leases = Leases(pool, hold_s=self.hold_s, clock=self.clock)
        _logger.info("KV pool: %d blocks of %d bytes", slots, block_bytes)
        return pool

    def _refusal(self, hello: EngineHello, namespace: KvNamespace, ranks: int) -> str:
        assert self.pool is not None
        if hello.block_bytes != self.pool.block_bytes:
            return (
                f"block_bytes: the pool was made for blocks of {self.pool.block_bytes}, the engine's have "
                f"{hello.block_bytes}; restart the agent"
            )
        if ranks != self.pool.ranks:
            return f"tp, pp: the pool was made for {self.pool.ranks} writers, now there are {ranks}; restart the agent"
        if hello.engine_id == self.engine_id and self.namespace is not None and self.namespace != namespace:
            return "its ranks disagree: " + "; ".join(self.namespace.differences(namespace))
        return ""

    def _take_over(self, engine_id: str, namespace: KvNamespace) -> None:
        assert self.pool is not None
        if self.namespace is not None and self.namespace != namespace:
            _logger.warning("KV pool emptied, another namespace: %s", "; ".join(self.namespace.differences(namespace)))
            self.pool.clear()
        self.namespace = namespace
        self.engine_id = engine_id


def _writers(hello: EngineHello) -> list[int]:
    """Ranks that write a share which no rank before them writes. Raises GeometryError or PoolError naming the field."""
    geometry = KvGeometry(layers=hello.layers, kv_heads=hello.kv_heads, head_dim=hello.head_dim, dtype=hello.dtype)
    if not 1 <= hello.tp * hello.pp <= MAX_RANKS:
        raise PoolError(f"tp, pp: expected 1 to {MAX_RANKS} ranks, got {hello.tp} x {hello.pp}")
    ranks = range(hello.tp * hello.pp)
    share_of(geometry, tp=hello.tp, pp=hello.pp, rank=hello.rank)
    return [rank for rank in ranks if share_of(geometry, tp=hello.tp, pp=hello.pp, rank=rank).primary]
