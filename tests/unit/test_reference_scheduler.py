"""The scheduler, with a stand-in for the model: whatever is scheduled counts as computed."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from reference_support import fold

from kvstore.identity import wire_block_hash
from replica_agent.reference.block_pool import BlockPool
from replica_agent.reference.scheduler import Scheduler
from replica_agent.reference.sequence import SamplingParams, Sequence

SIZE = 4


def sequence(tokens: list[int], max_tokens: int = 4, salt: str | None = None) -> Sequence:
    return Sequence(list(tokens), SamplingParams(max_tokens=max_tokens), lambda output: None, salt=salt)


def step(scheduler: Scheduler, rng: random.Random) -> list[tuple[Sequence, int]]:
    """One engine step; sequences that have reached their limit end. Returns what was computed."""
    work = scheduler.schedule()
    for ready in scheduler.commit(work):
        ready.tokens.append(rng.randrange(3))
        if ready.generated >= ready.params.max_tokens:
            scheduler.finish(ready)
    scheduler.check()
    return [(item.sequence, item.tokens) for item in work]


def make(num_blocks: int = 64, step_tokens: int = 16, max_sequences: int = 8) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, SIZE), step_tokens, max_sequences)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    scheduler, rng = make(), random.Random(0)
    short, long = sequence([1, 2, 3], max_tokens=9), sequence(list(range(40)))
    scheduler.add(short)
    scheduler.add(long)
    assert step(scheduler, rng) == [(short, 3), (long, 13)]
    assert step(scheduler, rng) == [(short, 1), (long, 15)]
    assert step(scheduler, rng) == [(short, 1), (long, 12)]
    assert step(scheduler, rng) == [(short, 1), (long, 1)]


def test_an_identical_prompt_computes_its_last_block_again() -> None:
    scheduler, rng = make(), random.Random(0)
    first, second = sequence(list(range(8)), max_tokens=1), sequence(list(range(8)), max_tokens=1)
    scheduler.add(first)
    step(scheduler, rng)
    scheduler.add(second)
    assert step(scheduler, rng) == [(second, 4)]
    assert (first.cached, second.cached) == (0, 4)
    assert sorted(copies for _, copies, _ in scheduler.pool.cached()) == [1, 2]


def test_blocks_of_a_running_prompt_are_hit_as_soon_as_they_are_computed() -> None:
    scheduler, rng = make(), random.Random(0)
    first, second = sequence(list(range(40))), sequence(list(range(40)))
    scheduler.add(first)
    step(scheduler, rng)
    scheduler.add(second)
    assert scheduler.queued_prefill_tokens() == 24 + 24
    scheduler.schedule()
    scheduler.check()
    assert second.cached is None, "the first one's chunk takes the whole step"


def test_a_salt_keeps_prompts_apart() -> None:
    scheduler, rng = make(), random.Random(0)
    for salt in (None, "a", "b", "a"):
        last = sequence(list(range(12)), max_tokens=1, salt=salt)
        scheduler.add(last)
        step(scheduler, rng)
    assert last.cached == 8
    assert (scheduler.queried_tokens, scheduler.hit_tokens) == (48, 8)


def test_generated_tokens_are_reusable_too() -> None:
    scheduler, rng = make(), random.Random(0)
    first = sequence([1, 2, 3], max_tokens=6)
    scheduler.add(first)
    while scheduler.running or scheduler.waiting:
        step(scheduler, rng)
    # Nine tokens, the last of which was never computed: two full blocks.
    follow_up = sequence([*first.tokens, 1, 1])
    scheduler.add(follow_up)
    step(scheduler, rng)
    assert follow_up.cached == 8


def test_admission_is_first_come_first_served() -> None:
    scheduler = make(num_blocks=10)
    big, small = sequence([1] * 36, max_tokens=1), sequence([2], max_tokens=1)
    blocker = sequence([3] * 8, max_tokens=20)
    for each in (blocker, big, small):
        scheduler.add(each)
    scheduler.schedule()
    assert scheduler.running == [blocker]
    assert list(scheduler.waiting) == [big, small]


def test_preemption_takes_the_youngest_and_recomputes_it() -> None:
    scheduler, rng = make(num_blocks=6), random.Random(0)
    old, young = sequence([1] * 8, max_tokens=12), sequence([2] * 8, max_tokens=12)
    scheduler.add(old)
    scheduler.add(young)
    finished = []
    while scheduler.running or scheduler.waiting:
        before = {old, young} - set(finished)
        step(scheduler, rng)
        finished += [each for each in before if each.generated == 12]
    assert finished == [old, young]
    assert scheduler.preemptions >= 1
    assert young.cached == 0, "what a resumed sequence finds of its own is no hit"
    assert scheduler.pool.free == 6


def test_a_cleared_cache_takes_nothing_from_sequences_that_were_running() -> None:
    scheduler, rng = make(), random.Random(0)
    scheduler.add(sequence(list(range(40)), max_tokens=9))
    step(scheduler, rng)
    scheduler.pool.clear()
    while scheduler.running:
        step(scheduler, rng)
    assert scheduler.pool.cached() == []


@pytest.mark.parametrize("seed", range(6))
def test_stress_every_sequence_ends_and_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(num_blocks=16, step_tokens=rng.choice((4, 16, 64)))
    live: list[Sequence] = []
    held: Counter[int] = Counter()
    for turn in range(600):
        if turn < 300 and rng.random() < 0.5:
            new = sequence(
                [rng.randrange(3) for _ in range(rng.randint(1, 40))], rng.randint(1, 24), rng.choice((None, "s"))
            )
            live.append(new)
            scheduler.add(new)
        if live and rng.random() < 0.1:
            scheduler.finish(live[rng.randrange(len(live))])
        if rng.random() < 0.02:
            scheduler.pool.clear()
        step(scheduler, rng)
        held = fold((msgspec.to_builtins(event) for event in scheduler.pool.drain()), held)
        assert held == Counter({wire_block_hash(each.hash): copies for each, copies, _ in scheduler.pool.cached()})
    while scheduler.running or scheduler.waiting:
        assert step(scheduler, rng), "the scheduler stands still"
    assert scheduler.pool.free == 16
