"""Asks the agent for blocks and copies them in, behind the compute thread's back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvstore import engine_messages as wire
from replica_agent.engines.errors import PoolGone
from replica_agent.engines.load import Load
from replica_agent.engines.pool_client import PoolClient
from replica_agent.reference.block_memory import BlockMemory
from replica_agent.reference.connector import Search

_log = logging.getLogger(__name__)

_WAIT_S = 0.002
"""For the agent's news, where it is the only thing to wait for: what else comes up waits as long."""

_POLL_S = 0.001
"""Between two questions about one search, where there are several."""

_PIECE = 16
"""Blocks copied for one search before the others are looked at."""


class Loader:
    """Owns the searches under way and the thread that takes each from question to release.

    `notify` is called from the thread whenever a search is decided or done; it must not wait.
    """

    def __init__(self, memory: BlockMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self.notify: Callable[[], object] = lambda: None
        self._memory = memory
        self._clock = clock
        self._courses: dict[str, _Course] = {}
        self._changed = threading.Condition()
        self._woken = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-load", daemon=True)
        self._thread.start()

    def begin(self, search: Search, client: PoolClient) -> bool:
        """Take up a search. False when one under the same request id is not over: they could not be told apart."""
        with self._changed:
            if search.request in self._courses:
                return False
            self._courses[search.request] = _Course(search, client, self._memory, self._clock)
            self._woken = True
            self._changed.notify()
        return True

    def wake(self) -> None:
        """A search has been ended, or given its blocks."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread; searches that are not done stay so. The link has been closed, so it waits for no answer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        # Waits with no course in a local variable: its client would keep the memory of an agent that has gone.
        while self._advance(self._due()):
            pass

    def _advance(self, courses: Sequence[_Course]) -> bool:
        """Do what is due; whether anything was."""
        alone = len(self._courses) == 1
        for course in courses:
            decided = course.advance(_WAIT_S if alone else 0.0)
            if course.over:
                with self._changed:
                    del self._courses[course.search.request]
            if decided:
                self.notify()
        return bool(courses)

    def _due(self) -> list[_Course]:
        """Wait until something is to be done. [] when closing."""
        with self._changed:
            while not self._closing:
                now = self._clock()
                woken, self._woken = self._woken, False
                due = [each for each in self._courses.values() if each.due <= now or (woken and each.stirred)]
                if due:
                    return due
                first = min((course.due for course in self._courses.values()), default=None)
                self._changed.wait(None if first is None else max(0.0, first - now))
            return []


class _Course:
    """How far one search is: to be asked, asked, found, loading, over. The loader's thread alone uses it."""

    def __init__(self, search: Search, client: PoolClient, memory: BlockMemory, clock: Callable[[], float]) -> None:
        self.search = search
        self.over = False
        self.due = clock()
        self._client = client
        self._memory = memory
        self._clock = clock
        self._asked = False
        self._load: Load | None = None

    @property
    def stirred(self) -> bool:
        """Whether the compute thread has done something about it."""
        return self.search.ended or (self._load is None and self.search.blocks is not None)

    def advance(self, wait_s: float) -> bool:
        """Do what can be done now, which may be to wait for the agent's news for `wait_s`. Whether the compute thread
        should look at the search."""
        search = self.search
        before = search.found, search.done
        try:
            if search.ended or search.done or self._clock() >= search.deadline:
                self._leave()
            elif search.found is None:
                self._ask(wait_s)
            elif search.blocks is not None:
                self._copy(search.blocks, wait_s)
            else:
                self.due = search.deadline
        except PoolGone as error:
            _log.debug("request %s: %s", search.request, error)
            if self._load is not None:
                search.confirm(self._load.loaded)
            self._end()
        return (search.found, search.done) != before

    def _ask(self, wait_s: float) -> None:
        search = self.search
        answer: wire.Pending | wire.Accepted | wire.Loading | wire.Ready | wire.Nothing
        if self._asked:
            answer = self._client.poll(search.request, 0, wait_s)
        else:
            self._asked = True
            answer = self._client.prepare(search.request, search.keys, search.cached, search.tokens, search.hint)
        match answer:
            case wire.Accepted() if answer.blocks > 0:
                deadline = self._clock() + answer.deadline_s + wire.DECISION_S
                search.accept(min(answer.blocks, len(search.keys)), deadline)
            case wire.Pending():
                self._again(wait_s)
            case wire.Nothing():
                self._end()
            case _:
                # No block accepted, or some there that were not: nothing that can be used.
                self._leave()

    def _copy(self, blocks: Sequence[int], wait_s: float) -> None:
        search, memory = self.search, self._memory

        def write(number: int, slot: memoryview) -> bool:
            return search.copy(number, lambda block: memory.write(block, slot))

        if self._load is None:
            self._load = Load(
                self._client, search.request, write, skip=search.skip, count=len(blocks), clock=self._clock
            )
        load = self._load
        if load.waits:
            load.ask(wait_s)
        wanted = load.copy(_PIECE)
        search.confirm(load.loaded)
        if not wanted or load.done:
            # The compute thread first, the agent can wait.
            search.finish()
        elif load.waits:
            self._again(wait_s)
        else:
            self.due = self._clock()

    def _again(self, waited_s: float) -> None:
        self.due = min(self._clock() + (0.0 if waited_s else _POLL_S), self.search.deadline)

    def _leave(self) -> None:
        """Give everything back, whatever has become of the search."""
        if self._load is not None:
            self._load.leave(self.search.end())
        elif self._asked:
            self._client.cancel(self.search.request)
        self._end()

    def _end(self) -> None:
        self.search.finish()
        self.over = True
