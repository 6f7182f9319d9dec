"""What a pool tells reaches the catalogue in order, later, and a part at a time."""

from __future__ import annotations

import asyncio
import random

from agent_support import until

from replica_agent.pool_news import MOST_A_TURN, PoolNews


class Heard:
    """A catalogue that writes down what it hears, and when."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.turns: list[int] = []
        self.changes = 0
        self.news = PoolNews(self, self._changed)  # type: ignore[arg-type]
        self._count = 0

    def pool_held(self, key: bytes) -> None:
        self.keys.add(key)
        self._count += 1

    def pool_dropped(self, key: bytes) -> None:
        self.keys.remove(key)
        self._count += 1

    def _changed(self) -> None:
        self.turns.append(self._count)
        self._count = 0


async def test_it_is_passed_on_later_and_nothing_has_to_come_after_it() -> None:
    subject = Heard()
    subject.news.block_held(b"one")
    subject.news.check()
    assert (subject.keys, len(subject.news)) == (set(), 1)
    await until(lambda: subject.keys == {b"one"})
    subject.news.check()
    assert subject.turns == [1]


async def test_a_pool_that_is_cleared_does_not_hold_the_loop() -> None:
    subject = Heard()
    keys = [index.to_bytes(4, "big") for index in range(2 * MOST_A_TURN + 5)]
    for key in keys:
        subject.news.block_held(key)
    await until(lambda: len(subject.keys) == len(keys))
    for key in keys:
        subject.news.block_dropped(key)
    await until(lambda: not subject.keys)
    assert subject.turns == [MOST_A_TURN, MOST_A_TURN, 5] * 2
    subject.news.check()


async def test_against_a_set() -> None:
    rng = random.Random(7)
    subject, naive = Heard(), set[bytes]()
    for _ in range(2_000):
        key = bytes([rng.randrange(40)])
        if key in naive:
            naive.remove(key)
            subject.news.block_dropped(key)
        else:
            naive.add(key)
            subject.news.block_held(key)
        if rng.random() < 0.05:
            await asyncio.sleep(rng.choice([0, 0.001, 0.003]))
        subject.news.check()
    await until(lambda: not len(subject.news))
    assert subject.keys == naive
