"""A tiny engine beside an agent in a thread: what is saved, what is loaded, and what happens when the agent fails."""

from __future__ import annotations

import asyncio
import ctypes
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq.asyncio
from naive_agent import NaiveAgent
from reference_support import DEADLINE_S, client, complete, fold, metric, replay, saved, tokens, until

from kvstore import engine_messages as wire
from kvstore.hint import Hint
from replica_agent.engines.fingerprint import weights_fingerprint
from replica_agent.reference.block_memory import BlockMemory
from replica_agent.reference.block_pool import BlockPool, CachedBlock
from replica_agent.reference.connector import Saving
from replica_agent.reference.pool_connector import PoolConnector
from replica_agent.reference.runtime import Opened
from replica_agent.reference.settings import parse_settings

SIZE = 16
CHAT = "The replica that holds a prefix answers sooner. " * 6


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[NaiveAgent]:
    with NaiveAgent(tmp_path / "agent.sock") as agent:
        yield agent


def engine(agent: NaiveAgent, **changes: Any) -> Any:
    """A float32 engine of 24 blocks: what was computed two prompts ago has been evicted, but the agent has it."""
    return client(**({"kv_socket": str(agent.path), "kv_tokens": 24 * SIZE, "dtype": "float32"} | changes))


async def connected(agent: NaiveAgent, opened: Opened) -> None:
    connector = opened.service.engine._connector
    assert connector is not None

    async def check() -> bool:
        return connector.connected

    await until(check)


async def evicted(http: httpx.AsyncClient) -> None:
    """Two other prompts: together they need every block."""
    for seed in (90, 91):
        await complete(http, tokens(seed), max_tokens=1)


async def loading_for_ever(agent: NaiveAgent, http: httpx.AsyncClient) -> asyncio.Task[tuple[str, int]]:
    """A request whose blocks the agent has accepted, and does not get ready."""
    agent.loading = 1_000_000
    asked = agent.count(wire.Poll)
    task = asyncio.create_task(complete(http, tokens(1)))

    async def loading() -> bool:
        return agent.count(wire.Poll) > asked + 2

    await until(loading)
    return task


async def test_a_loaded_prefix_gives_the_same_tokens_as_a_computed_one(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        first, cached = await complete(http, tokens(1))
        assert cached == 0
        await saved(http, 12)
        await evicted(http)
        loaded_before = await metric(http, "reference_engine:kv_loaded_blocks_total")
        # Longer than what was saved, so that the rest is computed on top of loaded blocks.
        assert await complete(http, tokens(1)) == (first, 192)
        assert await metric(http, "reference_engine:kv_loaded_blocks_total") == loaded_before + 12
        assert await metric(http, "reference_engine:kv_failed_load_blocks_total") == 0
        assert await metric(http, "vllm:prefix_cache_hits_total") == 192

        async def released() -> bool:
            return agent.count(wire.Release) > 0

        await until(released)
        assert agent.working == {}
        release = next(each for each in agent.asked if isinstance(each, wire.Release))
        assert release.loaded == 12
        assert 0 < release.copy_s < 10


async def test_every_saved_block_is_the_engines_own_bytes(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        await complete(http, tokens(1), max_tokens=1)
        await saved(http, 12)
        pool, kv = opened.service.engine.pool, opened.service.engine._model.kv
        for content, _, _ in pool.cached():
            (block,) = pool.lookup([content.hash])
            assert agent.block(content.hash) == kv.blocks[block].numpy().tobytes()


async def test_loaded_blocks_are_announced_as_stored_with_their_tokens(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        await complete(http, tokens(1), max_tokens=1)
        await saved(http, 12)
        await evicted(http)
        blocks = (await http.get("/debug/blocks")).json()["blocks"]
        assert not {block["hash"] for block in blocks} & {key.hex() for key in list(agent.held)[:12]}
        await complete(http, tokens(1), max_tokens=1)
        publisher = opened.publisher
        assert publisher is not None and publisher.replay_endpoint is not None
        blocks = (await http.get("/debug/blocks")).json()["blocks"]
        held = {block["wire_hash"]: block["copies"] for block in blocks}
        events: list[dict[str, Any]] = []
        with zmq.asyncio.Context() as context:

            async def told_all() -> bool:
                batches = await replay(context, str(publisher.replay_endpoint))
                events[:] = [event for _, batch in batches for event in batch[1]]
                return dict(fold(events)) == held

            await until(told_all)
        told = [event for event in events if event["type"] == "BlockStored" and event["token_ids"] == tokens(1)[:192]]
        assert len(told) == 2, "computed once, loaded once"


async def test_the_hint_and_the_prompt_reach_the_agent(agent: NaiveAgent) -> None:
    hint = {"request": "g", "source": "a", "url": "http://a:1", "blocks": 3, "deadline_ms": 900, "mac": "m"}
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        params = {"prefix_gateway": hint, "do_remote_prefill": True}
        response = await http.post(
            "/v1/completions",
            json={"prompt": tokens(3), "max_tokens": 1, "n": 2, "kv_transfer_params": params},
            headers={"x-request-id": "abc"},
        )
        assert response.status_code == 200
        prepared = [each for each in agent.asked if isinstance(each, wire.Prepare)]
        assert {each.request for each in prepared} >= {"abc-0"}
        assert prepared[0].hint == Hint(**hint)  # type: ignore[arg-type]
        assert (prepared[0].prompt_tokens, prepared[0].cached_blocks, len(prepared[0].keys)) == (200, 0, 12 * 32)
        refused = await http.post(
            "/v1/completions",
            json={"prompt": tokens(3), "kv_transfer_params": {"prefix_gateway": hint | {"blocks": "three"}}},
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "kv_transfer_params.prefix_gateway.blocks"


async def test_the_hello_says_what_decides_the_bytes(agent: NaiveAgent) -> None:
    agent.refusal = "just looking"
    for changes in ({}, {}, {"dtype": "bfloat16"}, {"served_model_name": "other"}):
        before = len(agent.hellos)
        async with engine(agent, **changes):

            async def heard(before: int = before) -> bool:
                return len(agent.hellos) > before

            await until(heard)
    first, again, bfloat16, other = agent.hellos
    assert first.engine_id != again.engine_id, "another life"
    assert first.identity == again.identity == bfloat16.identity != other.identity
    assert set(first.identity) == {"model", "weights", "rope", "norm_eps"}
    assert (first.dtype, bfloat16.dtype, first.block_bytes) == ("float32", "bfloat16", 2 * bfloat16.block_bytes)
    assert (first.block_size, first.hash_algorithm, first.role) == (SIZE, "sha256", "both")


@pytest.mark.parametrize("verb", [wire.Prepare, wire.Poll, wire.Reserve, wire.Commit, wire.Release, wire.Observe])
async def test_an_agent_that_hangs_costs_a_deadline_and_no_answer(agent: NaiveAgent, verb: type) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        first, _ = await complete(http, tokens(1))
        await saved(http, 12)
        await evicted(http)
        agent.silent.add(verb)
        assert (await complete(http, tokens(1)))[0] == first
        for seed in (4, 5):
            await complete(http, tokens(seed))
        agent.silent.clear()
        await connected(agent, opened)
        await evicted(http)
        assert (await complete(http, tokens(1)))[0] == first


async def test_blocks_that_do_not_come_are_recomputed_and_not_counted_as_cached(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        first, _ = await complete(http, tokens(1))
        await saved(http, 12)
        await evicted(http)
        agent.withheld = 5
        assert await complete(http, tokens(1)) == (first, 7 * SIZE)
        assert await metric(http, "reference_engine:kv_failed_load_blocks_total") == 5


async def test_what_is_promised_and_never_ready_is_recomputed_at_the_deadline(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        first, _ = await complete(http, tokens(1))
        await saved(http, 12)
        await evicted(http)
        agent.loading, agent.deadline_s = 1_000_000, 0.2
        assert await complete(http, tokens(1)) == (first, 0)

        async def given_back() -> bool:
            return agent.working == {}

        await until(given_back)
        assert agent.count(wire.Cancel) >= 1


async def test_an_agent_that_dies_while_blocks_are_loaded_loses_nobody(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        first, _ = await complete(http, tokens(1))
        await saved(http, 12)
        await evicted(http)
        task = await loading_for_ever(agent, http)
        agent.hang_up()
        assert await task == (first, 0)
        agent.loading = 0
        await connected(agent, opened)
        await evicted(http)
        assert (await complete(http, tokens(1)))[0] == first


async def test_nothing_keeps_the_memory_of_an_agent_that_is_gone(agent: NaiveAgent) -> None:
    """A pool has gigabytes, and an engine may have nothing to do for hours."""
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        await complete(http, tokens(1))
        await saved(http, 12)
        await evicted(http)
        assert (await complete(http, tokens(1)))[1] == 192
        connector = opened.service.engine._connector
        assert connector is not None

        async def idle() -> bool:
            return not len(connector._loader) and not connector._saver._queue

        await until(idle)
        memory = weakref.ref(connector._link.client)
        agent.hang_up()

        async def freed() -> bool:
            return memory() is None

        await until(freed)


async def test_an_aborted_load_is_given_back(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        await complete(http, tokens(1))
        await saved(http, 12)
        await evicted(http)
        task = await loading_for_ever(agent, http)
        task.cancel()

        async def given_back() -> bool:
            return agent.working == {} and await metric(http, "vllm:num_requests_running") == 0

        await until(given_back)
        await asyncio.wrap_future(opened.service.engine.call(opened.service.engine.scheduler.check))


async def test_a_copy_that_raises_is_computed_and_given_back(
    agent: NaiveAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        first, _ = await complete(http, tokens(1))
        await saved(http, 12)
        with monkeypatch.context() as broken:
            broken.setattr(BlockMemory, "write", lambda *_: 1 // 0)
            for _ in range(2):
                await evicted(http)
                assert await complete(http, tokens(1)) == (first, 0)

        async def given_back() -> bool:
            return agent.working == {}

        await until(given_back)
        await evicted(http)
        assert await complete(http, tokens(1)) == (first, 192)


async def test_a_reset_reaches_the_agent_before_anything_is_sought_again(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        await complete(http, tokens(1))
        await saved(http, 12)
        assert (await http.post("/reset_prefix_cache")).status_code == 200

        async def cleared() -> bool:
            return agent.held == {}

        await until(cleared)
        assert (await complete(http, tokens(1)))[1] == 0


async def test_what_does_not_fit_into_the_queue_is_shed_and_counted(agent: NaiveAgent) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        connector = opened.service.engine._connector
        assert connector is not None
        connector._saver._max_queued = 0
        await complete(http, tokens(1), max_tokens=1)
        assert await metric(http, "reference_engine:kv_shed_blocks_total") == 12
        assert agent.held == {}


async def test_prefill_is_observed(agent: NaiveAgent) -> None:
    async with engine(agent, prefill_chunk=150) as (http, opened):
        await connected(agent, opened)
        await complete(http, tokens(1), max_tokens=3)

        async def observed() -> bool:
            return agent.count(wire.Observe) >= 2

        await until(observed)
        seen = [(each.tokens, each.attended) for each in agent.asked if isinstance(each, wire.Observe)]
        assert seen == [(150, 150 * 151 // 2), (50, 50 * 150 + 50 * 51 // 2)], "two chunks, and no decode"
        assert all(each.seconds > 0 for each in agent.asked if isinstance(each, wire.Observe))


async def test_an_engine_with_a_socket_that_nobody_listens_on_works(tmp_path: Path) -> None:
    async with client(kv_socket=str(tmp_path / "none.sock")) as (http, _):
        assert (await complete(http, tokens(1)))[1] == 0
        assert await metric(http, "reference_engine:kv_saved_blocks_total") == 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.0005)


@contextmanager
def alone(agent: NaiveAgent, pool: BlockPool, store: Any) -> Iterator[PoolConnector]:
    """A connected connector over `store`, without an engine."""
    size = len(store) // pool.num_blocks
    hello = wire.EngineHello(
        engine_id="e",
        role="both",
        layers=1,
        kv_heads=1,
        head_dim=1,
        dtype="float32",
        layout="test",
        block_size=1,
        block_bytes=size,
        hash_algorithm="sha256",
        identity={},
    )
    connector = PoolConnector(str(agent.path), hello, pool, BlockMemory(ctypes.addressof(store), size))
    try:
        wait_for(lambda: connector.connected)
        yield connector
    finally:
        connector.close()


def test_nothing_is_sought_as_long_as_a_clear_is_owed(agent: NaiveAgent) -> None:
    with alone(agent, BlockPool(2, 1), ctypes.create_string_buffer(2 * 64)) as connector:
        agent.silent.add(wire.Clear)
        connector.clear()
        assert connector.connected, "for as long as the agent may take"
        assert connector.seek("r", [b"k" * 32], 0, 2, None) is None
        wait_for(lambda: agent.count(wire.Clear) == 1)
        agent.silent.clear()
        wait_for(lambda: connector.seek("r", [b"k" * 32], 0, 2, None) is not None)
        assert agent.count(wire.Clear) == 2


def test_a_request_id_is_sought_once_at_a_time(agent: NaiveAgent) -> None:
    with alone(agent, BlockPool(2, 1), ctypes.create_string_buffer(2 * 64)) as connector:
        agent.held[b"k" * 32] = 0
        first = connector.seek("r", [b"k" * 32], 0, 2, None)
        assert first is not None
        assert connector.seek("r", [b"k" * 32], 0, 2, None) is None
        first.end()
        connector.settle()
        wait_for(lambda: connector.seek("r", [b"k" * 32], 0, 2, None) is not None)


@pytest.mark.parametrize("overtaking", [False, True])
def test_a_copy_that_is_not_of_one_piece_never_becomes_visible(tmp_path: Path, overtaking: bool) -> None:
    """Blocks are filled with a value each and reused as fast as the model could, while the saver copies them."""
    size, count = 65_536, 300
    store = ctypes.create_string_buffer(8 * size)
    pool = BlockPool(8, 1)
    with NaiveAgent(tmp_path / "agent.sock", slots=count) as agent, alone(agent, pool, store) as connector:
        for number in range(count):
            (block,) = pool.allocate(1)
            ctypes.memset(ctypes.addressof(store) + block * size, number % 251, size)
            content = CachedBlock(number.to_bytes(32, "big"), None, (number,))
            pool.store([block], [content])
            connector.save(Saving([block], [pool.versions[block]], [content]))
            pool.release([block])
            connector.check()
            if not overtaking:
                wait_for(lambda number=number: connector.saved + connector.shed > number)
        wait_for(lambda: connector.saved + connector.shed == count)
        assert connector.saved == len(agent.held)
        assert (connector.shed > 0) == overtaking
        for key in agent.held:
            assert agent.block(key) == bytes([int.from_bytes(key, "big") % 251]) * size


async def test_a_slot_that_is_none_of_the_pools_is_not_read(agent: NaiveAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(agent) as (http, opened):
        await connected(agent, opened)
        first, _ = await complete(http, tokens(1))
        await saved(http, 12)
        await evicted(http)
        right = agent._progress

        def wrong(request: str) -> wire.Answer:
            answer = right(request)
            return wire.Ready(slots=[0, 1, 10**6], generations=[1] * 3) if isinstance(answer, wire.Ready) else answer

        monkeypatch.setattr(agent, "_progress", wrong)
        assert await complete(http, tokens(1)) == (first, 2 * SIZE)


def test_block_memory_copies_exactly_one_block() -> None:
    store = ctypes.create_string_buffer(b"aaaabbbbcccc", 12)
    memory = BlockMemory(ctypes.addressof(store), 4)
    taken = bytearray(4)
    memory.read(1, memoryview(taken))
    assert taken == b"bbbb"
    memory.write(2, memoryview(bytearray(b"xyzw")))
    assert store.raw == b"aaaabbbbxyzw"
    with pytest.raises(ValueError, match="3 bytes for a block of 4"):
        memory.write(0, memoryview(bytearray(3)))


def test_the_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    seen = set()
    for name, data in (("a", b"x" * 100_000), ("a", b"x" * 99_999 + b"y"), ("a", b"x" * 99_999), ("b", b"x" * 100_000)):
        for old in tmp_path.glob("*.safetensors"):
            old.unlink()
        (tmp_path / f"{name}.safetensors").write_bytes(data)
        seen.add(weights_fingerprint(tmp_path))
        (tmp_path / "config.json").write_text(name + str(len(data)))
        assert weights_fingerprint(tmp_path) in seen, "other files are not weights"
    assert len(seen) == 4


def test_an_empty_socket_is_none() -> None:
    assert parse_settings(["--model", "tiny"]).kv_socket is None
    assert parse_settings(["--model", "tiny", "--kv-socket", ""]).kv_socket is None
    assert parse_settings(["--model", "tiny", "--kv-socket", "run/agent.sock"]).kv_socket == "run/agent.sock"
