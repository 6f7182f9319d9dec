"""The thread that takes an engine's loads on, step by step, whether one is under way or many."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from replica_agent.engines.defects import Defects

_log = logging.getLogger(__name__)

WAIT_S = 0.002
"""For the agent's news, where it is the only thing to wait for: what else comes up waits as long."""

POLL_S = 0.001
"""Between two questions about one course, where there are several."""

PIECE = 16
"""Blocks copied for one course before the others are looked at."""


class Course(Protocol):
    """What is to be done for one request, by the thread of `Courses` alone."""

    due: float
    """When there is something to do."""
    over: bool
    """There is nothing more to do."""

    @property
    def stirred(self) -> bool:
        """Whether another thread has done something about it, so that it is due."""

    def advance(self, wait_s: float) -> bool:
        """Do what can be done now, which may be to wait for the agent's news for `wait_s`. Whether the engine should
        look at it."""

    def fail(self) -> None:
        """`advance` has raised what nobody expected. It is called once more at most, to give back what was taken: when
        that raises as well, the course is over."""


_C = TypeVar("_C", bound=Course)


class Courses(Generic[_C]):
    """Owns the courses under way, and the thread that advances each until it is over. Any thread may call it; none
    waits.

    `notify` is called from the thread when the engine should look at a course; it must not wait. A course that raises
    fails alone.
    """

    def __init__(self, notify: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self.notify = notify
        self._clock = clock
        self._courses: list[_C] = []
        self._changed = threading.Condition()
        self._woken = False
        self._closing = False
        self._defects = Defects(_log)
        self._thread = threading.Thread(target=self._run, name="kv-load", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Courses that are not over."""
        return len(self._courses)

    def __iter__(self) -> Iterator[_C]:
        """These, as they are now."""
        return iter(self._courses[:])

    def begin(self, courses: Iterable[_C]) -> None:
        """Take these up."""
        with self._changed:
            self._courses += courses
            self._changed.notify()

    def wake(self) -> None:
        """A course has been stirred."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread; what is not over stays so. Whatever its connections still had to ask, they are to be closed
        first."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        # Waits with no course in a local variable: its client would keep the memory of an agent that has gone.
        while self._advance(*self._due()):
            pass

    def _advance(self, due: Sequence[_C], alone: bool) -> bool:
        """Do what is due; whether anything was."""
        for course in due:
            try:
                news = course.advance(WAIT_S if alone else 0.0)
            except Exception:
                self._defects.note("a load fails")
                course.fail()
                news = True
            if course.over:
                with self._changed:
                    self._courses.remove(course)
            if news:
                self.notify()
        return bool(due)

    def _due(self) -> tuple[list[_C], bool]:
        """Wait until something is to be done, and say whether nothing else will be in the time that the agent may take
        for an answer. No course when closing."""
        with self._changed:
            while not self._closing:
                now = self._clock()
                woken, self._woken = self._woken, False
                due = [each for each in self._courses if each.due <= now or (woken and each.stirred)]
                if due:
                    return due, sum(each.due <= now + WAIT_S or each in due for each in self._courses) == 1
                first = min((course.due for course in self._courses), default=math.inf)
                self._changed.wait(None if first == math.inf else max(0.0, first - now))
            return [], True
