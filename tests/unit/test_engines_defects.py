"""Whatever is raised in the threads beside an engine: what it was about comes to nothing, and the thread lives on."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from naive_agent import NaiveAgent
from vllm_support import SIZE, block_bytes, facts, keys_of, link_to, rank_of, until

from kvstore import engine_messages as wire
from replica_agent.engines.pool_link import PoolLink
from replica_agent.engines.saver import Saver, Saving
from replica_agent.engines.vllm.asker import Asker, Search
from replica_agent.engines.vllm.step import LoadOrder, SaveOrder, Step
from replica_agent.engines.vllm.worker_side import WorkerSide

KEYS = keys_of(range(10 * SIZE))
ENGINE = facts()
SLOT = ENGINE.layout.slot_bytes


class Trouble(Exception):
    """Of no kind that anybody expects."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[NaiveAgent]:
    with NaiveAgent(tmp_path / "agent.sock") as agent:
        yield agent


@pytest.fixture
def link(agent: NaiveAgent) -> Iterator[PoolLink]:
    link = link_to(agent.path, ENGINE)
    yield link
    link.close()


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """A process that has as many files open as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_link_outlives_a_lack_of_descriptors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "agent.sock"
    link = PoolLink(str(path), ENGINE.hello())
    try:
        with without_descriptors():
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            until(lambda: "Too many open files" in caplog.text, "it is said")
        with NaiveAgent(path):
            until(lambda: link.client is not None, "connected")
    finally:
        link.close()


def test_a_link_outlives_what_nobody_expects(agent: NaiveAgent, caplog: pytest.LogCaptureFixture) -> None:
    link = PoolLink(str(agent.path), msgspec.structs.replace(ENGINE.hello(), engine_id=object()))
    try:
        until(lambda: link._defects.count > 1, "tried again")
        assert "no agent at" in caplog.text and "Traceback" in caplog.text
        link._hello = ENGINE.hello()
        until(lambda: link.client is not None, "connected")
    finally:
        link.close()


class Device:
    """Blocks to save, some of which cannot be read."""

    def __init__(self) -> None:
        self.broken: set[int] = set()

    def read(self, number: int, slot: memoryview) -> None:
        slot[:] = bytes([number]) * SLOT
        if number in self.broken:
            raise Trouble("the device has failed")


@contextlib.contextmanager
def saving(link: PoolLink, device: Device, **more: Any) -> Iterator[Saver]:
    saver = Saver(link, device.read, [0] * 10, **more)
    try:
        yield saver
        saver.check()
    finally:
        link.close()
        saver.close()


def raises() -> Any:
    raise Trouble("not even this")


def test_what_cannot_be_copied_is_shed_and_the_rest_is_saved(agent: NaiveAgent, link: PoolLink) -> None:
    device = Device()
    with saving(link, device) as saver:
        device.broken = {1}
        saver.save(Saving([0, 1, 2], [0] * 3, KEYS[:3], b""))
        until(lambda: saver.shed == 2, "shed")
        until(lambda: agent.held.keys() == {KEYS[0]} and not agent.reserved, "the slots are given back")
        saver.save(Saving([3], [0], KEYS[3:4], KEYS[2], raises))
        until(lambda: saver.shed == 3 and not agent.reserved, "shed")
        # No such block: that comes out before the agent is asked.
        saver.save(Saving([3, 99], [0] * 2, KEYS[3:5], KEYS[2]))
        until(lambda: saver.shed == 5, "shed")
        device.broken = set()
        saver.save(Saving([1, 2], [0] * 2, KEYS[1:3], KEYS[0]))
        until(lambda: agent.held.keys() == {*KEYS[:3]}, "saved")
        assert (saver.saved, saver.shed, saver.queued) == (3, 5, 0)
        assert agent.block(KEYS[2]) == bytes([2]) * SLOT


def test_a_device_that_fails_at_every_step_is_not_logged_at_every_step(
    agent: NaiveAgent, link: PoolLink, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    device.broken = {0}
    with saving(link, device) as saver:
        for number in range(40):
            saver.save(Saving([0], [0], [bytes([number]) * 32], b""))
        until(lambda: saver.shed == 40, "shed")
    assert caplog.text.count("cannot be copied") == 6, "the 1st, 2nd, 4th, 8th, 16th and 32nd"


def test_a_clear_is_owed_through_whatever_is_raised(
    agent: NaiveAgent, link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(link, Device()) as saver:
        saver.save(Saving([0], [0], KEYS[:1], b""))
        until(lambda: agent.held, "saved")
        with monkeypatch.context() as broken:
            broken.setattr(wire, "Clear", raises)
            saver.clear(1)
            until(lambda: saver._defects.count > 1, "tried again")
            assert agent.held and not saver.cleared
        until(lambda: saver.cleared == 1 and not agent.held, "cleared")


def test_what_is_observed_waits_within_bounds(agent: NaiveAgent, link: PoolLink) -> None:
    with saving(link, Device(), max_queued=4) as saver:
        at_it, go_on = threading.Event(), threading.Event()

        def stuck() -> float:
            at_it.set()
            go_on.wait(30)
            return raises()

        saver.observe(1, 1, stuck)
        assert at_it.wait(30)
        for number in range(100):
            saver.observe(number, 1, lambda: 0.5)
        assert len(saver._queue) == 4
        saver.check()
        go_on.set()
        until(lambda: agent.count(wire.Observe) == 4, "told")
        told = [each for each in agent.asked if isinstance(each, wire.Observe)]
        assert [each.tokens for each in told] == [0, 1, 2, 3], "and what was raised before them has ended nothing"


def test_a_search_that_cannot_be_asked_for_finds_nothing(agent: NaiveAgent, link: PoolLink) -> None:
    clears = 0
    asker = Asker(link, lambda: clears)
    try:
        assert link.client is not None
        agent.held |= {key: slot for slot, key in enumerate(KEYS[:3])}
        searches = [
            Search(name, keys, 0, 41, None, link.client, time.monotonic() + 30)
            for name, keys in (("odd", ["no key"]), ("good", KEYS))
        ]
        for search in searches:
            asker.ask(search)  # type: ignore[arg-type]
        for search in searches:
            assert search.decided.wait(30)
        assert [search.found for search in searches] == [0, 3]
        until(lambda: agent.count(wire.Cancel) == 1 and len(asker) == 1, "the agent keeps nothing for it")
        asker.cancel(searches[1])
        until(lambda: not agent.working, "given back")
    finally:
        link.close()
        asker.close()


def test_a_load_that_cannot_be_copied_is_computed_and_given_back(
    agent: NaiveAgent, link: PoolLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(ENGINE)
    worker = WorkerSide(link, rank.cache, torch.device("cpu"), rank=0, blocks=24, writes=True, observes=True)

    def step(**parts: Any) -> tuple[set[str], set[int]]:
        it = Step(**parts)
        worker.begin(it)
        worker.end(it)
        over = worker.finished(())
        worker.check()
        return over, worker.failed()

    def load(name: str) -> set[int]:
        assert link.client is not None
        assert isinstance(link.client.prepare(name, KEYS[:4], 0, 41, None), wire.Accepted)
        order = LoadOrder(name, name, [3, 4, 5, 6], 0, time.monotonic() + 20)
        over, failed = step(fresh=order.blocks, loads=[order])
        began = time.monotonic()
        while not over:
            assert time.monotonic() < began + 15, "before its deadline"
            time.sleep(0.001)
            over, more = step()
            failed |= more
        return failed

    try:
        for block, key in enumerate(KEYS[:4]):
            rank.compute(block, key)
        step(saves=[SaveOrder([0, 1, 2, 3], list(KEYS[:4]), b"")])
        until(lambda: {*KEYS[:4]} <= agent.held.keys(), "saved")
        write = type(rank.cache).write

        def fails(cache: Any, number: int, slot: memoryview) -> None:
            write(cache, number, slot)
            if number == 5:
                raise Trouble("the device has failed")

        with monkeypatch.context() as broken:
            broken.setattr(type(rank.cache), "write", fails)
            for name in "abc":
                assert load(name) == {3, 4, 5, 6}
            until(lambda: not agent.working and not len(worker._loads._courses), "given back")
        assert agent.count(wire.Failed) == 3
        assert load("d") == set()
        assert all(rank.holds(block, key) for block, key in zip([3, 4, 5, 6], KEYS[:4], strict=True))
        assert agent.block(KEYS[0]) == block_bytes(KEYS[0], ENGINE.layout)
    finally:
        worker.close()
