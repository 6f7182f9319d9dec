"""Copies blocks that an engine has computed into the agent's pool, beside the engine's steps."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from replica_agent.engines.defects import Defects
from replica_agent.engines.errors import PoolGone
from replica_agent.engines.pool_client import PoolClient
from replica_agent.engines.pool_link import PoolLink

_log = logging.getLogger(__name__)

_RETRY_S = 0.1

Read: TypeAlias = Callable[[int, memoryview], object]
"""Copies an engine's block of this number to a slot."""


def at_once() -> None:
    """For blocks that are computed already."""


class Saving(NamedTuple):
    """Consecutive blocks as they were when these were their versions: one whose version has changed since holds
    something else. They may be read once `ready` returns; `parent` is the key before the first, or b""."""

    blocks: Sequence[int]
    versions: Sequence[int]
    keys: Sequence[bytes]
    parent: bytes
    ready: Callable[[], object] = at_once


class _Observed(NamedTuple):
    """A step of prefill; `seconds` waits until it is over."""

    tokens: int
    attended: int
    seconds: Callable[[], float]


class Saver:
    """Owns the queue of what is to be saved and told, and the thread that empties it. Only the thread that gives blocks
    out calls `save`, `observe` and `clear`; none of them waits.

    No block is held back for saving, and no step waits for a copy. A block's version rises before it is given to be
    written anew; the thread copies, and only then looks whether the version is still that with which it was queued: a
    copy that may not be of one piece is given up and never becomes visible. What does not fit into the queue is shed,
    and so is what the thread could not do, whatever was raised by it.

    A clear drops what is queued and goes before all that follows. It is owed until an agent has confirmed it, over as
    many connections as that takes.
    """

    def __init__(self, link: PoolLink, read: Read, versions: Sequence[int], *, max_queued: int = 4096) -> None:
        """`versions` are those of all blocks, another's to raise; `max_queued` blocks may wait, and as many entries."""
        self.saved = 0
        """Blocks that became visible in the pool."""
        self._link = link
        self._read = read
        self._versions = versions
        self._max_queued = max_queued
        self._queue: deque[Saving | _Observed] = deque()
        self._queued = 0
        self._clears = self._cleared = 0
        # One count for each thread: `+=` of two threads on one would lose some.
        self._shed_here = self._shed_there = 0
        self._defects = Defects(_log)
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
    def clears(self) -> int:
        """The last clear."""
        return self._clears

    @property
    def cleared(self) -> int:
        """The last clear that the agent knows of: until it is the last one, it may serve what has been cleared."""
        return self._cleared

    def save(self, saving: Saving) -> None:
        """Queue a run of blocks, or shed it."""
        count = len(saving.blocks)
        with self._changed:
            if self._link.client is None or self._queued + count > self._max_queued:
                self._shed_there += count
                return
            self._queued += count
            self._queue.append(saving)
            self._changed.notify()

    def observe(self, tokens: int, attended: int, seconds: Callable[[], float]) -> None:
        """Queue what a step took; it is lost when the agent goes, or where too much waits. `seconds` is called on the
        saver's thread."""
        with self._changed:
            if self._link.client is not None and len(self._queue) < self._max_queued:
                self._queue.append(_Observed(tokens, attended, seconds))
                self._changed.notify()

    def clear(self, clears: int) -> None:
        """Forget what is queued, and tell the agent to forget what was saved: for the `clears`-th time."""
        with self._changed:
            self._clears = clears
            self._queue.clear()
            self._queued = 0
            self._changed.notify()

    def check(self) -> None:
        """Conservation: the queue is as long as it is counted to be, and within its bound."""
        with self._changed:
            queued = sum(len(each.blocks) for each in self._queue if isinstance(each, Saving))
            assert queued == self._queued <= self._max_queued, f"{queued} queued, {self._queued} counted"
            observed = sum(isinstance(each, _Observed) for each in self._queue)
            assert observed <= self._max_queued, f"{observed} steps wait to be told of"

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
            except Exception:
                self._defects.note("blocks are not saved, or a step is not told of")
                if isinstance(task, Saving):
                    self._shed_here += len(task.blocks)
                with self._changed:
                    # The clear that is owed must not be tried without a pause.
                    if task is None and not self._closing:
                        self._changed.wait(_RETRY_S)

    def _do(self, task: Saving | _Observed | None, clears: int) -> None:
        """One task, or the clear that is owed. The client is not kept: it has the memory of an agent that may go."""
        client = self._link.client
        if client is None:
            raise PoolGone("not connected")
        match task:
            case None:
                client.clear()
                self._cleared = clears
            case _Observed():
                client.observe(task.tokens, task.attended, task.seconds())
            case Saving():
                self._save(client, task)

    def _save(self, client: PoolClient, saving: Saving) -> None:
        fresh = list(takewhile(self._unchanged, zip(saving.blocks, saving.versions, strict=True)))
        self._shed_here += len(saving.blocks) - len(fresh)
        if not fresh:
            return
        keys = saving.keys[: len(fresh)]
        slots = client.reserve(keys, saving.parent)
        taken = [(key, block, slot) for key, block, slot in zip(keys, fresh, slots, strict=True) if slot is not None]
        if not taken:
            return
        written: list[bool] = []
        try:
            saving.ready()
            for _, block, slot in taken:
                self._read(block[0], client.slot(slot.slot))
                # After the copy: a block that is unchanged now was not written to during it.
                written.append(self._unchanged(block))
        except PoolGone:
            raise
        except Exception:
            # The agent is told all the same, or it would keep the slots for whoever may still write to them.
            self._defects.note("blocks cannot be copied from the device")
            written += [False] * (len(taken) - len(written))
        self.saved += client.commit([key for key, _, _ in taken], [slot for _, _, slot in taken], written)
        self._shed_here += written.count(False)

    def _unchanged(self, block: tuple[int, int]) -> bool:
        number, version = block
        return self._versions[number] == version
