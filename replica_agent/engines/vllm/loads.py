"""Copies found blocks into an engine's own, beside its steps."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from replica_agent.engines.courses import PIECE, POLL_S, Courses
from replica_agent.engines.errors import PoolGone
from replica_agent.engines.load import Load
from replica_agent.engines.pool_client import PoolClient
from replica_agent.engines.vllm.moment import Moment
from replica_agent.engines.vllm.paged_cache import PagedCache
from replica_agent.engines.vllm.step import LoadOrder

_log = logging.getLogger(__name__)


class Finished(NamedTuple):
    """Requests whose loads are over, and blocks among theirs that were not loaded."""

    requests: set[str]
    failed: set[int]


class Loads:
    """Owns the loads that are not taken, and the courses that take each from its first question to its release.

    The thread that runs the engine's steps calls `start` and `take`. Each started load is taken exactly once, at the
    latest when its deadline has passed or its request has ended, whatever the agent and the loading thread do; and once
    it is taken, none of its blocks is written.
    """

    def __init__(self, cache: PagedCache, *, reports: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`reports` of failed blocks are one rank's business, so that they are counted once."""
        self.loaded = self.failed = 0
        """Blocks."""
        self._cache = cache
        self._reports = reports
        self._clock = clock
        self._running: dict[str, _Course] = {}
        self._finished = threading.Event()
        self._courses: Courses[_Course] = Courses(self._finished.set, clock)

    def __len__(self) -> int:
        """Loads that are not taken."""
        return len(self._running)

    def start(self, orders: Iterable[LoadOrder], client: PoolClient | None, after: Moment) -> None:
        """Begin to load, once the device has come to `after`: till then it may use the blocks for somebody else.
        Without a client they are over at once."""
        begun = []
        for order in orders:
            course = _Course(order, client, after, self._cache, self._reports, self._clock)
            self._running[order.request] = course
            if client is not None:
                begun.append(course)
        if begun:
            self._courses.begin(begun)

    def take(self, ended: Iterable[str] = ()) -> Finished:
        """What is over, now that these requests have `ended`."""
        if not self._running:
            return Finished(set(), set())
        aborted = self._running.keys() & set(ended)
        now = self._clock()
        over = [
            request
            for request, course in self._running.items()
            if course.done or request in aborted or now >= course.order.deadline
        ]
        failed: set[int] = set()
        for request in over:
            course = self._running.pop(request)
            loaded = course.end(needed=request not in aborted)
            self.loaded += loaded
            if request not in aborted:
                missing = course.order.blocks[loaded:]
                self.failed += len(missing)
                failed.update(missing)
        if over:
            self._courses.wake()
        return Finished(set(over), failed)

    def wait(self, seconds: float) -> None:
        """Until a load is over, where any is under way."""
        if self._running:
            self._finished.clear()
            if not any(course.done for course in self._running.values()):
                self._finished.wait(seconds)

    def check(self) -> None:
        """Asserts that what is not taken is being loaded, or has been."""
        for request, course in self._running.items():
            assert course.done or course in self._courses, f"nobody loads {request}"

    def close(self) -> None:
        """End the thread. Whatever its connection still had to ask, it is to be closed first."""
        self._courses.close()


class _Course:
    """One load. The loading thread calls `advance`, the other one `end`, exactly once."""

    def __init__(
        self,
        order: LoadOrder,
        client: PoolClient | None,
        after: Moment,
        cache: PagedCache,
        reports: bool,
        clock: Callable[[], float],
    ) -> None:
        self.order = order
        self.done = client is None
        """There is nothing more to come."""
        self.over = False
        """The agent has been told, or is gone."""
        self.ended = False
        self.due = clock()
        self._after = after
        self._cache = cache
        self._reports = reports
        self._clock = clock
        self._lock = threading.Lock()
        self._good = 0
        self._needed = True
        self._failed = False
        self._load = (
            None
            if client is None
            else Load(client, order.name, self._write, skip=order.skip, count=len(order.blocks), clock=clock)
        )
        self._client = client

    @property
    def stirred(self) -> bool:
        """Whether it has been ended."""
        return self.ended

    def end(self, *, needed: bool) -> int:
        """From now on no block is written. Returns how many of the blocks, from the first on, are good.

        Waits for the block that is being copied, if one is: a fraction of a millisecond.
        """
        with self._lock:
            self.ended = True
            self._needed = needed
            return self._good

    def advance(self, wait_s: float) -> bool:
        """Do what can be done now, which may be to wait for the agent's news for `wait_s`. Whether it is done."""
        load = self._load
        assert load is not None
        try:
            if self.ended:
                self._leave(load)
                return True
            if load.waits:
                load.wait(wait_s)
            self._after.wait()
            wanted = load.copy(PIECE)
            with self._lock:
                if not self.ended:
                    self._good = load.loaded
            if load.done or not wanted:
                # The engine first; the agent is told when it has taken this.
                self.done = True
                self.due = math.inf
            elif load.waits:
                self.due = self._clock() + (0.0 if wait_s else POLL_S)
        except PoolGone as error:
            _log.debug("request %s: %s", self.order.name, error)
            self._forget()
        return self.done

    def fail(self) -> None:
        """The engine first, which computes what is not loaded; the agent is told when it has taken this."""
        if self._failed:
            self._forget()
            return
        self.done = self._failed = True
        self.due = self._clock() if self.ended else math.inf

    def _write(self, number: int, slot: memoryview) -> bool:
        with self._lock:
            if self.ended:
                return False
            self._cache.write(self.order.blocks[number], slot)
            # After the copy: an engine that was frozen in it may have copied what the slot was given to meanwhile. The
            # agent keeps a slot for longer than the deadline, but not for ever.
            return self._clock() < self.order.deadline

    def _leave(self, load: Load) -> None:
        missing = len(self.order.blocks) - self._good
        assert self._client is not None
        if self._reports and self._needed and missing:
            self._client.failed(self.order.name, missing)
        load.leave(self._good)
        self._forget()

    def _forget(self) -> None:
        self.done = self.over = True
        # The client has the memory of an agent that may be gone.
        self._load = self._client = None
