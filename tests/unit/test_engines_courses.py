"""The thread that advances an engine's loads: each until it is over, none after, and none forgotten."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable

import pytest
from agent_support import DEADLINE_S

from replica_agent.engines.courses import WAIT_S, Courses


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Steps:
    """A course of so many steps. Before each it is due at once, some time later, or only when it is stirred."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self.due = time.monotonic()
        self.over = False
        self.stirred = False
        self.waits: list[float] = []
        self.news = 0
        self._rng = rng
        self._left = count

    def advance(self, wait_s: float) -> bool:
        assert not self.over and (self.due <= time.monotonic() or self.stirred)
        self.waits.append(wait_s)
        self.stirred = False
        self._left -= 1
        self.over = not self._left
        self.due = self._rng.choice((time.monotonic(), time.monotonic() + 0.002, math.inf))
        news = self._rng.random() < 0.5
        self.news += news
        return news

    def fail(self) -> None:
        raise AssertionError("none of its steps raises")


@pytest.mark.parametrize("seed", range(3))
def test_stress_every_course_takes_each_of_its_steps_once(seed: int) -> None:
    rng = random.Random(seed)
    told: list[None] = []
    courses: Courses[Steps] = Courses(lambda: told.append(None))
    naive: list[tuple[Steps, int]] = []
    try:
        for _ in range(60):
            begun = [(Steps(random.Random(rng.random()), count), count) for count in rng.choices(range(1, 9), k=2)]
            naive += begun
            courses.begin(course for course, _ in begun)
            for course, _ in rng.sample(naive, k=min(3, len(naive))):
                course.stirred = True
            courses.wake()
        while any(not course.over for course, _ in naive):
            for course, _ in naive:
                course.stirred = not course.over
            courses.wake()
            time.sleep(0.001)
        wait_for(lambda: not len(courses))
    finally:
        courses.close()
    assert [len(course.waits) for course, _ in naive] == [count for _, count in naive]
    assert len(told) == sum(course.news for course, _ in naive)


class Broken(Steps):
    """Raises at its first step, and `twice` when it is to give back what it took."""

    def __init__(self, twice: bool) -> None:
        super().__init__(random.Random(0), 1 << 30)
        self.twice = twice
        self.failures = 0

    def advance(self, wait_s: float) -> bool:
        assert not self.over
        self.waits.append(wait_s)
        if len(self.waits) == 1 or self.twice:
            raise ZeroDivisionError
        self.over = True
        return False

    def fail(self) -> None:
        self.failures += 1
        self.over = self.failures > 1


def test_a_course_that_raises_fails_alone() -> None:
    told: list[None] = []
    courses: Courses[Steps] = Courses(lambda: told.append(None))
    broken, worse, sound = Broken(False), Broken(True), Steps(random.Random(3), 50)
    try:
        courses.begin([broken, sound, worse])
        while not sound.over:
            sound.stirred = True
            courses.wake()
            time.sleep(0.001)
        wait_for(lambda: not len(courses))
    finally:
        courses.close()
    assert [len(each.waits) for each in (broken, worse, sound)] == [2, 2, 50]
    assert [broken.failures, worse.failures] == [1, 2]
    assert len(told) == sound.news + 3, "an engine looks at what has failed"


class Waiting(Steps):
    """Due again at once, for ever; says when it is asked a second time."""

    def __init__(self, due: float = 0.0) -> None:
        super().__init__(random.Random(0), 1 << 30)
        self.due = due
        self.twice = threading.Event()

    def advance(self, wait_s: float) -> bool:
        super().advance(wait_s)
        self.due = time.monotonic()
        if len(self.waits) > 1:
            self.twice.set()
        return False


def test_one_alone_may_wait_and_one_of_several_may_not() -> None:
    first, second, later = Waiting(), Waiting(), Waiting(math.inf)
    for together, waits in (([first], {WAIT_S}), ([second, later], {WAIT_S}), ([Waiting(), Waiting()], {0.0})):
        courses: Courses[Waiting] = Courses(lambda: None)
        try:
            courses.begin(together)
            assert together[0].twice.wait(DEADLINE_S)
        finally:
            courses.close()
        assert set(together[0].waits) == waits
    assert not later.waits


def test_what_is_begun_is_listed_until_it_is_over() -> None:
    courses: Courses[Steps] = Courses(lambda: None)
    course = Steps(random.Random(1), 1)
    course.due = math.inf
    try:
        courses.begin([course])
        assert [*courses] == [course] and len(courses) == 1
        course.stirred = True
        courses.wake()
        wait_for(lambda: not len(courses))
        assert [*courses] == [] and course.over
    finally:
        courses.close()
