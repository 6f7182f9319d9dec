"""Both sides of the connector in an engine that behaves as vLLM does, at a whole agent, under everything that happens
to requests and connections: no request builds on a wrong block, no load is lost, nothing stays held."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from agent_support import until
from kv_support import agent
from vllm_support import block_bytes, facts
from vllm_twin import TwinEngine

from kvstore.namespace import CONTENT_KEY_BYTES
from kvstore.transfer.loopback import Network

STEPS = 400
PREFIXES = 6


def churn(engine: TwinEngine, seed: int) -> None:
    """Requests that share prefixes, more than fit, and whatever ends them."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(50) for _ in range(rng.randrange(8, 60))] for _ in range(PREFIXES)]
    named = 0
    for _ in range(STEPS):
        if len(engine.jobs) < 9 and rng.random() < 0.4:
            prompt = prefixes[rng.randrange(PREFIXES)]
            prompt = prompt[: rng.randrange(1, len(prompt) + 1)] + [rng.randrange(50) for _ in range(rng.randrange(12))]
            engine.add(f"r{named}", prompt, rng.randrange(1, 14))
            named += 1
        if engine.jobs and rng.random() < 0.05:
            engine.abort(rng.choice(list(engine.jobs)))
        if rng.random() < 0.03:
            engine.preempt()
        if rng.random() < 0.04:
            engine.reset()
        engine.step()


def finish(engine: TwinEngine) -> None:
    """Until nothing is left to do, aborted loads included."""
    for _ in range(100_000):
        if not engine.jobs:
            return
        engine.step()
    raise AssertionError({job.request.request_id: job.state for job in engine.jobs.values()})


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "broken connections"])
@pytest.mark.parametrize(("seed", "tp"), [(1, 1), (2, 2), (3, 8)])
async def test_no_request_ever_builds_on_a_wrong_block(tmp_path: Path, seed: int, tp: int, broken: bool) -> None:
    layout = facts().layout
    async with agent(tmp_path, Network(), **{"pool-bytes": str(512 * 8_192), "fetch-margin": "-1000"}) as real:
        assert real.replica.settings.kv_socket is not None
        engine = await asyncio.to_thread(
            TwinEngine, real.replica.settings.kv_socket, life="life-1", tp=tp, blocks=48, budget=24
        )
        rng = random.Random(seed)

        async def hang_up() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.05, 0.5))
                if sessions := list(real.kv._sessions):
                    rng.choice(sessions).hang_up()

        breaking = asyncio.create_task(hang_up()) if broken else None
        try:
            await asyncio.to_thread(churn, engine, seed)
        finally:
            if breaking is not None:
                breaking.cancel()
                await asyncio.gather(breaking, return_exceptions=True)
        await asyncio.to_thread(finish, engine)
        assert engine.done > 60, "requests were answered"
        assert engine.preempted > 2
        if not broken:
            assert engine.loaded_tokens > 200, "blocks were loaded"
            assert not engine.failed_loads
        await until(lambda: not any(worker._saver.queued for worker in engine.workers), "saved")
        await asyncio.to_thread(engine.close)
        await real.quiet()
        held = [slot for slot in real.pool._slots if slot.key and real.pool.lookup([slot.key])]
        assert held or broken
        for key in {slot.key for slot in held}:
            assert len(key) == CONTENT_KEY_BYTES
            kept = bytes(real.pool.view(real.slot_of(key))[: layout.slot_bytes])
            assert kept == block_bytes(key, layout), "a block of the pool is not what its key says"
