"""A load against a real agent: blocks are copied as they arrive, and count once the owner has confirmed them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from agent_support import until
from kv_support import BLOCK_BYTES, Agent, Engine, both_quiet, keys_of, pair, payload_of

from kvstore.engine_messages import MAX_WAIT_S, Accepted, Loading, Nothing, Pending, Ready
from kvstore.transfer.loopback import Faults, Network
from replica_agent.engines.errors import PoolGone
from replica_agent.engines.load import Load

TEN = keys_of(*range(10))


class Blocks:
    """An engine's blocks, and the load into them."""

    def __init__(self, engine: Engine, request: str, *, skip: int = 0, count: int = 10) -> None:
        self.held: dict[int, bytes] = {}
        self.wanted = 1_000
        self.load = Load(engine.client, request, self._write, skip=skip, count=count)

    def _write(self, number: int, slot: memoryview) -> bool:
        if number >= self.wanted:
            return False
        self.held[number] = bytes(slot[:BLOCK_BYTES])
        return True

    async def step(self, most: int = 1_000) -> bool:
        def work() -> bool:
            if self.load.waits:
                self.load.wait(0.01)
            return self.load.copy(most)

        return await asyncio.to_thread(work)

    async def until_copied(self, blocks: int) -> None:
        async def copied() -> bool:
            await self.step()
            return len(self.held) >= blocks

        await until(copied, f"{blocks} blocks copied")

    async def finish(self) -> None:
        async def done() -> bool:
            await self.step()
            return self.load.done

        await until(done, "done")

    def assert_right(self, keys: Sequence[bytes]) -> None:
        assert self.held == {number: payload_of(key) for number, key in enumerate(keys)}


@pytest.fixture
def network() -> Network:
    return Network()


async def begin(source: Agent, reader: Agent, request: str = "r") -> None:
    """The reader's engine has been told to expect all ten."""
    await source.engine.save(TEN)
    answer: object = await reader.engine.prepare(request, TEN, source.hint(10))

    async def accepted() -> bool:
        nonlocal answer
        if isinstance(answer, Pending):
            answer = await reader.engine.poll(request)
        return isinstance(answer, Accepted)

    await until(accepted, "accepted")


async def test_blocks_are_copied_while_others_are_on_their_way_and_count_in_the_end(
    tmp_path: Path, network: Network
) -> None:
    network.faults = Faults(hold=asyncio.Event(), hold_at=6)
    async with pair(tmp_path, network) as (source, reader):
        await begin(source, reader)
        blocks = Blocks(reader.engine, "r")
        await blocks.until_copied(6)
        blocks.assert_right(TEN[:6])
        assert (blocks.load.loaded, blocks.load.done, reader.pool.counts.held) == (0, False, 0)
        assert network.faults.hold is not None
        network.faults.hold.set()
        await blocks.finish()
        blocks.assert_right(TEN)
        assert blocks.load.loaded == 10
        await asyncio.to_thread(blocks.load.leave)
        assert (reader.record.loaded, reader.record.moved) == (10, 10)
        await both_quiet(source, reader)


async def test_what_was_copied_of_a_fetch_that_is_not_confirmed_does_not_count(
    tmp_path: Path, network: Network
) -> None:
    network.faults = Faults(hold=asyncio.Event(), hold_at=6)
    async with pair(tmp_path, network) as (source, reader):
        await begin(source, reader)
        blocks = Blocks(reader.engine, "r")
        await blocks.until_copied(6)
        # The owner's engine has dropped its cache: no block of before is good.
        await source.engine.ask(source.engine.client.clear)
        assert network.faults.hold is not None
        network.faults.hold.set()
        await blocks.finish()
        assert (len(blocks.held) >= 6, blocks.load.loaded) == (True, 0)
        await asyncio.to_thread(blocks.load.leave)
        await until(lambda: reader.record.outcome.value == "failed")
        assert reader.pool.counts.held == 0


async def test_the_part_that_came_counts(tmp_path: Path, network: Network) -> None:
    network.faults = Faults(hold=asyncio.Event(), hold_at=4, stop_after=7)
    async with pair(tmp_path, network) as (source, reader):
        await begin(source, reader)
        blocks = Blocks(reader.engine, "r")
        await blocks.until_copied(4)
        assert network.faults.hold is not None
        network.faults.hold.set()
        await blocks.finish()
        blocks.assert_right(TEN[:7])
        assert blocks.load.loaded == 7
        await asyncio.to_thread(blocks.load.leave)
        await both_quiet(source, reader)


async def test_a_counter_that_has_become_another_fetch_s_makes_nothing_count(tmp_path: Path, network: Network) -> None:
    network.faults = Faults(hold=asyncio.Event(), hold_at=4, stop_after=7)
    more = keys_of(*range(20, 30))
    async with pair(tmp_path, network) as (source, reader):
        await begin(source, reader)
        blocks = Blocks(reader.engine, "r")
        await blocks.until_copied(4)
        told = await reader.engine.poll("r")
        assert isinstance(told, Loading) and network.faults.hold is not None
        network.faults.hold.set()
        await until(lambda: reader.pool.counts.held == 7)
        network.faults = Faults(hold=asyncio.Event(), hold_at=9)
        await source.engine.save(more)
        await reader.engine.prepare("s", more, source.hint(10))
        # Nine of the other one have arrived, by the same cell.
        await until(lambda: reader.engine.client.arrived(told.cell) == 9)
        await blocks.until_copied(9)
        assert blocks.load.loaded == 0
        await blocks.finish()
        assert blocks.load.loaded == 7
        assert {number: blocks.held[number] for number in range(7)} == {
            number: payload_of(key) for number, key in enumerate(TEN[:7])
        }
        await asyncio.to_thread(blocks.load.leave)
        assert network.faults.hold is not None
        network.faults.hold.set()
        await reader.engine.settled("s")
        await reader.engine.ask(reader.engine.client.release, "s", 0, 0.0)
        await both_quiet(source, reader)


async def test_one_who_waits_for_another_s_fetch_copies_its_own_part_as_it_arrives(
    tmp_path: Path, network: Network
) -> None:
    network.faults = Faults(hold=asyncio.Event(), hold_at=6)
    async with pair(tmp_path, network) as (source, reader):
        # The reader has the first three itself, so what is fetched begins with the fourth; of that another prompt,
        # which differs after it, gets four.
        await reader.engine.save(TEN[:3])
        await begin(source, reader)
        other = [*TEN[:7], *keys_of(40)]
        await reader.engine.prepare("s", other, source.hint(10))
        await reader.engine.poll("s")
        blocks = Blocks(reader.engine, "s", count=8)
        await blocks.until_copied(7)
        blocks.assert_right(TEN[:7])
        assert (blocks.load.loaded, blocks.load.done) == (0, False)
        assert network.faults.hold is not None
        network.faults.hold.set()
        await blocks.finish()
        assert blocks.load.loaded == 7
        await asyncio.to_thread(blocks.load.leave)
        await reader.engine.settled("r")
        await reader.engine.ask(reader.engine.client.release, "r", 0, 0.0)
        await both_quiet(source, reader)


@pytest.mark.parametrize(("skip", "count"), [(0, 3), (2, 8), (4, 3), (9, 1), (10, 5)])
async def test_only_the_blocks_that_are_needed_are_copied(
    tmp_path: Path, network: Network, skip: int, count: int
) -> None:
    async with pair(tmp_path, network) as (source, reader):
        await begin(source, reader)
        blocks = Blocks(reader.engine, "r", skip=skip, count=count)
        await blocks.finish()
        blocks.assert_right(TEN[skip : skip + count])
        assert blocks.load.loaded == len(TEN[skip : skip + count])
        await asyncio.to_thread(blocks.load.leave)
        await both_quiet(source, reader)


async def test_a_block_that_is_not_wanted_any_more_ends_the_copying(tmp_path: Path, network: Network) -> None:
    async with pair(tmp_path, network) as (source, reader):
        await begin(source, reader)
        blocks = Blocks(reader.engine, "r")
        blocks.wanted = 5

        async def refused() -> bool:
            return not await blocks.step()

        await until(refused)
        assert isinstance(await reader.engine.settled("r"), Ready)
        await blocks.step()
        assert (blocks.load.loaded, blocks.load.done) == (5, False)
        await asyncio.to_thread(blocks.load.leave)
        assert reader.record.loaded == 5
        await both_quiet(source, reader)


async def test_a_question_waits_for_news_of_its_own_request_and_not_for_ever(tmp_path: Path, network: Network) -> None:
    network.faults = Faults(hold=asyncio.Event(), hold_at=6)
    async with pair(tmp_path, network) as (source, reader):
        await begin(source, reader)
        ask = reader.engine.client.poll
        await until(lambda: bool(reader.kv.fetches) and reader.pool.counts.reserved == 10)
        answer = await asyncio.to_thread(ask, "r")
        assert isinstance(answer, Loading) and (len(answer.slots), answer.there, answer.before) == (10, 0, 0)
        await until(lambda: reader.engine.client.arrived(answer.cell) == 6)
        began = time.monotonic()
        assert await asyncio.to_thread(ask, "r", 5.0) == answer
        assert time.monotonic() - began >= MAX_WAIT_S * 0.9
        assert isinstance(await asyncio.to_thread(ask, "another", 5.0), Nothing)
        waiting = asyncio.create_task(asyncio.to_thread(ask, "r", 5.0))
        assert network.faults.hold is not None
        network.faults.hold.set()
        news = await waiting
        while isinstance(news, Loading):
            news = await asyncio.to_thread(ask, "r", 5.0)
        assert isinstance(news, Ready) and news.slots == answer.slots
        await reader.engine.ask(reader.engine.client.cancel, "r")
        source.kv.keeper.expire()


async def test_an_agent_that_goes_takes_what_is_not_confirmed_with_it(tmp_path: Path, network: Network) -> None:
    network.faults = Faults(hold=asyncio.Event(), hold_at=6)
    async with pair(tmp_path, network) as (source, reader):
        await begin(source, reader)
        blocks = Blocks(reader.engine, "r")
        await blocks.until_copied(6)
        await reader.engine.close()
        with pytest.raises(PoolGone):
            await blocks.finish()
        assert blocks.load.loaded == 0
        assert network.faults.hold is not None
        network.faults.hold.set()
