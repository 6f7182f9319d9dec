"""What an agent reports is what its engine holds, or less: never more for longer than it takes to notice.

The agent is the whole one; publisher and connections are real. The engine's HTTP pages stand in for a process that is
killed and started at will.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import msgspec
import pytest
from agent_support import (
    CLEARED,
    EngineStandIn,
    Mirror,
    Publisher,
    agent_running,
    chain_of,
    mirroring,
    removed,
    serving,
    settings_for,
    stored,
    tokens_of,
    until,
)
from loopback_ports import free_port

from kvstore.messages import Tier
from replica_agent.replica import Replica


class Engine:
    """One engine at fixed addresses, over its lives: HTTP pages and a publisher that live and die together."""

    def __init__(self) -> None:
        self.http_port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self.pages = EngineStandIn()
        self.publisher: Publisher | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @contextlib.asynccontextmanager
    async def alive(self, *, replay: bool = True, **more: int) -> AsyncIterator[Publisher]:
        """One life, from start to kill."""
        self.pages.start_time += 1
        publisher = Publisher(self.events_port, self.replay_port if replay else None, **more)  # type: ignore[arg-type]
        try:
            async with serving(self.pages.app, self.http_port):
                yield publisher
        finally:
            publisher.close()


@contextlib.asynccontextmanager
async def watched(engine: Engine, *, replay: bool = True, **more: str) -> AsyncIterator[tuple[Replica, Mirror]]:
    settings = settings_for(engine.url, engine.events_port, engine.replay_port if replay else None, **more)
    async with agent_running(settings) as (replica, url), mirroring(url) as mirror:
        yield replica, mirror


def ready(replica: Replica) -> bool:
    return replica.engine_state().up and replica.subscriber.connected and not replica.subscriber.syncing


def publish_chain(publisher: Publisher, blocks: list[int], first_parent: int | None = None) -> None:
    parent = first_parent
    for block in blocks:
        publisher.publish(stored([block], tokens_of(block), parent=parent))
        parent = block


async def seen(publisher: Publisher, mirror: Mirror) -> None:
    """Publishes a block of its own until it is reported: from here on the subscription is known to work."""

    def reported() -> bool:
        publisher.publish(stored([999], tokens_of(999)))
        return set(chain_of([999])) <= mirror.hbm

    await until(reported, "first block reported")


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("offset", [-2, 0, 5], ids=["below", "at", "above"])
async def test_engine_restart_credits_nothing_old(offset: int, replay: bool) -> None:
    engine = Engine()
    async with engine.alive(replay=replay) as publisher, contextlib.AsyncExitStack() as stack:
        replica, mirror = await stack.enter_async_context(watched(engine, replay=replay))
        await until(lambda: ready(replica))
        await seen(publisher, mirror)
        publish_chain(publisher, [1, 2, 3])
        await until(lambda: set(chain_of([1, 2, 3])) <= mirror.hbm)
        next_seq = publisher.publish() + 1
        keep = stack.pop_all()
    async with keep:
        killed = time.monotonic()
        async with engine.alive(replay=replay, first_seq=max(0, next_seq + offset)) as publisher:
            await until(lambda: mirror.epoch == replica.hub.epoch and not mirror.hbm & set(chain_of([1, 2, 3])))
            assert time.monotonic() - killed < 2.0
            await until(lambda: ready(replica))
            await seen(publisher, mirror)
            publish_chain(publisher, [7])
            await until(lambda: mirror.hbm == set(chain_of([999])) | set(chain_of([7])))
    assert mirror.verified > 0


async def test_a_new_process_is_known_by_its_start_time_alone() -> None:
    """Something between agent and engine may keep the event connection open: the metrics page still tells."""
    engine = Engine()
    async with engine.alive() as publisher, watched(engine) as (replica, mirror):
        await until(lambda: ready(replica))
        publish_chain(publisher, [1, 2])
        await until(lambda: mirror.hbm == set(chain_of([1, 2])))
        before = mirror.epoch
        engine.pages.start_time += 1
        await until(lambda: mirror.epoch > before and replica.resyncs["engine_replaced"] == 1)


async def test_gap_resyncs_or_empties() -> None:
    """The ring keeps 4 batches. 2 lost are replayed; 8 lost are not to be had, and nothing older is credited."""
    engine = Engine()
    async with engine.alive(ring=4) as publisher, watched(engine) as (replica, mirror):
        await until(lambda: ready(replica))
        publish_chain(publisher, [1, 2, 3])
        await until(lambda: mirror.hbm == set(chain_of([1, 2, 3])))
        publisher.publish(removed(3), lose=True)
        publisher.publish(stored([4], tokens_of(4), parent=2), lose=True)
        publisher.publish(stored([5], tokens_of(5), parent=4))
        await until(lambda: mirror.hbm == set(chain_of([1, 2])) | set(chain_of([1, 2, 4, 5])))
        assert not any(replica.resyncs[reason] for reason in ("gap", "malformed"))
        for _ in range(8):
            publisher.publish(removed(5), lose=True)
        publisher.publish(stored([6], tokens_of(6)))
        await until(lambda: mirror.hbm == set(chain_of([6])))
        assert replica.resyncs["gap"] == 1


async def test_gap_without_replay_empties() -> None:
    engine = Engine()
    async with engine.alive(replay=False) as publisher, watched(engine, replay=False) as (replica, mirror):
        await until(lambda: ready(replica))
        await seen(publisher, mirror)
        publisher.publish(removed(999), lose=True)
        publisher.publish(stored([6], tokens_of(6)))
        await until(lambda: mirror.hbm == set(chain_of([6])))
        assert replica.resyncs["gap"] == 1


async def test_orphan_blocks_are_not_credited() -> None:
    engine = Engine()
    async with engine.alive() as publisher, watched(engine) as (replica, mirror):
        await until(lambda: ready(replica))
        publish_chain(publisher, [3, 4], first_parent=2)
        publisher.publish(stored([9], tokens_of(9)))
        await until(lambda: mirror.hbm == set(chain_of([9])))
        assert replica.catalogue.counts.orphans == 2
        publish_chain(publisher, [1, 2])
        await until(lambda: mirror.hbm == set(chain_of([1, 2, 3, 4])) | set(chain_of([9])))


async def test_any_interleaving_is_the_fold() -> None:
    """An agent that joins while the engine publishes ends with what one that was there all along has.

    The property itself, over all orders of replay and live batches: test_index_truth_events.py.
    """
    engine = Engine()
    async with engine.alive() as publisher, watched(engine) as (first, everything):
        await until(lambda: ready(first))
        joining: list[asyncio.Task[set[int]]] = []

        async def join() -> set[int]:
            async with watched(engine) as (replica, mirror):
                await until(lambda: ready(replica))
                await done.wait()
                await until(lambda: mirror.hbm == everything.hbm)
                replica.catalogue.check()
                assert replica.resyncs.total() == 0
                return mirror.hbm

        done = asyncio.Event()
        for block in range(1, 300):
            publisher.publish(stored([block], tokens_of(block), parent=block - 1 or None))
            if block % 3 == 0:
                publisher.publish(removed(block))
                publisher.publish(stored([block], tokens_of(block), parent=block - 1))
            if block % 60 == 0:
                joining.append(asyncio.create_task(join()))
            if block % 5 == 0:
                await asyncio.sleep(0)
        expected = set(chain_of(range(1, 300)))
        await until(lambda: everything.hbm == expected)
        done.set()
        assert await asyncio.gather(*joining) == [expected] * len(joining)


async def test_duplicate_copies_are_counted() -> None:
    engine = Engine()
    async with engine.alive() as publisher, watched(engine) as (replica, mirror):
        await until(lambda: ready(replica))
        publisher.publish(stored([1], tokens_of(1)), stored([1], tokens_of(1)), removed(1))
        publisher.publish(stored([2], tokens_of(2)))
        await until(lambda: mirror.hbm == set(chain_of([1])) | set(chain_of([2])))
        publisher.publish(removed(1), removed(1), removed(1))
        await until(lambda: mirror.hbm == set(chain_of([2])))
        publisher.publish(stored([1], tokens_of(1)))
        await until(lambda: mirror.hbm == set(chain_of([1])) | set(chain_of([2])))
        publisher.publish(CLEARED)
        await until(lambda: mirror.hbm == set())


async def test_what_is_told_again_is_no_copy() -> None:
    """vLLM tells again what a request found cached where that asks for it, and says once that it is gone."""
    engine = Engine()
    async with engine.alive() as publisher, watched(engine) as (replica, mirror):
        await until(lambda: ready(replica))
        run = stored([1, 2, 3], tokens_of(1) + tokens_of(2) + tokens_of(3))
        publisher.publish(run)
        for _ in range(5):
            publisher.publish(run)
        publisher.publish(removed(3), removed(2), removed(1), stored([9], tokens_of(9)))
        await until(lambda: mirror.hbm == set(chain_of([9])))
        # One block at a time it cannot be told from a second copy; but there is no room for so many.
        engine.pages.capacity = 3
        await until(lambda: replica.catalogue.capacity_blocks == 3)
        for _ in range(3):
            publisher.publish(stored([9], tokens_of(9)))
        publisher.publish(removed(9), stored([8], tokens_of(8)))
        await until(lambda: mirror.hbm == set(chain_of([8])))
        assert (replica.catalogue.counts.told_again, replica.catalogue.counts.surplus) == (15, 3)
        assert replica.resyncs.total() == 0


async def test_every_encoding_decodes() -> None:
    """One chain told in five encodings; then each batch that is none of them costs one counter and a resync."""
    engine = Engine()
    async with engine.alive() as publisher, watched(engine) as (replica, mirror):
        await until(lambda: ready(replica))
        publisher.publish(stored([1], tokens_of(1), field_of_the_future={"a": 1}))
        publisher.publish(["BlockStored", [2], 1, tokens_of(2), 16, None, "GPU", None, [None], 0, "full_attention"])
        publisher.publish(["BlockStored", [-3], 2, tokens_of(3), 16, None])
        publisher.publish(stored([b"\4" * 32], tokens_of(4), parent=-3, group_idx=None))
        bigrams = [[token, token + 1] for token in tokens_of(5)]
        publisher.publish(["BlockStored", [5], b"\4" * 32, bigrams, 16, None, "GPU"], {"type": "Unknown"}, ["Unknown"])
        await until(lambda: mirror.hbm == set(chain_of([1, 2, 3, 4, 5])))
        assert replica.events["ignored"] == 2
        publisher.publish(["BlockRemoved", [5]], ["BlockRemoved", [b"\4" * 32], "GPU", 0])
        await until(lambda: mirror.hbm == set(chain_of([1, 2, 3])))
        kind = {"type": "BlockStored", "block_hashes": [1], "kv_cache_spec_kind": {}}
        for count, raw in enumerate(
            (
                msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}], 0]),
                msgspec.msgpack.encode([1.0, [kind], 0]),
                b"\x93\x01" + b"\x91" * 5_000,
            ),
            1,
        ):
            publisher.publish(raw=raw)
            publisher.publish(stored([5 + count], tokens_of(5 + count)))
            await until(lambda: mirror.hbm == set(chain_of([5 + count])))  # noqa: B023
            assert (replica.subscriber.counts.malformed, replica.resyncs["malformed"]) == (count, count)
        publisher.publish(stored([], []), stored([9], tokens_of(9)))
        await until(lambda: mirror.hbm == set(chain_of([8])) | set(chain_of([9])))


async def test_hybrid_groups_do_not_poison() -> None:
    engine = Engine()
    async with engine.alive() as publisher, watched(engine) as (replica, mirror):
        await until(lambda: ready(replica))
        window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
        publish_chain(publisher, [1, 2])
        publisher.publish(stored([1, 2, 3], tokens_of(1) + tokens_of(2) + tokens_of(3), **window))
        publisher.publish(stored([4], [], parent=2, group_idx=2, kv_cache_spec_kind="mamba"))
        publisher.publish(removed(1, group_idx=1), removed(2, group_idx=1), removed(2, group_idx=2))
        publisher.publish(stored([9], tokens_of(9)))
        await until(lambda: mirror.hbm == set(chain_of([1, 2])) | set(chain_of([9])))
        replica.catalogue.check()


async def test_slow_gateway_never_blocks_an_engine() -> None:
    """A gateway that stops reading loses its stream; the engine's events and a second gateway go on meanwhile."""
    engine = Engine()
    async with engine.alive() as publisher:
        settings = settings_for(engine.url, engine.events_port, engine.replay_port, **{"stream-buffer-bytes": "262144"})
        async with agent_running(settings) as (replica, url), mirroring(url) as mirror:
            await until(lambda: ready(replica))
            address = urlsplit(url)
            with socket.socket() as stalled:
                stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stalled.connect((address.hostname, address.port))
                stalled.sendall(b"GET /v1/reports HTTP/1.1\r\nhost: agent\r\n\r\n")
                await until(lambda: replica.hub.streams == 2)
                blocks = list(range(8000))
                publisher.publish(stored(blocks, [block for block in blocks for _ in range(16)]))
                await until(lambda: len(mirror.hbm) == len(blocks))
                in_dram = 0

                def dropped() -> bool:
                    # The blocks come and go in the second tier, one step whenever the quick gateway has the last one.
                    nonlocal in_dram
                    if len(mirror.held[Tier.DRAM]) == in_dram:
                        if in_dram:
                            publisher.publish(removed(*blocks, medium="CPU"))
                        else:
                            publisher.publish(stored(blocks, [], medium="CPU"))
                        in_dram = len(blocks) - in_dram
                    return replica.hub.overruns == 1

                await until(dropped, "slow stream dropped")
                await until(lambda: len(mirror.held[Tier.DRAM]) == in_dram)
                assert replica.subscriber.gaps == 0
                assert replica.hub.streams == 1
