"""With a fetch the words are the same as without: many prompts, cut anywhere between what is fetched and computed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from agent_support import DEADLINE_S, until
from kv_faults import POOL, SIZE, Engine, always_fetch, engine, leaving_nothing, tokens
from kv_support import Agent, agent

from kvstore.messages import FetchOutcome
from replica_agent.reference.prepare import prepare

AT_ONCE = 10


class Case(NamedTuple):
    """A prompt, of which the source is taught the first `taught` tokens, and the reader the first `own` of these."""

    prompt: list[int]
    taught: int
    own: int

    @property
    def blocks(self) -> int:
        """Blocks that the source has and that can be used: the last token is always computed."""
        return min(self.taught, len(self.prompt) - 1) // SIZE


def cases(count: int, longest: int) -> list[Case]:
    """Random lengths and fetch points, whole blocks and single tokens around them included."""
    rng = random.Random(f"{count} cases")
    made = []
    for number in range(count):
        length = rng.randint(SIZE + 1, longest)
        taught = min(length, rng.choice((rng.randint(SIZE, longest), rng.randint(1, longest // SIZE) * SIZE)))
        own = rng.choice((0, 0, rng.randint(0, taught)))
        made.append(Case(tokens(1_000 + number, length), taught, own))
    return made


@pytest.fixture(autouse=True)
async def _surroundings(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    always_fetch(monkeypatch)
    # Nobody dies here: an agent that answers late has only had to wait for a busy machine.
    monkeypatch.setattr("replica_agent.engines.pool_client.VERB_S", DEADLINE_S)
    async with leaving_nothing():
        yield


async def compare(directory: Path, transport: str, todo: Sequence[Case], pool_bytes: int, **changes: Any) -> set[str]:
    """All answers, none of which differs from that of an engine that has no agent; every case fetched what it can."""
    flags = POOL | {"transports": transport, "pool-bytes": str(pool_bytes)}
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(agent(directory, **flags))
        reader = await stack.enter_async_context(agent(directory, **flags))
        one = await stack.enter_async_context(engine(source, **changes))
        two = await stack.enter_async_context(engine(reader, **changes))
        alone = await stack.enter_async_context(engine(None, **changes))
        texts: set[str] = set()
        saved = 0
        for first in range(0, len(todo), AT_ONCE):
            group = todo[first : first + AT_ONCE]
            saved += sum(case.taught // SIZE for case in group)
            await asyncio.gather(*(one.complete(case.prompt[: case.taught], max_tokens=1) for case in group))
            await until(lambda wanted=saved: source.pool.counts.held == wanted, "saved")  # type: ignore[misc]
            texts |= set(await asyncio.gather(*(compared(case, source, two, alone) for case in group)))
        outcomes = {record.outcome for record in reader.records if record.moved}
        assert outcomes == {FetchOutcome.FETCHED}
        assert sum(record.moved for record in reader.records) > 3 * len(todo)
        assert await two.metric("reference_engine:kv_failed_load_blocks_total") == 0
        assert not sum(reader.kv.wrong_bytes.values())
        await source.quiet()
        await reader.quiet()
    return texts


async def compared(case: Case, source: Agent, two: Engine, alone: Engine) -> str:
    if case.own:
        await two.complete(case.prompt[: case.own], max_tokens=1)
    said = await two.complete(case.prompt, source.hint(case.taught // SIZE))
    assert said == ((await alone.complete(case.prompt)).text, case.blocks * SIZE), case
    return said.text


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_fetched_output_is_identical(tmp_path: Path, transport: str) -> None:
    """200 random prompts over both transports that every host has."""
    todo = cases(200, 220)
    half = todo[:100] if transport == "shm" else todo[100:]
    texts = await compare(tmp_path, transport, half, 64 * 1024 * 1024, kv_tokens=512 * SIZE)
    # Words that depended on nothing would always be the same.
    assert len(texts) > 90


@pytest.mark.slow
async def test_fetched_output_is_identical_on_smollm2(tmp_path: Path) -> None:
    texts = await compare(
        tmp_path, "shm", cases(20, 400), 1024 * 1024 * 1024, kv_tokens=512 * SIZE, model=str(prepare("smollm2"))
    )
    assert len(texts) > 15
