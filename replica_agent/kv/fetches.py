"""Every fetch under way: which blocks are coming, and who waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from kvstore.messages import FetchOutcome
from replica_agent.kv.decision import Estimates
from replica_agent.kv.fetch import Fetch, Fetched, Order, Surroundings
from replica_agent.kv.link import HELD_BACK_S
from replica_agent.kv.records import FetchLog, Steps

_logger = logging.getLogger(__name__)

MAX_FETCHES = 16
"""Fetches at once. Each keeps a thread of its transport busy; one more would wait for longer than its engine does."""

_ANSWER_TURNS = 4
"""Of the event loop, until those who waited have their answers; what can wait is done after that."""

_FAILURES = frozenset({FetchOutcome.FAILED, FetchOutcome.REFUSED, FetchOutcome.LATE})
_OF_THE_MOMENT = frozenset({"no_room", "cleared", "busy"})
"""Reasons that say nothing of the source: the reader's own pool was full or cleared, or much is lent right now."""

CLOSE_S = 1.0
"""How long a stopping agent waits for what its fetches leave behind; what is not given back then, leases end."""


class Waiter(Protocol):
    """Who waits for a fetch. Called from the event loop, never after `Fetches.leave`."""

    def fetch_decided(self, blocks: int) -> None:
        """The first `blocks` of the fetch's keys are on their way."""

    def fetch_over(self, result: Fetched) -> None:
        """The fetch has ended; what it brought may be evicted as soon as this returns, so it is pinned here."""


class Coming:
    """One fetch under way: what it brings and who waits for it. Mutated by `Fetches` alone."""

    def __init__(self, order: Order, fetch: Fetch, began: float) -> None:
        self.order = order
        self.fetch = fetch
        self.began = began
        self.decided: int | None = None
        self.waiters: list[Waiter] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def keys(self) -> Sequence[bytes]:
        """The blocks that come, or may come as long as nothing is decided."""
        return self.order.keys if self.decided is None else self.order.keys[: self.decided]

    @property
    def steps(self) -> Steps:
        """What took how long, so far."""
        return self.fetch.steps


class Fetches:
    """Owns the fetches under way, and the index of the blocks they bring, so that a block is fetched once however many
    requests want it. A fetch that nobody waits for any more is cancelled. Used on one event loop."""

    def __init__(self, log: FetchLog, estimates: Estimates) -> None:
        self._log = log
        self._estimates = estimates
        self._live: set[Coming] = set()
        self._coming: dict[bytes, Coming] = {}
        self._background: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, nor being wound down."""
        return not self._live and not self._background

    def coming(self, keys: Sequence[bytes]) -> tuple[Coming, int, int] | None:
        """The fetch that brings `keys[0]`: at which place it has it, and how many of `keys` it brings from there on."""
        coming = self._coming.get(keys[0]) if keys else None
        if coming is None:
            return None
        first = coming.keys.index(keys[0])
        run = 0
        for mine, its in zip(keys, coming.keys[first:], strict=False):
            if mine != its:
                break
            run += 1
        return coming, first, run

    def left_s(self, coming: Coming, around: Surroundings) -> float:
        """Seconds until all of a fetch is expected to be there; before, nobody gets any of it."""
        expected = self._estimates.moving(coming.order.source, len(coming.keys) * around.pool.block_bytes)
        return max(0.0, expected - (around.clock() - coming.began))

    def start(self, order: Order, around: Surroundings, waiter: Waiter) -> Coming | None:
        """Begins a fetch for `waiter`; None when too many are under way."""
        if len(self._live) >= MAX_FETCHES:
            return None
        coming = Coming(order, Fetch(order, around), around.clock())
        coming.waiters.append(waiter)
        for key in order.keys:
            self._coming.setdefault(key, coming)
        self._live.add(coming)
        coming.task = asyncio.create_task(self._run(coming, around))
        # Not in the task: one that is cancelled before its first step never runs a line of it.
        coming.task.add_done_callback(lambda _: self._live.discard(coming))
        return coming

    def join(self, coming: Coming, waiter: Waiter) -> None:
        """`waiter` waits for it, too. The caller looks at `decided` first."""
        coming.waiters.append(waiter)

    def leave(self, coming: Coming, waiter: Waiter) -> None:
        """`waiter` waits no more."""
        if waiter in coming.waiters:
            coming.waiters.remove(waiter)
            if not coming.waiters and coming.task is not None:
                self._forget(coming, coming.order.keys)
                coming.task.cancel()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs what outlives a fetch."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Cancels every fetch and waits, not for long, until nothing of them is left."""
        for coming in self._live:
            if coming.task is not None:
                coming.task.cancel()
        await asyncio.gather(*(coming.task for coming in self._live if coming.task), return_exceptions=True)
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=CLOSE_S)
            for task in late:
                task.cancel()

    def check(self) -> None:
        """Asserts that every fetch is waited for, and that the index leads to live ones."""
        assert all(coming.waiters for coming in self._live if coming.task and not coming.task.cancelling())
        for key, coming in self._coming.items():
            assert coming in self._live and key in coming.keys

    async def _run(self, coming: Coming, around: Surroundings) -> None:
        result = Fetched(0, FetchOutcome.FAILED, "defect")
        try:
            result = await coming.fetch.run(partial(self._decided, coming))
        except asyncio.CancelledError:
            # Who asks at the deadline gives up before the fetch itself does.
            late = around.clock() >= coming.order.deadline
            result = Fetched(0, FetchOutcome.LATE if late else FetchOutcome.CANCELLED, "")
        except Exception:
            # A defect here must not take the agent with it: its engine computes, as it would without a pool.
            _logger.exception("a fetch from %s failed", coming.order.source)
        self._forget(coming, coming.order.keys)
        self._live.discard(coming)
        waiters, coming.waiters = coming.waiters, []
        for waiter in waiters:
            waiter.fetch_over(result)
        for _ in range(_ANSWER_TURNS):
            await asyncio.sleep(0)
        self._learn(coming, around, result)

    def _decided(self, coming: Coming, blocks: int) -> None:
        coming.decided = blocks
        self._forget(coming, coming.order.keys[blocks:])
        for waiter in list(coming.waiters):
            waiter.fetch_decided(blocks)

    def _forget(self, coming: Coming, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._coming.get(key) is coming:
                del self._coming[key]

    def _learn(self, coming: Coming, around: Surroundings, result: Fetched) -> None:
        seconds = coming.steps.total_s
        if result.blocks:
            size = result.blocks * around.pool.block_bytes
            self._log.moved(size, seconds)
            if result.reason == "deadline" and coming.decided:
                # What all of it would have taken. Fetches that a deadline ends take equally long, however little they
                # brought: learned as they are, a slow link would look like a fast one that takes long to answer.
                share = coming.decided / result.blocks
                size = coming.decided * around.pool.block_bytes
                seconds += (share - 1) * coming.steps.move_s
            self._estimates.fetched(coming.order.source, size, seconds)
        elif coming.decided and result.outcome in (FetchOutcome.LATE, FetchOutcome.FAILED):
            # It would have taken longer still; without this a link that became slow is tried again and again, and so is
            # one whose port nothing gets through to.
            size = coming.decided * around.pool.block_bytes
            if result.outcome is FetchOutcome.LATE or seconds > self._estimates.moving(coming.order.source, size):
                self._estimates.fetched(coming.order.source, size, seconds)
            else:
                self._failed(coming, result)
        else:
            self._failed(coming, result)

    def _failed(self, coming: Coming, result: Fetched) -> None:
        """How fast a source is, one that failed at once does not tell; that it fails, it does."""
        if result.outcome in _FAILURES and result.reason not in _OF_THE_MOMENT:
            source = coming.order.source
            before = self._estimates.held_back(source)
            self._estimates.failed(source, coming.began)
            if not before and self._estimates.held_back(source):
                _logger.info("fetches from %s fail (%s): none for %g s", source, result.reason, HELD_BACK_S)
