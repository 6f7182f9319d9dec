"""The connector in two real vLLM servers, each with an agent: whatever happens to an agent, a fetch or a request, the
answer is the one that computing gives."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import vllm_env
from agent_support import until
from vllm_engine import prompt_of
from vllm_models import model_directory
from vllm_pool import Answer, HalfFetched, PooledEngine, connector_flags, half_fetched, start_all, stoppable
from vllm_server import BLOCK, VllmServer
from wheel_support import installed

pytestmark = pytest.mark.vllm

POOL = 64
"""Blocks in each pool, so few that most are evicted soon."""


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[PooledEngine, PooledEngine]]:
    """The second one has so little KV that its requests are preempted when many run."""
    model = model_directory("tiny")
    with (
        PooledEngine(model, "replica-0", kv_tokens=64 * BLOCK, core="0", pool_blocks=POOL, dev_mode=True) as first,
        PooledEngine(model, "replica-1", kv_tokens=32 * BLOCK, core="1", pool_blocks=POOL, dev_mode=True) as second,
    ):
        start_all((first, second))
        yield first, second
        for engine in (first, second):
            engine.wait_quiet(for_good=True)


@pytest.fixture
def pair(engines: tuple[PooledEngine, PooledEngine]) -> Iterator[tuple[PooledEngine, PooledEngine]]:
    """As every test leaves them: nothing held, both agents there."""
    yield engines
    for engine in engines:
        engine.wait_connected()
        engine.wait_quiet()


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        prompt_of(*(rng.randrange(10**9) for _ in range(rng.randrange(1, 12))), extra=rng.choice((0, 1, 60, 127)))
        for _ in range(count)
    ]


def fetched(source: PooledEngine, reader: PooledEngine, prompt: list[int], **more: int) -> tuple[Answer, Answer]:
    """A prompt computed at one and then asked of the other, with a hint."""
    before = source.metric("vllm:prompt_tokens_total")
    there = source.complete(prompt)
    assert source.metric("vllm:prompt_tokens_total") > before
    source.wait_saved(1)
    return there, reader.complete(prompt, **source.hint(prompt, **more))


async def test_fifty_fetched_prompts_are_answered_as_computed_ones(pair: tuple[PooledEngine, PooledEngine]) -> None:
    """Fifty that were fetched whole: a peer that a busy machine lets answer too late is done without."""
    external = sum(engine.metric("vllm:external_prefix_cache_hits_total") for engine in pair)
    before = records_of_whole(pair)
    whole = tried = 0
    for number, prompt in enumerate(prompts(1, 200)):
        source, reader = pair[number % 2], pair[1 - number % 2]
        there, here = fetched(source, reader, prompt)
        assert here.tokens == there.tokens
        assert here.cached % BLOCK == 0
        assert here.cached < len(prompt)
        blocks = (len(prompt) - 1) // BLOCK
        tried += blocks > 0
        whole += 0 < here.cached == blocks * BLOCK
        # Its last block may be computed after all; the agent's word decides.
        if whole >= 50 and records_of_whole(pair) - before >= 50:
            break
    assert whole >= 50, f"of {tried}"
    await until(lambda: records_of_whole(pair) - before >= 50, "fetched, by what the agents say")
    assert sum(engine.metric("vllm:external_prefix_cache_hits_total") for engine in pair) - external >= 50 * BLOCK


def records_of_whole(pair: tuple[PooledEngine, PooledEngine]) -> int:
    """Fetches of which every block came from the other one, and was loaded."""
    told = [each for engine in pair for each in engine.fetches() if each["outcome"] == "fetched"]
    return sum(0 < each["moved"] == each["asked"] == each["loaded"] and not each["failed"] for each in told)


def test_what_an_engine_evicted_comes_back_from_its_own_pool(pair: tuple[PooledEngine, PooledEngine]) -> None:
    for engine in pair:
        engine.wait_saving()


def test_less_than_a_block_and_whole_blocks(pair: tuple[PooledEngine, PooledEngine]) -> None:
    source, reader = pair
    for prompt in (prompt_of(extra=5), prompt_of(21), prompt_of(22, 23), prompt_of(24, extra=1)):
        there, here = fetched(source, reader, prompt)
        assert here.tokens == there.tokens


async def test_requests_that_are_preempted_and_resumed(pair: tuple[PooledEngine, PooledEngine]) -> None:
    """Eight at a time grow until they no longer fit: who is put back loads what it had computed."""
    source, reader = pair
    long = [prompt_of(seed, seed + 1, seed + 2, extra=40) for seed in range(1000, 1080, 10)]
    expected = [await source.completes(prompt, tokens=300) for prompt in long]
    before = reader.metric("vllm:num_preemptions_total")
    got = await asyncio.gather(*(reader.completes(prompt, tokens=300, **source.hint(prompt)) for prompt in long))
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    assert reader.metric("vllm:num_preemptions_total") > before


async def test_clients_that_hang_up_at_any_moment(pair: tuple[PooledEngine, PooledEngine]) -> None:
    source, reader = pair
    rng = random.Random(5)
    asked = prompts(6, 12)
    expected = [source.complete(prompt).tokens for prompt in asked]

    async def hang_up(prompt: list[int], seconds: float) -> None:
        try:
            await reader.completes(prompt, timeout=seconds, **source.hint(prompt))
        except httpx.TimeoutException:
            pass

    for _ in range(6):
        await asyncio.gather(*(hang_up(rng.choice(asked), rng.uniform(0.001, 0.15)) for _ in range(8)))
    for prompt, tokens in zip(asked, expected, strict=True):
        assert reader.complete(prompt, **source.hint(prompt)).tokens == tokens


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_source_that_fails_in_the_middle_of_a_fetch(pair: tuple[PooledEngine, PooledEngine], how: str) -> None:
    """Half of the blocks have passed, not one more does."""
    source, reader = pair
    seeds = itertools.count(10**7 if how == "killed" else 2 * 10**7, 100)
    async with stoppable(source) as (link, flags):
        for _ in range(4):
            half = await half_fetched(source, reader, link, seeds, deadline_ms=10_000 if how == "killed" else 1_500)
            if how == "killed":
                source.kill_agent()
                link.cut()
            else:
                source.signal_agent(signal.SIGSTOP)
            try:
                assert (await half.answer).tokens == half.expected.tokens
            finally:
                link.resume()
                if how == "killed":
                    source.start_agent(**flags)
                else:
                    source.signal_agent(signal.SIGCONT)
            record = await recorded(reader, half)
            assert record["outcome"] in ("partial", "failed", "late"), record
            assert (record["source"], record["transport"]) == (source.replica, "tcp")
            assert record["moved"] < record["asked"] <= half.blocks
            source.wait_connected()


async def test_what_is_fetched_is_not_evicted_meanwhile(pair: tuple[PooledEngine, PooledEngine]) -> None:
    """Everything else is: the source's pool is flooded while a fetch from it stands still half way."""
    source, reader = pair
    seeds = itertools.count(3 * 10**7, 100)
    for _ in range(3):
        async with stoppable(source, pool_blocks=POOL) as (link, _):
            held = source.held
            other = prompt_of(*(next(seeds) for _ in range(4)), extra=1)
            expected = source.complete(other)
            source.wait_saved(held + 4)
            half = await half_fetched(source, reader, link, seeds, deadline_ms=30_000, tries=5)
            gone = False
            while not gone and not half.answer.done():
                for _ in range(2):
                    await source.completes(prompt_of(*(next(seeds) for _ in range(55))), tokens=1)
                told = source.fetches()
                again = await source.completes(other)
                assert again.tokens == expected.tokens
                # An agent records what it finds in its pool.
                gone = again.cached == 0 and source.fetches() == told
            link.resume()
            answer = await half.answer
            assert answer.tokens == half.expected.tokens
            record = await recorded(reader, half)
        # Else the machine was too busy to flood the pool before the deadline.
        if gone and record["outcome"] != "late":
            break
    assert gone, "everything else is evicted"
    assert (record["outcome"], record["moved"], record["failed"]) == ("fetched", half.blocks, 0), record
    assert answer.cached == half.blocks * BLOCK


async def recorded(reader: PooledEngine, half: HalfFetched) -> dict[str, Any]:
    """What the reader's agent says of a fetch, once it is over."""

    def those() -> list[dict[str, Any]]:
        return [each for each in reader.fetches() if each["gateway_request"] == half.name]

    await until(lambda: bool(those()), "recorded")
    (record,) = those()
    return record


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_the_readers_own_agent_fails_in_the_middle_of_a_fetch(
    pair: tuple[PooledEngine, PooledEngine], how: str
) -> None:
    source, reader = pair
    seeds = itertools.count(4 * 10**7 if how == "killed" else 5 * 10**7, 100)
    async with stoppable(source) as (link, _):
        for _ in range(4):
            half = await half_fetched(source, reader, link, seeds, deadline_ms=1_500)
            if how == "killed":
                reader.kill_agent()
            else:
                reader.signal_agent(signal.SIGSTOP)
            assert (await half.answer).tokens == half.expected.tokens
            link.cut()
            link.resume()
            # And without it there is nothing to wait for.
            again = await reader.completes(half.prompt, **source.hint(half.prompt))
            assert again.tokens == half.expected.tokens
            if how == "killed":
                reader.start_agent()
            else:
                reader.signal_agent(signal.SIGCONT)
            reader.wait_connected()
    reader.wait_saving()


def test_after_a_reset_nothing_old_is_served(pair: tuple[PooledEngine, PooledEngine]) -> None:
    _, engine = pair
    prompt = prompt_of(4001, 4002, 4003, extra=7)
    first = engine.complete(prompt)
    engine.wait_saved(3)
    response = httpx.post(f"{engine.server.url}/reset_prefix_cache", trust_env=False, timeout=30)
    assert response.json()["success"] is True
    deadline = time.monotonic() + 30
    while engine.held:
        assert time.monotonic() < deadline, "an idle engine's agent is told"
        time.sleep(0.05)
    assert engine.complete(prompt) == Answer(first.tokens, 0)
    engine.wait_saved(3)


def test_the_wheel_brings_nothing_else_into_vllms_processes(tmp_path: Path) -> None:
    """Installed without its dependencies by vLLM's own pip, into a folder beside vLLM's packages."""
    target = installed(tmp_path, str(vllm_env.python()))
    code = (
        "import sys, vllm, vllm.distributed.kv_transfer.kv_connector.v1.base as base\n"
        "import vllm.distributed.kv_transfer.kv_connector.v1.metrics, vllm.v1.kv_cache_interface\n"
        "before = set(sys.modules)\n"
        "from replica_agent.engines.vllm import PrefixGatewayConnector as connector\n"
        "assert issubclass(connector, base.KVConnectorBase_V1) and not connector.__abstractmethods__\n"
        "new = set(sys.modules) - before\n"
        "print(sys.modules['replica_agent'].__file__)\n"
        "print(sorted({name.partition('.')[0] for name in new} - {'kvstore', 'replica_agent', 'vllm'}))"
    )
    environ = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(vllm_env.python()), "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [str(target / "replica_agent/__init__.py"), "[]"]


@pytest.mark.parametrize(
    ("policy", "flags", "extra", "said"),
    [
        ("fail", [], {}, "set kv_load_failure_policy to recompute"),
        (
            "recompute",
            ["--prefix-caching-hash-algo", "xxhash"],
            {},
            "--prefix-caching-hash-algo: expected one of sha256",
        ),
        ("recompute", [], {"sockets": "x"}, "kv_connector_extra_config: sockets: the only key is socket"),
    ],
)
def test_what_cannot_work_is_named_and_the_engine_runs(
    tmp_path: Path, policy: str, flags: list[str], extra: dict[str, str], said: str
) -> None:
    connector = connector_flags(tmp_path / "nobody.sock", policy=policy, **extra)
    with VllmServer(model_directory("tiny"), kv_tokens=4096, flags=[*connector, *flags]) as server:
        server.start()
        server.wait_ready()
        log = server.log(10_000)
        assert sum(said in line for line in log.splitlines()) == 1, log[-3000:]
        body = {"model": server.name, "prompt": prompt_of(1, extra=1), "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=60).status_code == 200
