"""The scheduler with blocks from elsewhere: an in-memory connector, a clock and a memory that the test moves."""

from __future__ import annotations

import random

import pytest

from kvstore.engine_messages import DECISION_S
from replica_agent.reference.block_pool import BlockPool
from replica_agent.reference.connector import Connector, Saving, Search
from replica_agent.reference.scheduler import Scheduler
from replica_agent.reference.sequence import SamplingParams, Sequence

SIZE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class MemoryConnector(Connector):
    """Keeps blocks in a dictionary. `memory` is what the engine's blocks hold: one value for each."""

    def __init__(self, pool: BlockPool, clock: Clock) -> None:
        self.pool = pool
        self.clock = clock
        self.memory: list[bytes] = [b""] * pool.num_blocks
        self.held: dict[bytes, bytes] = {}
        self.searches: list[Search] = []
        self.savings: list[Saving] = []
        self.answering = True

    def seek(self, request, keys, cached, tokens, hint):  # type: ignore[no-untyped-def]
        if not self.answering:
            return None
        search = Search(request, keys, cached, tokens, hint, self.clock)
        self.searches.append(search)
        return search

    def settle(self) -> None:
        pass

    def save(self, saving: Saving) -> None:
        self.savings.append(saving)

    def clear(self) -> None:
        self.held.clear()
        self.savings.clear()

    def observe(self, tokens: int, attended: int, seconds: float) -> None:
        raise AssertionError("the scheduler observes nothing")

    def save_all(self) -> None:
        for saving in self.savings:
            for block, version, content in zip(saving.blocks, saving.versions, saving.contents, strict=True):
                copied = self.memory[block]
                if self.pool.versions[block] == version:
                    assert copied == content.hash, "a block of one piece holds what it was saved as"
                    self.held[content.hash] = copied
        self.savings.clear()

    def decide(self, search: Search, deadline_s: float = 5.0) -> None:
        found = 0
        while found < len(search.keys) and search.keys[found] in self.held:
            found += 1
        if found:
            search.accept(found, self.clock() + deadline_s)
        else:
            search.finish()

    def copy(self, search: Search, blocks: int = 1_000_000) -> None:
        """Copy and confirm at most so many, and finish when all are there."""
        assert search.blocks is not None
        for number in range(search.loaded, min(search.loaded + blocks, len(search.blocks))):
            key = search.keys[search.skip + number]
            assert key in self.held
            if search.copy(number, lambda block, key=key: self.memory.__setitem__(block, self.held[key])):
                search.confirm(number + 1)
        if search.loaded == len(search.blocks):
            search.finish()


class Bench:
    """A scheduler, its connector, and a stand-in for the model that writes to `memory` what it computes."""

    def __init__(self, num_blocks: int = 64, step_tokens: int = 64, max_sequences: int = 8, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.pool = BlockPool(num_blocks, SIZE)
        self.connector = MemoryConnector(self.pool, self.clock)
        self.scheduler = Scheduler(self.pool, step_tokens, max_sequences, self.connector, self.clock)
        self.numbers = 0

    def add(self, tokens: list[int], max_tokens: int = 1) -> Sequence:
        self.numbers += 1
        new = Sequence(
            list(tokens), SamplingParams(max_tokens=max_tokens), lambda output: None, request=str(self.numbers)
        )
        self.scheduler.add(new)
        return new

    def step(self) -> list[tuple[Sequence, int]]:
        work = self.scheduler.schedule()
        self.scheduler.check()
        for sequence, tokens in work:
            end = sequence.computed + tokens
            for index in range(sequence.computed // SIZE, -(-end // SIZE)):
                whole = (index + 1) * SIZE <= end
                written = sequence.contents(SIZE)[index].hash if whole else b"part"
                self.connector.memory[sequence.blocks[index]] = written
        for ready in self.scheduler.commit(work):
            ready.tokens.append(self.rng.randrange(3))
            if ready.generated >= ready.params.max_tokens:
                self.scheduler.finish(ready)
        self.check()
        return [(item.sequence, item.tokens) for item in work]

    def check(self) -> None:
        self.scheduler.check()
        table = {content.hash for content, _, _ in self.pool.cached()}
        for block in range(self.pool.num_blocks):
            content = self.pool.content(block)
            if content is not None:
                assert self.connector.memory[block] == content.hash, "a reusable block holds other bytes than it says"
        assert table == {each.hash for each in map(self.pool.content, range(self.pool.num_blocks)) if each}

    def fill(self, tokens: list[int]) -> None:
        """Have a prompt computed and saved, and forgotten by the engine alone."""
        self.connector.answering = False
        self.add(tokens)
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
        self.connector.answering = True
        self.connector.save_all()
        self.pool.clear()


PROMPT = list(range(42))


def test_found_blocks_are_loaded_and_the_rest_is_computed() -> None:
    bench = Bench()
    bench.fill(PROMPT[:24])
    one = bench.add(PROMPT)
    assert bench.step() == [], "undecided"
    (search,) = bench.connector.searches
    assert (search.request, search.cached, search.tokens, len(search.keys)) == ("2", 0, 42, 10)
    bench.connector.decide(search)
    assert bench.step() == [], "loading"
    assert list(search.blocks or ()) == one.blocks[:6]
    bench.pool.drain()
    bench.connector.copy(search)
    assert bench.step() == [(one, 42 - 24)]
    assert (one.cached, bench.scheduler.hit_tokens) == (24, 24)
    assert (bench.scheduler.loaded_blocks, bench.scheduler.failed_blocks) == (6, 0)
    stored = [event for event in bench.pool.drain() if hasattr(event, "token_ids")]
    assert [len(event.block_hashes) for event in stored] == [6, 4], "loaded blocks are told of like computed ones"
    assert [token for event in stored for token in event.token_ids] == PROMPT[:40]
    saved = [content.hash for saving in bench.connector.savings for content in saving.contents]
    assert saved == [content.hash for content in one.contents(SIZE)[6:10]], "what came from the pool is not sent back"


def test_only_what_follows_the_local_run_is_sought_and_never_the_last_token() -> None:
    bench = Bench()
    bench.connector.answering = False
    bench.add(PROMPT[:16])
    bench.step()
    bench.connector.answering = True
    bench.add(PROMPT[:24])
    bench.step()
    (search,) = bench.connector.searches
    assert (search.cached, len(search.keys)) == (4, 1), "of six full blocks the last is computed for its logits"


def test_others_pass_one_that_is_undecided_and_fifty_milliseconds_are_the_most_it_waits() -> None:
    bench = Bench()
    first, second = bench.add(PROMPT), bench.add([7, 7, 7])
    assert bench.step() == [(second, 3)], "too short to be sought"
    assert bench.step() == []
    assert bench.scheduler.wake_at() == pytest.approx(bench.clock.now + DECISION_S)
    bench.clock.now += DECISION_S
    assert bench.step() == [(first, 42)]
    assert bench.connector.searches[0].ended
    assert bench.scheduler.wake_at() is None


def test_nothing_found_is_computed_at_once() -> None:
    bench = Bench()
    one = bench.add(PROMPT)
    bench.step()
    bench.connector.decide(bench.connector.searches[0])
    assert bench.step() == [(one, 42)]
    assert len(bench.connector.searches) == 1


def test_others_are_computed_while_one_is_loaded_also_when_the_step_is_full() -> None:
    bench = Bench(step_tokens=8)
    bench.fill(PROMPT)
    busy = bench.add([9] * 50)
    assert bench.step() == [], "sought, like all"
    bench.connector.decide(bench.connector.searches[-1])
    assert bench.step() == [(busy, 8)]
    one = bench.add(PROMPT)
    assert bench.step() == [(busy, 8)]
    bench.connector.decide(bench.connector.searches[-1])
    assert bench.step() == [(busy, 8)]
    assert one.blocks and one.search is not None
    bench.connector.copy(one.search)
    assert bench.step() == [(busy, 8)]
    assert one.computed == 40
    assert one.search is None


def test_what_has_not_come_by_the_deadline_is_computed() -> None:
    bench = Bench()
    bench.fill(PROMPT)
    one = bench.add(PROMPT)
    bench.step()
    search = bench.connector.searches[0]
    bench.connector.decide(search, deadline_s=2.0)
    bench.step()
    bench.connector.copy(search, 3)
    assert bench.step() == []
    assert bench.scheduler.wake_at() == pytest.approx(bench.clock.now + 2.0)
    bench.clock.now += 2.0
    assert bench.step() == [(one, 42 - 12)]
    assert (one.cached, bench.scheduler.loaded_blocks, bench.scheduler.failed_blocks) == (12, 3, 7)
    assert search.copy(2, lambda block: pytest.fail("nothing is written after the end")) is False
    search.confirm(12)
    assert search.loaded <= 3


def test_a_block_whose_copy_ends_after_the_deadline_is_not_loaded() -> None:
    """The engine was frozen in it, and its slot may have been given to another block."""
    bench = Bench()
    bench.fill(PROMPT)
    bench.add(PROMPT)
    bench.step()
    search = bench.connector.searches[0]
    bench.connector.decide(search, deadline_s=2.0)
    bench.step()
    bench.connector.copy(search, 3)

    def freeze(block: int) -> None:
        bench.connector.memory[block] = b"another's"
        bench.clock.now += 100.0

    assert search.copy(3, freeze) is False
    assert search.loaded == 3
    bench.step()
    assert bench.scheduler.loaded_blocks == 3


@pytest.mark.parametrize("cached", [0, 4, 8])
def test_blocks_that_the_engine_gets_in_the_meantime_are_not_loaded(cached: int) -> None:
    bench = Bench()
    bench.fill(PROMPT[:28])
    one = bench.add(PROMPT)
    bench.step()
    search = bench.connector.searches[0]
    bench.connector.decide(search)
    if cached:
        bench.connector.answering = False
        other = bench.add(PROMPT[: cached * SIZE + 1])
        bench.scheduler.waiting.rotate(1)
        bench.scheduler.max_sequences = 1
        assert bench.step() == [(other, cached * SIZE + 1)]
        bench.scheduler.max_sequences = 8
    work = bench.step()
    if cached == 8:
        assert work == [(one, 42 - 32)], "the engine has more than was found"
        assert search.ended
        return
    assert work == []
    assert (search.skip, len(search.blocks or ())) == (cached, 7 - cached)
    bench.connector.copy(search)
    assert bench.step() == [(one, 42 - 28)]


def test_blocks_that_the_engine_loses_in_the_meantime_end_the_search() -> None:
    bench = Bench(num_blocks=16)
    bench.fill(PROMPT[:24])
    bench.connector.answering = False
    bench.add(PROMPT[:9])
    bench.step()
    bench.connector.answering = True
    one = bench.add(PROMPT)
    bench.step()
    (search,) = bench.connector.searches
    assert search.cached == 2
    bench.connector.decide(search)
    bench.pool.clear()
    assert bench.step() == [(one, 42)]
    assert search.ended


def test_an_aborted_load_gives_its_blocks_back_at_once() -> None:
    bench = Bench()
    bench.fill(PROMPT)
    one = bench.add(PROMPT)
    bench.step()
    search = bench.connector.searches[0]
    bench.connector.decide(search)
    bench.step()
    bench.connector.copy(search, 2)
    bench.scheduler.finish(one)
    bench.check()
    assert bench.pool.free == 64
    assert search.ended
    assert search.copy(2, lambda block: pytest.fail("the block may be another's by now")) is False
    assert (bench.scheduler.queried_tokens, bench.scheduler.failed_blocks) == (42, 0), "the first prompt alone counts"


def test_an_aborted_search_is_ended() -> None:
    bench = Bench()
    one = bench.add(PROMPT)
    bench.step()
    bench.scheduler.finish(one)
    bench.check()
    assert bench.connector.searches[0].ended


def test_a_load_is_preempted_for_an_older_sequence_and_sought_again() -> None:
    bench = Bench(num_blocks=17)
    bench.fill(PROMPT)
    bench.connector.answering = False
    old = bench.add([5] * 20, max_tokens=24)
    bench.step()
    bench.connector.answering = True
    young = bench.add(PROMPT)
    bench.step()
    bench.connector.decide(bench.connector.searches[0])
    bench.step()
    assert young.blocks
    first = bench.connector.searches[0]
    while old.generated < 24:
        bench.step()
    assert first.ended
    assert bench.scheduler.preemptions == 1
    bench.step()
    assert len(bench.connector.searches) == 2
    bench.connector.decide(bench.connector.searches[1])
    bench.step()
    bench.connector.copy(bench.connector.searches[1])
    assert bench.step() == [(young, 2)]
    assert young.cached == 40


def test_clearing_ends_searches_and_loads_and_uses_nothing_of_them() -> None:
    bench = Bench()
    bench.fill(PROMPT)
    loading = bench.add(PROMPT)
    bench.step()
    search = bench.connector.searches[0]
    bench.connector.decide(search)
    bench.step()
    bench.connector.copy(search, 4)
    undecided = bench.add([3] * 10)
    bench.step()
    bench.scheduler.clear()
    bench.check()
    assert all(search.ended for search in bench.connector.searches)
    assert bench.step() == [(loading, 42), (undecided, 10)]
    assert bench.connector.held == {}
    assert [content.tokens[0] for content, _, _ in bench.pool.cached()] == [3, 3], "begun before, not reusable"


@pytest.mark.parametrize("seed", range(8))
def test_stress_every_sequence_ends_and_no_block_holds_other_bytes(seed: int) -> None:
    bench = Bench(num_blocks=24, step_tokens=random.Random(seed).choice((4, 16, 64)), max_sequences=5, seed=seed)
    rng, scheduler, connector = bench.rng, bench.scheduler, bench.connector
    live: list[Sequence] = []
    documents = [[rng.randrange(9) for _ in range(60)] for _ in range(6)]

    def shake() -> None:
        """The connector's threads get to do something."""
        for search in connector.searches:
            if search.done or rng.random() < 0.5:
                continue
            if search.ended:
                search.finish()
            elif search.found is None:
                connector.decide(search, rng.choice((0.01, 1.0)))
            elif search.blocks is not None and all(key in connector.held for key in search.keys[: search.found]):
                connector.copy(search, rng.randint(0, 3))
            elif rng.random() < 0.1:
                search.finish()
        connector.searches = [each for each in connector.searches if not each.done]
        if rng.random() < 0.3:
            connector.save_all()

    for turn in range(1200):
        if turn < 600 and rng.random() < 0.4:
            prompt = rng.choice(documents)[: rng.randint(1, 60)]
            live.append(bench.add(prompt, rng.randint(1, 24)))
        if live and rng.random() < 0.05:
            scheduler.finish(live[rng.randrange(len(live))])
        if rng.random() < 0.003:
            scheduler.clear()
        connector.answering = rng.random() < 0.9
        bench.clock.now += rng.choice((0.001, 0.02))
        shake()
        bench.step()
    for _ in range(2000):
        if not (scheduler.running or scheduler.waiting):
            break
        if not bench.step():
            # What the engine does then: wait for the connector, here in vain, until the time it was told.
            until = scheduler.wake_at()
            assert until is not None, "the scheduler stands still"
            bench.clock.now = max(bench.clock.now, until)
    assert not scheduler.running and not scheduler.waiting
    assert bench.pool.free == 24
    assert scheduler.loaded_blocks > 50
    assert scheduler.failed_blocks > 5
    assert scheduler.preemptions > 0
