"""Asks the agent for blocks and copies them in, behind the compute thread's back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from replica_agent.engines.courses import PIECE, POLL_S, Courses
from replica_agent.engines.errors import PoolGone
from replica_agent.engines.load import Load
from replica_agent.engines.pool_client import PoolClient
from replica_agent.engines.question import Question
from replica_agent.reference.block_memory import BlockMemory
from replica_agent.reference.connector import Search

_log = logging.getLogger(__name__)


class Loader:
    """Owns the searches under way, and the courses that take each from question to release. The compute thread calls
    it."""

    def __init__(self, memory: BlockMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = memory
        self._clock = clock
        self._courses: Courses[_Course] = Courses(lambda: None, clock)

    def __len__(self) -> int:
        """Searches that are not over."""
        return len(self._courses)

    def on_change(self, notify: Callable[[], object]) -> None:
        """Have `notify` called, from the thread, whenever a search is decided or done; it must not wait."""
        self._courses.notify = notify

    def begin(self, search: Search, client: PoolClient) -> bool:
        """Take up a search. False when one under the same request id is not over: they could not be told apart."""
        if any(course.search.request == search.request for course in self._courses):
            return False
        self._courses.begin([_Course(search, client, self._memory, self._clock)])
        return True

    def wake(self) -> None:
        """A search has been ended, or given its blocks."""
        self._courses.wake()

    def close(self) -> None:
        """End the thread; searches that are not done stay so. The link has been closed, so it waits for no answer."""
        self._courses.close()


class _Course:
    """How far one search is: to be asked, asked, found, loading, over. The courses' thread alone uses it."""

    def __init__(self, search: Search, client: PoolClient, memory: BlockMemory, clock: Callable[[], float]) -> None:
        self.search = search
        self.over = False
        self.due = clock()
        self._client = client
        self._memory = memory
        self._clock = clock
        self._question = Question(client, search.request, search.keys, search.cached, search.tokens, search.hint)
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

    def fail(self) -> None:
        """The compute thread first, which computes what is not loaded; then the agent."""
        self.over = self.search.done
        self.search.finish()
        self.due = self._clock()

    def _ask(self, wait_s: float) -> None:
        decision = self._question.ask(wait_s)
        if decision is None:
            self._again(wait_s)
        elif decision[0]:
            blocks, seconds = decision
            self.search.accept(blocks, self._clock() + seconds)
        else:
            self._end()

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
            load.wait(wait_s)
        wanted = load.copy(PIECE)
        search.confirm(load.loaded)
        if not wanted or load.done:
            # The compute thread first, the agent can wait.
            search.finish()
        elif load.waits:
            self._again(wait_s)
        else:
            self.due = self._clock()

    def _again(self, waited_s: float) -> None:
        self.due = min(self._clock() + (0.0 if waited_s else POLL_S), self.search.deadline)

    def _leave(self) -> None:
        """Give everything back, whatever has become of the search."""
        if self._load is not None:
            self._load.leave(self.search.end())
        else:
            self._question.cancel()
        self._end()

    def _end(self) -> None:
        self.search.finish()
        self.over = True
