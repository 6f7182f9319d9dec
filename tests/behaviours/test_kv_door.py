"""A source on the same host, whose leases are asked for in frames, freezes, dies or starts again: the request ends in
time, with the same words, as it does over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_support import until
from kv_faults import SIZE, AgentProcess, Engine, agent_process, always_fetch, engine, leaving_nothing, recorded, tokens
from kv_support import Agent, agent

from kvstore.messages import FetchOutcome

BLOCKS = 32
SHM = {"pool-bytes": str(16 * 1024 * 1024), "transports": "shm"}


@pytest.fixture(autouse=True)
async def _surroundings(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    always_fetch(monkeypatch)
    async with leaving_nothing():
        yield


async def fetched(source: AgentProcess, one: Engine, two: Engine, reader: Agent, seed: int) -> None:
    prompt = tokens(seed, BLOCKS * SIZE + 5)
    await one.teach(prompt)
    count = len(reader.records)
    assert await two.complete(prompt, source.hint(BLOCKS)) == (await one.computed(prompt), BLOCKS * SIZE)
    assert (await recorded(reader, count + 1)).outcome is FetchOutcome.FETCHED
    await until(lambda: source.url in reader.kv.peers._channels, "the door opens")
    await source.quiet()
    await reader.quiet()


async def lost(source: AgentProcess, expected: str, prompt: list[int], two: Engine, reader: Agent) -> str:
    """Why nothing came of a fetch."""
    count = len(reader.records)
    assert await two.complete(prompt, source.hint(BLOCKS, deadline_ms=1_000)) == (expected, 0)
    record = await recorded(reader, count + 1)
    assert record.outcome in (FetchOutcome.FAILED, FetchOutcome.LATE)
    await reader.quiet()
    return record.reason


async def test_source_with_a_door_that_freezes_and_thaws(tmp_path: Path) -> None:
    async with agent_process(tmp_path, "source", **SHM) as source, engine(source) as one:
        async with agent(tmp_path, lease_s=0.5, **SHM) as reader, engine(reader) as two:
            await fetched(source, one, two, reader, 1)
            prompt = tokens(2, BLOCKS * SIZE + 5)
            await one.teach(prompt)
            expected = await one.computed(prompt)
            source.freeze()
            assert await lost(source, expected, prompt, two, reader) in ("timeout", "deadline")
            source.thaw()
            await until(lambda: one.connected, "its own engine is back")
            await source.ready()
            # What it granted late is given back, in the same frames.
            await source.quiet()
            await fetched(source, one, two, reader, 3)


async def test_source_with_a_door_that_is_killed_and_starts_again(tmp_path: Path) -> None:
    async with agent_process(tmp_path, "source", **SHM) as source, agent(tmp_path, **SHM) as reader:
        async with engine(source) as one, engine(reader) as two:
            await fetched(source, one, two, reader, 1)
            prompt = tokens(2, BLOCKS * SIZE + 5)
            await one.teach(prompt)
            expected = await one.computed(prompt)
            await source.kill()
            assert await lost(source, expected, prompt, two, reader) == "unreachable"
            await source.start()
            await source.ready()
            await until(lambda: one.connected, "its own engine is back")
            peers = reader.kv.peers
            await until(lambda: all(end <= peers._clock() for end, _ in peers._refused.values()), "asked again")
            await fetched(source, one, two, reader, 3)
