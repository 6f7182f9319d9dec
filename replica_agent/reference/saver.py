"""Copies computed blocks into the agent's pool, behind the compute thread's back."""

from __future__ import annotations

import logging
import threading
from collections import deque
from itertools import takewhile
from typing import NamedTuple

from replica_agent.engines.errors import PoolGone
from replica_agent.engines.pool_client import PoolClient
from replica_agent.engines.pool_link import PoolLink
from replica_agent.reference.block_memory import BlockMemory
from replica_agent.reference.block_pool import BlockPool
from replica_agent.reference.connector import Saving

_log = logging.getLogger(__name__)

_RETRY_S = 0.1


class Observed(NamedTuple):
    """What a step of prefill took."""

    tokens: int
    attended: int
    seconds: float


class Saver:
    """Owns the queue of what is to be told and saved, and the thread that empties it; only the compute thread fills it.

    No block is held back for saving. The thread copies a block and only then looks whether its version is still that
    with which it was queued: a copy that is not of one piece is given up and never becomes visible. What does not fit
    into the queue is shed: computing never waits for saving.

    A clear drops what is queued and goes before all that follows. It is owed until an agent has confirmed it, over as
    many connections as that takes.
    """

    def __init__(self, link: PoolLink, pool: BlockPool, memory: BlockMemory, max_queued: int) -> None:
        """`max_queued` counts blocks. Of `pool`, only the versions are read here."""
        self.saved = 0
        self._link = link
        self._versions = pool.versions
        self._memory = memory
        self._max_queued = max_queued
        self._queue: deque[Saving | Observed] = deque()
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
        """Blocks that were to be saved and were not."""
        return self._shed_here + self._shed_there

    @property
    def uncleared(self) -> bool:
        """Whether the agent may still serve what has been cleared."""
        return self._cleared != self._clears

    def save(self, saving: Saving) -> None:
        """Queue a run of blocks, or shed it."""
        count = len(saving.blocks)
        with self._changed:
            if self._queued + count > self._max_queued:
                self._shed_there += count
                return
            self._queued += count
            self._queue.append(saving)
            self._changed.notify()

    def observe(self, tokens: int, attended: int, seconds: float) -> None:
        """Queue an observation; it is lost when the agent goes."""
        with self._changed:
            self._queue.append(Observed(tokens, attended, seconds))
            self._changed.notify()

    def clear(self) -> None:
        """Forget what is queued, and tell the agent to forget what was saved."""
        with self._changed:
            self._clears += 1
            self._queue.clear()
            self._queued = 0
            self._changed.notify()

    def check(self) -> None:
        """Conservation: the queue is as long as it is counted to be, and within its bound."""
        with self._changed:
            queued = sum(len(each.blocks) for each in self._queue if isinstance(each, Saving))
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
                while not (self._queue or self.uncleared or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                clears = self._clears
                task = None if self.uncleared else self._queue.popleft()
                if isinstance(task, Saving):
                    self._queued -= len(task.blocks)
            try:
                self._do(task, clears)
            except PoolGone as error:
                _log.debug("%s", error)
                with self._changed:
                    lost = [each for each in (task, *self._queue) if isinstance(each, Saving)]
                    self._shed_here += sum(len(each.blocks) for each in lost)
                    self._queue.clear()
                    self._queued = 0
                    # Only a clear that is owed is tried again.
                    if not self._closing:
                        self._changed.wait(_RETRY_S)

    def _do(self, task: Saving | Observed | None, clears: int) -> None:
        """One task, or the clear that is owed. The client is not kept: it has the memory of an agent that may go."""
        client = self._link.client
        if client is None:
            raise PoolGone("not connected")
        match task:
            case None:
                client.clear()
                self._cleared = clears
            case Observed():
                client.observe(*task)
            case Saving():
                self._save(client, task)

    def _save(self, client: PoolClient, saving: Saving) -> None:
        fresh = list(takewhile(self._unchanged, zip(saving.blocks, saving.versions, strict=True)))
        self._shed_here += len(saving.blocks) - len(fresh)
        if not fresh:
            return
        keys = [content.hash for content in saving.contents[: len(fresh)]]
        slots = client.reserve(keys, saving.contents[0].parent or b"")
        taken = [(key, block, slot) for key, block, slot in zip(keys, fresh, slots, strict=True) if slot is not None]
        if not taken:
            return
        written = []
        for _, block, slot in taken:
            self._memory.read(block[0], client.slot(slot.slot))
            # After the copy: a block that is unchanged now was not written to during it.
            written.append(self._unchanged(block))
        self.saved += client.commit([key for key, _, _ in taken], [slot for _, _, slot in taken], written)
        self._shed_here += written.count(False)

    def _unchanged(self, block: tuple[int, int]) -> bool:
        number, version = block
        return self._versions[number] == version
