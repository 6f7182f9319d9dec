"""Copies blocks that an engine has computed into the agent's pool, beside the engine's steps."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from replica_agent.engines.errors import PoolGone
from replica_agent.engines.pool_client import PoolClient
from replica_agent.engines.pool_link import PoolLink
from replica_agent.engines.vllm.moment import Moment
from replica_agent.engines.vllm.paged_cache import PagedCache
from replica_agent.engines.vllm.step import Prefill, SaveOrder

_log = logging.getLogger(__name__)

_RETRY_S = 0.1


class _Saving(NamedTuple):
    """Blocks as they were at a moment: one whose version has changed since holds something else."""

    order: SaveOrder
    versions: Sequence[int]
    computed: Moment


class _Observed(NamedTuple):
    """A step of prefill, between two moments."""

    prefill: Prefill
    began: Moment
    ended: Moment


class Saver:
    """Owns the versions of a rank's blocks, the queue of what is to be saved and told, and the thread that empties it.
    Only the thread that runs the engine's steps calls `reuse`, `save`, `observe` and `clear`; none of them waits.

    No block is held back for saving, and no step waits for a copy. A block's version rises before it is given to be
    written anew; the thread copies, and only then looks whether the version is still that with which it was queued: a
    copy that may not be of one piece is given up and never becomes visible. What does not fit into the queue is shed.

    A clear drops what is queued and goes before all that follows. It is owed until an agent has confirmed it, over as
    many connections as that takes.
    """

    def __init__(self, link: PoolLink, cache: PagedCache, *, blocks: int, max_queued: int = 4096) -> None:
        """`blocks` of the cache have versions; `max_queued` of them may wait."""
        self.saved = 0
        self._link = link
        self._cache = cache
        self._max_queued = max_queued
        self._versions = [0] * blocks
        self._queue: deque[_Saving | _Observed] = deque()
        self._queued = 0
        self._clears = self._cleared = 0
        # One count for each thread: `+=` of two threads on one would lose some.
        self._shed_here = self._shed_there = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    @property
    def shed(self) -> int:
        """Blocks that were to be saved and were not: no room in the queue, given out anew too soon, no agent."""
        return self._shed_here + self._shed_there

    @property
    def queued(self) -> int:
        """Blocks that wait."""
        return self._queued

    @property
    def cleared(self) -> int:
        """The last clear that the agent knows of."""
        return self._cleared

    def reuse(self, blocks: Sequence[int]) -> None:
        """These blocks are about to be written anew."""
        for block in blocks:
            self._versions[block] += 1

    def save(self, order: SaveOrder, computed: Moment) -> None:
        """Queue a run of blocks that are full once the device has come to `computed`, or shed it."""
        count = len(order.blocks)
        with self._changed:
            if self._link.client is None or self._queued + count > self._max_queued:
                self._shed_there += count
                return
            self._queued += count
            self._queue.append(_Saving(order, [self._versions[block] for block in order.blocks], computed))
            self._changed.notify()

    def observe(self, prefill: Prefill, began: Moment, ended: Moment) -> None:
        """Queue what a step took; it is lost when the agent goes."""
        with self._changed:
            if self._link.client is not None:
                self._queue.append(_Observed(prefill, began, ended))
                self._changed.notify()

    def clear(self, clears: int) -> None:
        """Forget what is queued, and tell the agent to forget what was saved: for the `clears`-th time."""
        with self._changed:
            self._clears = clears
            self._queue.clear()
            self._queued = 0
            # What is being copied right now, too.
            self._versions = [version + 1 for version in self._versions]
            self._changed.notify()

    def check(self) -> None:
        """Conservation: the queue is as long as it is counted to be, and within its bound."""
        with self._changed:
            queued = sum(len(each.order.blocks) for each in self._queue if isinstance(each, _Saving))
            assert queued == self._queued <= self._max_queued, f"{queued} queued, {self._queued} counted"

    def close(self) -> None:
        """Drop what is queued and end the thread. The link has been closed, so it waits for no answer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._cleared != self._clears or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                clears = self._clears
                task = None if self._cleared != clears else self._queue.popleft()
                if isinstance(task, _Saving):
                    self._queued -= len(task.order.blocks)
            try:
                self._do(task, clears)
            except PoolGone as error:
                _log.debug("%s", error)
                with self._changed:
                    lost = [each for each in (task, *self._queue) if isinstance(each, _Saving)]
                    self._shed_here += sum(len(each.order.blocks) for each in lost)
                    self._queue.clear()
                    self._queued = 0
                    # Only a clear that is owed is tried again.
                    if not self._closing:
                        self._changed.wait(_RETRY_S)

    def _do(self, task: _Saving | _Observed | None, clears: int) -> None:
        """One task, or the clear that is owed. The client is not kept: it has the memory of an agent that may go."""
        client = self._link.client
        if client is None:
            raise PoolGone("not connected")
        match task:
            case None:
                client.clear()
                self._cleared = clears
            case _Observed():
                task.ended.wait()
                client.observe(task.prefill.tokens, task.prefill.attended, task.ended.since(task.began))
            case _Saving():
                self._save(client, task)

    def _save(self, client: PoolClient, saving: _Saving) -> None:
        order = saving.order
        blocks = list(zip(order.blocks, saving.versions, strict=True))
        fresh = list(takewhile(self._unchanged, blocks))
        self._shed_here += len(blocks) - len(fresh)
        if not fresh:
            return
        slots = client.reserve(order.keys[: len(fresh)], order.parent)
        taken = [each for each in zip(order.keys, fresh, slots, strict=False) if each[2] is not None]
        if not taken:
            return
        saving.computed.wait()
        written = []
        for _, block, slot in taken:
            assert slot is not None
            self._cache.read(block[0], client.slot(slot.slot))
            # After the copy: a block that is unchanged now was not written to during it.
            written.append(self._unchanged(block))
        self.saved += client.commit([key for key, _, _ in taken], [slot for *_, slot in taken if slot], written)
        self._shed_here += written.count(False)

    def _unchanged(self, block: tuple[int, int]) -> bool:
        number, version = block
        return self._versions[number] == version
