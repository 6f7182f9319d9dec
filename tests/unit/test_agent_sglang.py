"""A whole agent on the KV events that SGLang publishes: signed hashes, pages, tiers, ranks, replies without a topic."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agent_support import (
    CLEARED,
    Mirror,
    Publisher,
    agent_running,
    chain_of,
    mirroring,
    serving,
    settings_for,
    tokens_of,
    until,
)
from loopback_ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvstore.messages import Tier
from replica_agent.replica import Replica

PAGE = 64


async def _metrics(request: Request) -> Response:
    return PlainTextResponse(
        'sglang:num_running_reqs{model_name="m"} 3.0\nsglang:num_queue_reqs{model_name="m"} 1.0\n'
        'sglang:token_usage{model_name="m"} 0.5\n'
    )


async def _models(request: Request) -> Response:
    return JSONResponse({"data": [{"id": "m", "root": "m"}]})


PAGES = Starlette(routes=[Route("/metrics", _metrics), Route("/v1/models", _models)])
"""An SGLang's pages: it has no `/version`, and says nothing of its cache's size."""


def hash_of(block: int) -> int:
    """A hash as SGLang sends it: signed, every other one negative."""
    return (block + 1) * 0x1234_5678_9ABC if block % 2 else -(2**63) + block


def stored(blocks: list[int], parent: int | None, medium: str = "GPU", size: int = PAGE, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [hash_of(block) for block in blocks],
        "parent_block_hash": None if parent is None else hash_of(parent),
        "token_ids": [token for block in blocks for token in tokens_of(block, size)],
        "block_size": size,
        "lora_id": None,
        "medium": medium,
    } | more


def as_array(event: dict[str, Any]) -> list[Any]:
    """The same event as releases before tagged maps encode it."""
    return list(event.values())


def removed(*blocks: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [hash_of(block) for block in blocks], "medium": medium}


@contextlib.asynccontextmanager
async def rig(rank: int = 0, *, first: bool = True) -> AsyncIterator[tuple[Publisher, Replica, Mirror]]:
    events, replay = free_port(), free_port()
    publisher = Publisher(events, replay, topic_in_replies=False, rank=rank)
    if first:
        publisher.publish(stored([0, 1], None))
    try:
        async with serving(PAGES) as engine_url:
            settings = settings_for(engine_url, events, replay, **{"dp-rank": str(rank)})
            async with agent_running(settings) as (replica, url), mirroring(url) as mirror:
                yield publisher, replica, mirror
    finally:
        publisher.close()


def held(mirror: Mirror, tier: Tier = Tier.HBM) -> set[int]:
    return set(mirror.held.get(tier, {}))


@pytest.mark.parametrize("encode", [lambda event: event, as_array], ids=["maps", "arrays"])
async def test_pages_are_followed_through_their_tiers(encode: Any) -> None:
    async with rig() as (publisher, replica, mirror):
        chain = chain_of([0, 1, 2, 3], size=PAGE)
        await until(lambda: held(mirror) == set(chain[:2]), "what was published before the agent came is replayed")
        assert replica.block_size == PAGE
        publisher.publish(encode(stored([2, 3], 1)))
        await until(lambda: held(mirror) == set(chain))
        publisher.publish(encode(stored([2, 3], 1, medium="CPU_PINNED")), encode(removed(2, 3)))
        await until(lambda: (held(mirror), held(mirror, Tier.DRAM)) == (set(chain[:2]), set(chain[2:])))
        publisher.publish(encode(stored([2], 1)), encode(removed(3, medium="CPU_PINNED")))
        await until(lambda: (held(mirror), held(mirror, Tier.DRAM)) == (set(chain[:3]), {chain[2]}))
        publisher.publish(encode(stored([9], None, medium="EXTERNAL")), CLEARED)
        await until(lambda: not held(mirror) and not held(mirror, Tier.DRAM))
        assert replica.events["ignored"] == 1
        publisher.publish(encode(stored([0], None)))
        await until(lambda: held(mirror) == {chain[0]})


async def test_load_and_name_come_from_its_pages() -> None:
    async with rig() as (_, replica, mirror):
        await until(lambda: mirror.heartbeat is not None and mirror.heartbeat.running == 3)
        assert mirror.heartbeat is not None
        assert (mirror.heartbeat.waiting, mirror.heartbeat.kv_usage) == (1, 0.5)
        await until(lambda: replica.block_size == PAGE)
        hello = replica.hello()
        assert hello is not None and (hello.engine, hello.block_size) == ("sglang", PAGE)


async def test_who_greeted_before_the_size_of_a_page_was_known_greets_again() -> None:
    """Nothing but its events says it; a gateway with another in mind would find no block of this replica."""
    async with rig(first=False) as (publisher, replica, mirror):
        await until(lambda: replica.hello() is not None and mirror.verified > 0)
        streams, hello = len(mirror.epochs), replica.hello()
        assert hello is not None and hello.block_size == 0
        publisher.publish(stored([0, 1], None))
        await until(lambda: held(mirror) == set(chain_of([0, 1], size=PAGE)) and len(mirror.epochs) > streams)
        hello = replica.hello()
        assert hello is not None and hello.block_size == PAGE
        streams = len(mirror.epochs)
        publisher.publish(stored([2], 1))
        await until(lambda: held(mirror) == set(chain_of([0, 1, 2], size=PAGE)))
        assert len(mirror.epochs) == streams, "once is enough"


async def test_a_gap_is_filled_by_replies_without_a_topic() -> None:
    async with rig() as (publisher, replica, mirror):
        chain = chain_of([0, 1, 2, 3], size=PAGE)
        await until(lambda: held(mirror) == set(chain[:2]))
        publisher.publish(stored([2], 1), lose=True)
        publisher.publish(stored([3], 2))
        await until(lambda: held(mirror) == set(chain))
        assert (replica.subscriber.gaps, replica.subscriber.counts.failed_replays) == (1, 0)


async def test_salted_blocks_and_adapters_are_not_the_base_models() -> None:
    async with rig() as (publisher, _, mirror):
        base = set(chain_of([0, 1], size=PAGE))
        await until(lambda: held(mirror) == base)
        publisher.publish(stored([4], None, cache_salt="tenant"), stored([6], None, lora_name="adapter"))
        await until(lambda: len(held(mirror)) == 4)
        assert not held(mirror) & set(chain_of([4], size=PAGE) + chain_of([6], size=PAGE))


async def test_a_rank_has_its_own_stream() -> None:
    async with rig(rank=1) as (_, replica, mirror):
        await until(lambda: len(held(mirror)) == 2)
        hello = replica.hello()
        assert hello is not None and hello.dp_rank == 1


async def test_what_it_takes_is_said_in_its_own_words() -> None:
    async with rig() as (publisher, replica, mirror):
        await until(lambda: len(held(mirror)) == 2)
        found = {problem.code: problem for problem in replica.problems()}
        assert set(found) == {"model_files", "pool_off"}
        assert "no connector for SGLang" in found["pool_off"].fix
        publisher.publish(CLEARED)
        publisher.publish(stored([0], None, size=1))
        await until(lambda: replica.block_size == 1)
        found = {problem.code: problem for problem in replica.problems()}
        assert "SGLang: --page-size" in found["block_size"].fix, "one token a page is its default"
