"""An agent beside a real vLLM: what it reports as held is what the next request finds cached, whatever happened."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from agent_support import Mirror, agent_running, mirroring, until
from vllm_engine import Engine, agent_settings, held_tokens, keys_of, prompt_of
from vllm_models import model_directory
from vllm_server import BLOCK, VllmServer

from kvstore.messages import Tier
from replica_agent.replica import Replica

pytestmark = pytest.mark.vllm

BLOCKS = 32
"""The size of the cache, so small that blocks are evicted all the time."""


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    with VllmServer(model_directory("tiny"), kv_tokens=BLOCKS * BLOCK, dev_mode=True) as running:
        running.start()
        running.wait_ready()
        yield running


@dataclass(frozen=True)
class Followed:
    """A server, an agent beside it, and a reader of what that reports."""

    engine: Engine
    replica: Replica
    mirror: Mirror


@contextlib.asynccontextmanager
async def following(server: VllmServer, *, replay: bool = True) -> AsyncIterator[Followed]:
    """An agent that has caught up with the server."""
    async with (
        agent_running(agent_settings(server, replay=replay)) as (replica, url),
        mirroring(url) as mirror,
        Engine(server) as engine,
    ):
        await until(lambda: replica.engine_state().up and replica.subscriber.connected, "the agent follows the engine")
        await until(lambda: not replica.subscriber.syncing, "the replay")
        yield Followed(engine, replica, mirror)


async def random_requests(followed: Followed, count: int, seed: int) -> None:
    """Conversations that come and go: each request's cached tokens are those foretold by the reports."""
    rng = random.Random(seed)
    for number in range(count):
        parts = [rng.randrange(3)] + [rng.randrange(4) for _ in range(rng.randrange(8))]
        prompt = prompt_of(*parts, extra=rng.choice((0, 0, 1, 60)))
        foretold = held_tokens(followed.mirror, prompt)
        # Of a prompt that goes on behind its first block it can be seen that this was only told again.
        full = len(parts) > 2 and rng.random() < 0.3
        more = {"vllm_xargs": {"kv_cache_report_mode": "full"}} if full else {}
        assert await followed.engine.compute(prompt, followed.mirror, **more) == foretold, f"request {number}: {parts}"
        followed.replica.check()


async def test_what_is_computed_is_reported(server: VllmServer) -> None:
    async with following(server) as followed:
        before = followed.mirror.hbm
        prompt = prompt_of(101, 102, 103, extra=20)
        assert await followed.engine.compute(prompt, followed.mirror) == 0
        assert set(keys_of(prompt)) == followed.mirror.hbm - before
        longer = prompt_of(101, 102, 104, extra=20)
        assert await followed.engine.compute(longer, followed.mirror) == 2 * BLOCK
        hello = followed.replica.hello()
        assert hello is not None
        assert (hello.engine, hello.engine_version, hello.models) == ("vllm", "0.32.0", ["tiny"])
        assert (hello.block_size, hello.identity_modes) == (BLOCK, ["exact", "text", "hash"])
        assert hello.capacity_blocks >= BLOCKS
        assert hello.geometry is not None


async def test_predictions_are_exact_while_blocks_are_evicted(server: VllmServer) -> None:
    async with following(server) as followed:
        await random_requests(followed, 150, seed=1)
        assert followed.replica.events["removed"] > 100
        assert not followed.replica.resyncs.keys() - {"disconnected"}
        # One who comes later learns the same from the replay.
        async with following(server) as late:
            await until(lambda: late.mirror.hbm == followed.mirror.hbm, "the replay tells all")
        # And without one, what happens from then on.
        async with following(server, replay=False) as blind:
            assert blind.mirror.hbm == set()
            await random_requests(followed, 40, seed=2)
            await until(lambda: len(blind.mirror.hbm) > BLOCKS // 2)
            await until(lambda: blind.mirror.hbm <= followed.mirror.hbm, "never more than is held")


async def test_a_block_stored_twice_and_removed_once_is_held(server: VllmServer) -> None:
    """A prompt that ends with a block computes that block again, into a second place, each time."""
    async with following(server) as followed:
        engine, mirror = followed.engine, followed.mirror
        prompt = prompt_of(201, 202)
        stored = followed.replica.events["stored"]
        for _ in range(3):
            await engine.compute(prompt, mirror)
        await until(lambda: followed.replica.events["stored"] >= stored + 3)
        copies = {block.copies_in(Tier.HBM) for block in followed.replica.catalogue._blocks.values()}
        assert max(copies) >= 2, "the engine told one hash several times"
        last = keys_of(prompt)[-1]
        seen = 0
        for number in range(300, 300 + 2 * BLOCKS):
            held = last in mirror.hbm
            probe = prompt_of(201, 202, extra=1)
            if number % 8 == 0:
                assert await engine.compute(probe, mirror) == held_tokens(mirror, probe) or not held
                seen += held
            await engine.compute(prompt_of(number), mirror)
        assert seen > 2


async def test_a_reset_of_an_idle_engine_is_noticed(server: VllmServer) -> None:
    async with following(server) as followed, following(server, replay=False) as blind:
        prompt = prompt_of(1, 2, 3, extra=1)
        await followed.engine.compute(prompt, followed.mirror)
        await followed.engine.compute(prompt_of(9), blind.mirror)
        assert await followed.engine.reset()
        await until(lambda: not followed.mirror.hbm and not blind.mirror.hbm, "no block is credited")
        assert followed.replica.resyncs["silent_reset"] == 1
        assert followed.replica.events["cleared"] == 0, "the engine has not said so itself"
        assert await followed.engine.compute(prompt, followed.mirror) == 0
        assert followed.mirror.hbm == set(keys_of(prompt))
        await until(lambda: followed.replica.events["cleared"] == 1, "now it has")
        await random_requests(followed, 20, seed=3)


async def test_a_reset_that_a_busy_engine_refuses_forgets_nothing(server: VllmServer) -> None:
    async with following(server) as followed:
        prompt = prompt_of(1, 2, 3, extra=1)
        await followed.engine.compute(prompt, followed.mirror)
        refused = asyncio.Event()

        async def keep_busy(tokens: int) -> None:
            while not refused.is_set():
                await followed.engine.complete(prompt, max_tokens=tokens, ignore_eos=True)

        # So that one runs while another one is between two requests: of one length they would all end in one step.
        busy = [asyncio.create_task(keep_busy(tokens)) for tokens in (230, 310, 430)]
        await until(lambda: followed.replica.engine_state().metrics.running == 3, "it is seen at work")
        assert not await followed.engine.reset()
        refused.set()
        await asyncio.gather(*busy)
        beats = followed.mirror.verified
        await until(lambda: followed.mirror.verified > beats + 30)
        assert set(keys_of(prompt)) <= followed.mirror.hbm
        assert followed.replica.resyncs["silent_reset"] == 0


async def test_a_killed_engine_is_credited_with_nothing(server: VllmServer) -> None:
    """kill -9 and another life at the same ports, whose first batches look much like the last one's."""
    async with following(server) as followed, following(server, replay=False) as blind:
        for number in range(4):
            prompt = prompt_of(400 + number, 500 + number, extra=1)
            await followed.engine.compute(prompt, followed.mirror)
            keys = set(keys_of(prompt))
            await until(lambda keys=keys: keys <= blind.mirror.hbm)
        await asyncio.to_thread(server.kill)
        await until(lambda: not followed.mirror.hbm and not blind.mirror.hbm, "no stale credit")
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(server.wait_ready)
        assert not followed.mirror.hbm
        assert not blind.mirror.hbm
        for each in (followed, blind):
            await until(lambda each=each: each.replica.engine_state().up and each.replica.subscriber.connected)
        await random_requests(followed, 30, seed=4)
        await until(lambda: blind.mirror.hbm == followed.mirror.hbm, "both know the new life alike")
