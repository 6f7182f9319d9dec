"""One fetch: blocks of a peer's pool into one's own, verified and confirmed before anybody can see them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvstore.board import Board, Progress
from kvstore.bounds import clipped
from kvstore.errors import WrongBytes
from kvstore.messages import FetchOutcome
from kvstore.namespace import KvNamespace, pack_content_keys
from kvstore.peer_messages import LeaseGrant, LeaseRequest, Offer
from kvstore.pool import Held, Pool
from kvstore.slot import verify
from kvstore.transfer.base import Move, Plan, Result, Transport
from kvstore.transfer.select import choose
from replica_agent.errors import PeerError
from replica_agent.kv.peers import Peers
from replica_agent.kv.records import Steps

_logger = logging.getLogger(__name__)

LEASE_S = 0.045
"""For a lease: after `kvstore.engine_messages.DECISION_S` the engine computes."""

CONFIRM_SHARE = 0.2
CONFIRM_MOST_S = 0.05
"""What is kept of a deadline, at most, for the owner's word that the lease held."""

GIVE_BACK_S = 5.0

SHOW_S = 0.0008
"""For an engine to hear where its blocks come, before they come. Then a thread copies, and leaves the event loop little
of the interpreter: an engine that was told late was done late, one fetch in four by 2 ms of 10 (`bench transfer`)."""

RESERVED_A_TURN = 64
"""Slots found before other tasks have their turn."""


class Order(NamedTuple):
    """What to fetch: `keys`, that follow the block `parent`, from replica `source`, whose agent is at `url`.

    `deadline` is `time.monotonic()` seconds; `worthwhile` says whether so many blocks, from the first on, still are.
    """

    request: str
    source: str
    url: str
    keys: Sequence[bytes]
    parent: bytes
    deadline: float
    worthwhile: Callable[[int], bool]


class Fetched(NamedTuple):
    """How a fetch ended: the first `blocks` are in the pool. `reason` is one of a bounded set of words."""

    blocks: int
    outcome: FetchOutcome
    reason: str


@dataclass(frozen=True)
class Surroundings:
    """What every fetch of an agent works with. `ranks` of the engine copy their shares of a block; `spawn` runs what
    outlives a fetch; `transports` is the best first."""

    pool: Pool
    board: Board
    namespace: KvNamespace
    transports: Sequence[Transport]
    peers: Peers
    reader: str
    secret: bytes
    ttl_s: float
    lease_s: float
    ranks: int
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    clock: Callable[[], float] = time.monotonic
    wrong_bytes: Counter[str] = field(default_factory=Counter)


class Fetch:
    """Lease, move and verify, confirm, admit.

    Owns, while it runs, the lease and the reserved slots it moves blocks to. Whatever ends it, and wherever, also by
    cancellation, each slot is then either visible, or abandoned, or in quarantine because a transfer may still write
    there; and the lease is released or being released. Nothing is visible before the owner said that the lease held.
    """

    def __init__(self, order: Order, around: Surroundings) -> None:
        self.order = order
        self.steps = Steps()
        self.transport = ""
        self._slots: list[int] = []
        self._shown = asyncio.Event()
        self._around = around
        self._lease = ""
        self._targets: list[Held] = []
        self._progress: Progress | None = None
        self._moving: asyncio.Task[Result] | None = None

    async def run(self, decided: Callable[[int], None]) -> Fetched:
        """Fetches the longest run that can be had; `decided` is told how many blocks are on their way."""
        try:
            return await self._run(decided)
        except PeerError as error:
            refused = error.code in ("namespace", "unauthorized")
            _logger.info("nothing fetched from %s: %s", self.order.source, error)
            if not refused and self._around.clock() >= self.order.deadline:
                return Fetched(0, FetchOutcome.LATE, "deadline")
            return Fetched(0, FetchOutcome.REFUSED if refused else FetchOutcome.FAILED, error.code)
        finally:
            self._leave_nothing()

    @property
    def cell(self) -> int:
        """Of the board: how many blocks, from the first on, have arrived and are verified, though not confirmed. Valid
        as long as the fetch has not ended; -1 when nothing counts them."""
        return -1 if self._progress is None else self._progress.cell

    def show(self) -> list[int]:
        """The slots in which the blocks come that are on their way."""
        self._shown.set()
        return self._slots

    async def _run(self, decided: Callable[[int], None]) -> Fetched:
        around, order = self._around, self.order
        grant = await self._ask_and_reserve()
        blocks = len(grant.slots)
        if not blocks:
            return Fetched(0, FetchOutcome.MISSED, "not_held")
        self._lease = grant.lease
        chosen = choose(around.transports, grant.offers)
        if chosen is None or grant.pitch != around.pool.region.pitch:
            return Fetched(0, FetchOutcome.FAILED, "no_transport")
        if not order.worthwhile(blocks):
            return Fetched(0, FetchOutcome.DECLINED, "cheaper_to_compute")
        self._abandon(self._targets[blocks:])
        if not self._targets:
            return Fetched(0, FetchOutcome.FAILED, "no_room")
        reserved = len(self._targets)
        self._slots = [held.slot for held in self._targets]
        self._progress = around.board.open()
        decided(reserved)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._shown.wait(), SHOW_S)
        good, reason = await self._move(grant, *chosen)
        if not good:
            late = reason == "deadline"
            return Fetched(0, FetchOutcome.LATE if late else FetchOutcome.FAILED, reason)
        if not await self._confirm(good):
            around.wrong_bytes["lease"] += 1
            return Fetched(0, FetchOutcome.FAILED, "lease_not_held")
        admitted = self._admit(good)
        if not admitted:
            return Fetched(0, FetchOutcome.FAILED, "cleared")
        if not reason:
            reason = "no_room" if reserved < blocks else "not_held" if blocks < len(order.keys) else "complete"
        return Fetched(admitted, FetchOutcome.FETCHED, reason)

    async def _ask(self) -> LeaseGrant:
        around, order = self._around, self.order
        request = LeaseRequest(
            reader=around.reader,
            secret=around.secret,
            request=clipped(order.request),
            namespace=around.namespace,
            keys=pack_content_keys(order.keys),
            ttl_s=around.ttl_s,
            transports=[transport.name for transport in around.transports],
        )
        began = around.clock()
        try:
            return await around.peers.lease(order.url, request, min(around.lease_s, order.deadline - began))
        finally:
            self.steps.lease_s = around.clock() - began

    async def _ask_and_reserve(self) -> LeaseGrant:
        """Finds slots while the owner answers: for the longest run that finds room and that nobody else is writing.

        A fetch that comes to nothing has pushed out a prompt's worth of the oldest blocks then; those are free for the
        next one."""
        pool, order = self._around.pool, self.order
        asking = asyncio.create_task(self._ask())
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            parent, run = order.parent, True
            # The task runs in this turn of the event loop, what it sends goes out at its end.
            await asyncio.sleep(0)
            for first in range(0, len(order.keys), RESERVED_A_TURN):
                # The question is on its way before the work begins.
                await asyncio.sleep(0)
                keys = order.keys[first : first + RESERVED_A_TURN]
                for held in pool.reserve(keys, parent) if run else ():
                    run = run and held is not None
                    if held is not None and run:
                        self._targets.append(held)
                    elif held is not None:
                        pool.abandon(held)
                parent = keys[-1]
            return await asking
        finally:
            asking.cancel()

    async def _move(self, grant: LeaseGrant, transport: Transport, offer: Offer) -> tuple[int, str]:
        """Verified blocks, from the first on, and why not all; "" when all are."""
        around, order = self._around, self.order
        self.transport = transport.name
        began = around.clock()
        left = order.deadline - began
        targets = self._targets[:]
        arrived = _Arrivals(around.pool, order.keys, targets, grant.generations, self._progress)
        plan = Plan(
            offer=offer,
            owner_host=urlsplit(order.url).hostname or "",
            lease=self._lease,
            secret=around.secret,
            moves=[*map(Move, grant.slots[: len(targets)], self._slots)],
            deadline=order.deadline - min(CONFIRM_MOST_S, CONFIRM_SHARE * left),
            call=self._call,
        )
        self._moving = asyncio.create_task(transport.fetch(plan, arrived))
        try:
            result = await self._while_leased(self._moving, grant.ttl_s)
        finally:
            self.steps.verify_s = arrived.seconds
            self.steps.move_s = max(0.0, around.clock() - began - arrived.seconds)
        if arrived.wrong:
            around.wrong_bytes[arrived.wrong.kind] += 1
            _logger.error("wrong bytes from %s: %s", order.source, arrived.wrong)
            return arrived.good, "wrong_bytes"
        if result.moved < len(plan.moves):
            _logger.info("%d of %d blocks from %s: %s", result.moved, len(plan.moves), order.source, result.error)
            return min(arrived.good, result.moved), "deadline" if around.clock() >= plan.deadline else "broken"
        return arrived.good, ""

    async def _while_leased(self, moving: asyncio.Task[Result], ttl_s: float) -> Result:
        """Waits for the transfer, renewing the lease, so that no more than half its time ever passes without the
        owner's word. Raises PeerError once that cannot be had any more; the transfer has ended then."""
        while not (await asyncio.wait({moving}, timeout=ttl_s / 3))[0]:
            try:
                ttl_s = await self._around.peers.renew(self.order.url, self._lease, self._around.secret, ttl_s / 6)
            except PeerError:
                moving.cancel()
                await asyncio.wait({moving})
                raise
        return moving.result()

    async def _call(self, message: bytes) -> bytes:
        around, order = self._around, self.order
        left = order.deadline - around.clock()
        return await around.peers.transfer(order.url, self._lease, around.secret, self.transport, message, left)

    async def _confirm(self, blocks: int) -> bool:
        around, order = self._around, self.order
        began = around.clock()
        try:
            left = max(order.deadline - began, CONFIRM_MOST_S)
            held = await around.peers.release(order.url, self._lease, around.secret, blocks, left)
        finally:
            self.steps.confirm_s = around.clock() - began
        self._lease = ""
        return held

    def _admit(self, blocks: int) -> int:
        """Makes the first `blocks` visible, all or, after the pool was cleared, none."""
        pool = self._around.pool
        admitted = 0
        while admitted < blocks and pool.admit(self.order.keys[admitted], self._targets[admitted]):
            admitted += 1
        del self._targets[:admitted]
        return admitted

    def _leave_nothing(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._targets or self._lease:
            moving = self._moving
            if moving is None or moving.done():
                self._abandon()
            if self._targets or self._lease:
                self._around.spawn(self._wind_down())

    async def _wind_down(self) -> None:
        if self._moving is not None and not self._moving.done():
            self._moving.cancel()
            await asyncio.wait({self._moving})
        self._abandon()
        if self._lease:
            with contextlib.suppress(PeerError):
                await self._around.peers.release(self.order.url, self._lease, self._around.secret, 0, GIVE_BACK_S)

    def _abandon(self, some: Sequence[Held] | None = None) -> None:
        """Gives up the targets, or only `some`, the last of them."""
        moving = self._moving
        stopped = moving is None or (not moving.cancelled() and not moving.exception() and moving.result().stopped)
        targets = self._targets if some is None else some
        self._targets = self._targets[: len(self._targets) - len(targets)]
        for held in targets:
            self._around.pool.abandon(held, stopped=stopped)


class _Arrivals:
    """Verifies each block as it arrives, while its bytes are warm. Called from one thread at a time, the transport's;
    `good` counts those from the first on that are what was asked for, and `progress` is told each time; `wrong` is the
    first that is not."""

    def __init__(
        self,
        pool: Pool,
        keys: Sequence[bytes],
        targets: Sequence[Held],
        generations: Sequence[int],
        progress: Progress | None,
    ) -> None:
        self.good = 0
        self.wrong: WrongBytes | None = None
        self.seconds = 0.0
        self._pool = pool
        self._keys = keys
        self._targets = targets
        self._generations = generations
        self._progress = progress

    def __call__(self, index: int) -> None:
        if self.wrong is not None or index != self.good:
            return
        began = time.perf_counter()
        try:
            slot = self._pool.view(self._targets[index].slot)
            verify(slot, self._pool.block_bytes, self._keys[index], self._generations[index])
            self.good += 1
        except WrongBytes as error:
            self.wrong = error
        self.seconds += time.perf_counter() - began
        if self._progress is not None:
            self._progress.tell(self.good)
