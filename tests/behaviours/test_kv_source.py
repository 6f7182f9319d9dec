"""The source of a fetch dies, freezes, crawls or starts again: the request ends in time, with the same words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_support import DEADLINE_S, until
from kv_faults import (
    AHEAD,
    PITCH,
    SIZE,
    TCP,
    AgentProcess,
    Engine,
    always_fetch,
    engine,
    leaving_nothing,
    linked,
    recorded,
    tokens,
    within,
)
from kv_link import Link
from kv_support import Agent, agent

from kvstore.messages import FetchOutcome
from replica_agent.kv.pool_keeper import HOLD_S

BLOCKS = 64
PROMPT = tokens(1, BLOCKS * SIZE + 5)
HALF = AHEAD + 20 * PITCH + 1_000
"""Twenty blocks, and a piece of the next."""


@pytest.fixture(autouse=True)
async def _surroundings(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    always_fetch(monkeypatch)
    async with leaving_nothing():
        yield


async def half_fetched(source: AgentProcess, http: Link, data: Link, two: Engine, deadline_ms: int) -> asyncio.Task:  # type: ignore[type-arg]
    """A request whose fetch has stopped half way."""
    data.stop_at = data.passed + HALF
    data.stopped.clear()
    request = asyncio.create_task(two.complete(PROMPT, source.hint(BLOCKS, url=http.url, deadline_ms=deadline_ms)))
    await asyncio.wait_for(data.stopped.wait(), 15)
    return request


async def fetched_again(
    source: AgentProcess, http: Link, one: Engine, two: Engine, reader: Agent, quiet_s: float = DEADLINE_S
) -> None:
    """After all that: other blocks are fetched as ever, and nothing of before is held."""
    count = len(reader.records)
    prompt = tokens(2, 300)
    await one.teach(prompt)
    assert await two.complete(prompt, source.hint(18, url=http.url)) == (await one.computed(prompt), 288)
    record = await recorded(reader, count + 1)
    assert (record.outcome, record.loaded) == (FetchOutcome.FETCHED, 18)
    await source.quiet(quiet_s)
    await reader.quiet()


async def saves_again(one: Engine) -> None:
    """What an engine saves when it has not noticed yet that its connection has ended is lost: it is not told."""
    for seed in range(100, 120):
        before = await one.metric("reference_engine:kv_saved_blocks_total")
        await one.complete(tokens(seed, 2 * SIZE + 5), max_tokens=1)
        until_next = time.monotonic() + 2
        while time.monotonic() < until_next:
            if await one.metric("reference_engine:kv_saved_blocks_total") >= before + 2:
                return
            await asyncio.sleep(0.05)
    pytest.fail("nothing is saved any more")


async def test_source_death_recomputes_when_it_is_killed(tmp_path: Path) -> None:
    async with linked(tmp_path, "source") as (source, http, data), agent(tmp_path, **TCP) as reader:
        async with engine(source) as one, engine(reader) as two:
            await one.teach(PROMPT)
            expected, recompute_s = await one.timed(PROMPT)
            with within(10_000, recompute_s):
                request = await half_fetched(source, http, data, two, 10_000)
                await source.kill()
                data.cut()
                assert await request == (expected, 0)
            record = await recorded(reader)
            assert (record.outcome, record.reason, record.loaded) == (FetchOutcome.FAILED, "unreachable", 0)
            await reader.quiet()


@pytest.mark.parametrize("seconds", [2.0, pytest.param(20.0, marks=pytest.mark.slow)])
async def test_source_death_recomputes_when_it_is_frozen_and_thawed(tmp_path: Path, seconds: float) -> None:
    async with linked(tmp_path, "source") as (source, http, data), engine(source) as one:
        await one.teach(PROMPT)
        expected, recompute_s = await one.timed(PROMPT)
        async with source.same_after(), agent(tmp_path, **TCP) as reader, engine(reader) as two:
            with within(2_000, recompute_s):
                request = await half_fetched(source, http, data, two, 2_000)
                source.freeze()
                until_thaw = time.monotonic() + seconds
                data.resume()
                assert await request == (expected, 0), "while it is frozen"
            record = await recorded(reader)
            assert (record.outcome, record.reason) == (FetchOutcome.LATE, "deadline")
            await asyncio.sleep(max(0.0, until_thaw - time.monotonic()))
            source.thaw()
            await until(lambda: one.connected, "its own engine is back")
            await source.ready()
            await saves_again(one)
            # Slots whose lease ran out meanwhile are held for a minute: somebody may still read them.
            await fetched_again(source, http, one, two, reader, HOLD_S + DEADLINE_S)


async def test_source_frozen_and_thawed_before_the_deadline_is_waited_for(tmp_path: Path) -> None:
    async with linked(tmp_path, "source") as (source, http, data), engine(source) as one:
        await one.teach(PROMPT)
        expected = await one.computed(PROMPT)
        async with source.same_after(), agent(tmp_path, **TCP) as reader, engine(reader) as two:
            request = await half_fetched(source, http, data, two, 25_000)
            source.freeze()
            data.resume()
            await asyncio.sleep(0.5)
            assert not request.done()
            source.thaw()
            assert await request == (expected, BLOCKS * SIZE)
            assert (await recorded(reader)).outcome is FetchOutcome.FETCHED
            await reader.quiet()
            await source.quiet()


@pytest.mark.parametrize("whole", [True, False], ids=["from_the_start", "half_way"])
async def test_source_death_recomputes_when_it_is_partitioned(tmp_path: Path, whole: bool) -> None:
    async with linked(tmp_path, "source") as (source, http, data), engine(source) as one:
        await one.teach(PROMPT)
        expected, recompute_s = await one.timed(PROMPT)
        async with source.same_after(), agent(tmp_path, lease_s=0.5, **TCP) as reader, engine(reader) as two:
            with within(1_000 if whole else 2_000, recompute_s):
                if whole:
                    http.open.clear()
                    said = await two.complete(PROMPT, source.hint(BLOCKS, url=http.url, deadline_ms=1_000))
                else:
                    request = await half_fetched(source, http, data, two, 2_000)
                    http.open.clear()
                    data.open.clear()
                    said = await request
            assert said == (expected, 0)
            record = await recorded(reader)
            outcome = (FetchOutcome.FAILED, "timeout") if whole else (FetchOutcome.LATE, "deadline")
            assert (record.outcome, record.reason) == outcome
            http.resume()
            data.resume()
            await source.quiet()
            await fetched_again(source, http, one, two, reader)


async def test_source_that_starts_again_does_not_vouch_for_what_the_last_life_lent(tmp_path: Path) -> None:
    async with linked(tmp_path, "source") as (source, http, data), agent(tmp_path, **TCP) as reader:
        async with engine(source) as one, engine(reader) as two:
            await one.teach(PROMPT)
            expected = await one.computed(PROMPT)
            request = await half_fetched(source, http, data, two, 25_000)
            # All bytes will have come before the lease is confirmed, by nobody who knows of it.
            http.open.clear()
            data.resume()
            await until(lambda: data.passed >= AHEAD + BLOCKS * PITCH, "moved")
            await source.kill()
            http.cut()
            await source.start()
            http.resume()
            assert await request == (expected, 0)
            record = await recorded(reader)
            assert record.outcome is FetchOutcome.FAILED
            assert record.reason in ("lease_not_held", "unreachable")
            await source.ready()
            # What the gateway may still believe of it is no longer so.
            reader.records.clear()
            other = tokens(3, 200)
            assert await two.complete(other, source.hint(12, url=http.url)) == (await one.computed(other), 0)
            record = await recorded(reader)
            assert (record.outcome, record.reason) == (FetchOutcome.MISSED, "not_held")
            await fetched_again(source, http, one, two, reader)


async def test_source_whose_engine_starts_again_lends_what_was_saved(tmp_path: Path) -> None:
    async with linked(tmp_path, "source") as (source, http, _), agent(tmp_path, **TCP) as reader, engine(reader) as two:
        async with engine(source) as one:
            await one.teach(PROMPT)
            expected = await one.computed(PROMPT)
        assert await two.complete(PROMPT, source.hint(BLOCKS, url=http.url)) == (expected, BLOCKS * SIZE)
        assert (await recorded(reader)).outcome is FetchOutcome.FETCHED
        async with engine(source) as again:
            assert await again.complete(PROMPT) == (expected, BLOCKS * SIZE)
            await source.quiet()
        await reader.quiet()
