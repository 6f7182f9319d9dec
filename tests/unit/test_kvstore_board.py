"""Counters in shared memory: each cell is one fetch's at a time, whoever writes late."""

from __future__ import annotations

import random
import threading

import pytest

from kvstore.board import BOARD_BYTES, CELLS, Board, Progress, read


def board() -> tuple[Board, memoryview]:
    memory = memoryview(bytearray(BOARD_BYTES))
    return Board(memory), memory.cast("Q")


def test_a_counter_starts_at_nothing_and_shows_what_it_was_told() -> None:
    subject, words = board()
    one, two = subject.open(), subject.open()
    assert one is not None and two is not None and one.cell != two.cell
    one.tell(7)
    two.tell(2**40)
    assert (read(words, one.cell), read(words, two.cell), len(subject)) == (7, 2**40, 2)
    one.close()
    one.close()
    again = subject.open()
    assert again is not None and again.cell == one.cell
    assert read(words, again.cell) == 0, "what the last one counted is forgotten before anybody is told of this one"
    one.tell(9)
    assert read(words, again.cell) == 0, "a thread of a fetch that has ended writes to nobody's cell"
    subject.check()


def test_there_are_so_many_and_no_more() -> None:
    subject, words = board()
    opened = [subject.open() for _ in range(CELLS + 1)]
    assert opened[-1] is None
    assert len({each.cell for each in opened if each}) == CELLS
    with pytest.raises(IndexError):
        read(words, CELLS)


@pytest.mark.parametrize("seed", range(3))
def test_against_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    subject, words = board()
    naive: dict[Progress, int] = {}
    over: list[Progress] = []
    for step in range(5_000):
        act = rng.random()
        if act < 0.3 and (progress := subject.open()) is not None:
            naive[progress] = 0
        elif act < 0.5 and naive:
            progress = rng.choice([*naive])
            progress.close()
            del naive[progress]
            over.append(progress)
        elif act < 0.9 and naive:
            progress = rng.choice([*naive])
            naive[progress] = step
            progress.tell(step)
        elif over:
            rng.choice(over).tell(step)
        assert {progress: read(words, progress.cell) for progress in naive} == naive
        assert len(subject) == len(naive)
        subject.check()


def test_a_thread_that_writes_while_its_counter_is_closed_writes_before_it_or_not_at_all() -> None:
    subject, words = board()
    for _ in range(200):
        progress = subject.open()
        assert progress is not None
        begun = threading.Event()

        def work(progress: Progress = progress, begun: threading.Event = begun) -> None:
            for count in range(1, 200):
                progress.tell(count)
                begun.set()

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        progress.close()
        successor = subject.open()
        assert successor is not None and successor.cell == progress.cell
        thread.join()
        assert read(words, successor.cell) == 0
        successor.close()
    assert len(subject) == 0
