"""A rank's side: what is saved has the right bytes, what is loaded is taken exactly once, and nobody waits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from naive_agent import NaiveAgent
from vllm_support import SIZE, Rank, block_bytes, facts, keys_of, link_to, rank_of, until

from kvstore import engine_messages as wire
from replica_agent.engines.vllm.step import LoadOrder, Prefill, SaveOrder, Step
from replica_agent.engines.vllm.worker_side import WorkerSide

BLOCKS = 24


class Worker:
    """A rank, its side, and steps as vLLM makes them."""

    def __init__(self, agent: NaiveAgent, **more: Any) -> None:
        self.agent = agent
        engine = facts(agent.path, blocks=BLOCKS, **more)
        self.rank: Rank = rank_of(engine)
        self.link = link_to(agent.path, engine)
        self.real = WorkerSide(
            self.link,
            self.rank.cache,
            torch.device("cpu"),
            rank=0,
            blocks=BLOCKS,
            writes=True,
            observes=True,
        )
        self.prepared = 0

    def step(self, ended: Sequence[str] = (), **parts: Any) -> tuple[set[str], set[int]]:
        """One step; requests whose loads are over, and blocks that failed."""
        step = Step(**parts)
        self.real.begin(step)
        for save in step.saves:
            for block, key in zip(save.blocks, save.keys, strict=True):
                self.rank.compute(block, key)
        self.real.end(step)
        over = self.real.finished(ended)
        self.real.check()
        return over, self.real.failed()

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Compute and save, and wait until it is there."""
        self.step(fresh=list(blocks), saves=[SaveOrder(list(blocks), list(keys), b"")])
        until(lambda: set(keys) <= self.agent.held.keys(), "saved")

    def order(
        self, name: str, keys: Sequence[bytes], blocks: Sequence[int], *, skip: int = 0, s: float = 20
    ) -> LoadOrder:
        """As the scheduler's side: the agent has accepted a search for all of `keys`."""
        client = self.link.client
        assert client is not None
        answer = client.prepare(name, keys, 0, len(keys) * SIZE + 1, None)
        while isinstance(answer, wire.Pending):
            answer = client.poll(name)
        assert isinstance(answer, wire.Accepted)
        return LoadOrder(name, name, list(blocks), skip, time.monotonic() + s)

    def load(self, order: LoadOrder) -> set[int]:
        """A load to its end; the blocks that failed."""
        over, failed = self.step(fresh=order.blocks, loads=[order])
        deadline = time.monotonic() + 30
        while order.request not in over:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
            over, more = self.step()
            failed |= more
        return failed


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[NaiveAgent]:
    with NaiveAgent(tmp_path / "agent.sock") as agent:
        yield agent


@contextmanager
def opened(agent: NaiveAgent, **more: Any) -> Iterator[Worker]:
    worker = Worker(agent, **more)
    try:
        yield worker
    finally:
        began = time.monotonic()
        worker.real.close()
        assert time.monotonic() - began < 5, "it closes whatever hangs"


KEYS = keys_of(range(10 * SIZE))


def test_what_is_saved_by_one_is_loaded_by_another(agent: NaiveAgent) -> None:
    with opened(agent) as writer:
        writer.save(KEYS[:5], [4, 9, 1, 7, 2])
        for key in KEYS[:5]:
            assert agent.block(key) == block_bytes(key, writer.rank.facts.layout)
    with opened(agent) as reader:
        assert reader.load(reader.order("r", KEYS[:5], [3, 1, 0, 2, 5])) == set()
        for key, block in zip(KEYS, [3, 1, 0, 2, 5], strict=False):
            assert reader.rank.holds(block, key)
        until(lambda: not agent.working, "released")
        (release,) = [each for each in agent.asked if isinstance(each, wire.Release)]
        assert release.loaded == 5


def test_blocks_that_are_not_needed_are_skipped(agent: NaiveAgent) -> None:
    with opened(agent) as worker:
        worker.save(KEYS[:5], [0, 1, 2, 3, 4])
        assert worker.load(worker.order("r", KEYS[:5], [10, 11, 12], skip=2)) == set()
        for key, block in zip(KEYS[2:], [10, 11, 12], strict=False):
            assert worker.rank.holds(block, key)


def test_what_does_not_come_is_named_and_what_came_is_kept(agent: NaiveAgent) -> None:
    with opened(agent) as worker:
        worker.save(KEYS[:6], [0, 1, 2, 3, 4, 5])
        agent.withheld = 2
        agent.loading = 5
        assert worker.load(worker.order("r", KEYS[:6], [10, 11, 12, 13, 14, 15])) == {14, 15}
        for key, block in zip(KEYS[:4], [10, 11, 12, 13], strict=False):
            assert worker.rank.holds(block, key)
        until(lambda: agent.count(wire.Release) == 1, "released")
        (failed,) = [each for each in agent.asked if isinstance(each, wire.Failed)]
        assert failed.blocks == 2
        assert [type(each) for each in agent.asked][-2:] == [wire.Failed, wire.Release]


def test_a_load_ends_with_its_deadline(agent: NaiveAgent) -> None:
    with opened(agent) as worker:
        worker.save(KEYS[:2], [0, 1])
        agent.loading = 1_000_000
        assert worker.load(worker.order("r", KEYS[:2], [10, 11], s=0.1)) == {10, 11}
        until(lambda: not agent.working, "the agent is told")


@pytest.mark.parametrize("how", ["hang up", "freeze"])
def test_an_agent_that_fails_in_a_load_costs_its_deadline_at_most(agent: NaiveAgent, how: str) -> None:
    with opened(agent) as worker:
        worker.save(KEYS[:2], [0, 1])
        agent.loading = 1_000_000
        order = worker.order("r", KEYS[:2], [10, 11], s=0.3)
        worker.step(fresh=[10, 11], loads=[order])
        polls = agent.count(wire.Poll)
        until(lambda: agent.count(wire.Poll) > polls, "under way")
        if how == "freeze":
            agent.silent |= {wire.Poll, wire.Release, wire.Cancel, wire.Failed}
        else:
            agent.hang_up()
        began = time.monotonic()
        over: set[str] = set()
        failed: set[int] = set()
        while not over:
            over, failed = worker.step()
            time.sleep(0.0005)
        assert time.monotonic() - began < 0.9, "not the time that a question may take"
        assert failed == {10, 11}


def test_without_a_connection_a_load_has_failed_at_once(agent: NaiveAgent) -> None:
    with opened(agent) as worker:
        worker.save(KEYS[:2], [0, 1])
        order = worker.order("r", KEYS[:2], [10, 11])
        agent.refusal = "no more"
        agent.hang_up()
        until(lambda: worker.link.client is None, "noticed")
        assert worker.step(loads=[order]) == ({"r"}, {10, 11})


def test_a_request_that_ended_is_taken_at_once_and_written_no_more(
    agent: NaiveAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(agent) as worker:
        worker.save(KEYS[:8], list(range(8)))
        write = worker.rank.cache.write

        def slowly(block: int, slot: memoryview) -> None:
            time.sleep(0.0005)
            write(block, slot)

        monkeypatch.setattr(worker.rank.cache, "write", slowly)
        for number in range(30):
            order = worker.order(f"r{number}", KEYS[:8], list(range(10, 18)))
            over, failed = worker.step(fresh=order.blocks, loads=[order])
            time.sleep(random.Random(number).uniform(0, 0.006))
            if order.request not in over:
                over, failed = worker.step(ended=[order.request])
            assert (over, failed) == ({order.request}, set())
            # Somebody else's from now on.
            for cache in worker.rank.caches:
                cache[10:18] = -1.0
            time.sleep(0.001)
            assert all(bool((cache[10:18] == -1.0).all()) for cache in worker.rank.caches)
        until(lambda: not agent.working, "all are given back")
        assert not agent.count(wire.Failed), "nobody counts blocks that nobody wanted"


def test_what_does_not_fit_into_the_queue_is_shed(agent: NaiveAgent) -> None:
    with opened(agent) as worker:
        agent.silent.add(wire.Reserve)
        worker.real._saver._max_queued = 4
        for number in range(4):
            keys = keys_of([number] * 2 * SIZE)
            worker.step(saves=[SaveOrder([2 * number, 2 * number + 1], keys, b"")])
            if not number:
                until(lambda: agent.count(wire.Reserve) == 1, "the first is at the agent")
        assert worker.real._saver.queued == 4
        assert worker.real._saver.shed == 2


def test_a_block_that_is_given_out_anew_is_not_saved_as_what_it_was(agent: NaiveAgent) -> None:
    with opened(agent) as worker:
        # Whatever the saving thread asks now is answered later.
        with agent._lock:
            worker.step(fresh=[1, 2, 3], saves=[SaveOrder([1, 2, 3], KEYS[:3], b"")])
            worker.step(fresh=[2])
        until(lambda: KEYS[0] in agent.held, "the first is as it was")
        until(lambda: worker.real._saver.queued == 0 and worker.real._saver.shed, "the second is not")
        assert KEYS[1] not in agent.held
        worker.save(KEYS[:2], [1, 2])


def test_a_clear_goes_first_and_is_owed_until_it_is_confirmed(agent: NaiveAgent) -> None:
    with opened(agent) as worker:
        worker.save(KEYS[:2], [0, 1])
        agent.silent.add(wire.Clear)
        worker.step(clears=1)
        until(lambda: agent.count(wire.Clear) == 1, "asked")
        assert worker.real.cleared() is None
        agent.hang_up()
        agent.silent.clear()
        until(lambda: not agent.held, "cleared")
        until(lambda: worker.real.cleared(), "and told")
        assert worker.real.cleared() is None, "once"
        worker.save(KEYS[:2], [0, 1])


def test_a_prefill_is_observed(agent: NaiveAgent) -> None:
    with opened(agent) as worker:
        worker.step(prefill=Prefill(40, 820))
        until(lambda: agent.count(wire.Observe) == 1, "told")
        (told,) = [each for each in agent.asked if isinstance(each, wire.Observe)]
        assert (told.tokens, told.attended) == (40, 820)
        assert 0 < told.seconds < 5


@pytest.mark.parametrize("seed", range(2))
def test_stress_saves_under_overwriting(agent: NaiveAgent, seed: int) -> None:
    """Blocks are given out anew all the time, without waiting for anybody: whatever is visible has its key's bytes."""
    rng = random.Random(seed)
    agent._free = list(range(256))
    with opened(agent) as worker:
        while agent._free:
            count = rng.randrange(1, 6)
            blocks = rng.sample(range(BLOCKS), count)
            keys = keys_of([rng.randrange(10**6) for _ in range(count * SIZE)])
            worker.step(fresh=blocks, saves=[SaveOrder(blocks, keys, b"")])
            if rng.random() < 0.2:
                time.sleep(rng.uniform(0, 0.005))
        until(lambda: worker.real._saver.queued == 0 and not agent.reserved, "drained")
        assert worker.real._saver.shed, "some were given out too soon"
        assert agent.held, "and some were not"
        for key in agent.held:
            assert agent.block(key) == block_bytes(key, worker.rank.facts.layout), "torn"
