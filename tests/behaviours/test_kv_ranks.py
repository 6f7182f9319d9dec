"""Blocks that several ranks write: there once all have, and read by any other split of heads and layers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
import torch
from agent_support import until
from kv_faults import always_fetch, leaving_nothing
from kv_support import BLOCK_TOKENS, Agent, Engine, agent, key_of, keys_of

from kvstore.engine_messages import Ready
from kvstore.geometry import KvGeometry
from kvstore.layout import Layout, Share, pieces, share_of
from kvstore.messages import FetchOutcome
from kvstore.namespace import KvNamespace, pack_content_keys
from kvstore.peer_messages import LeaseRefused, LeaseRequest
from replica_agent.engines.errors import PoolRefused

GRIDS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 3), (4, 3))
"""tp x pp, of 4 heads and 6 layers: with tp 8 two ranks keep each head."""

GEOMETRY = KvGeometry(layers=6, kv_heads=4, head_dim=8, dtype="bfloat16")
LAYOUT = Layout(GEOMETRY, BLOCK_TOKENS)
MODEL = {"layers": 6, "kv_heads": 4, "head_dim": 8, "dtype": "bfloat16", "block_bytes": LAYOUT.slot_bytes}


@pytest.fixture(autouse=True)
async def _surroundings(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    always_fetch(monkeypatch)
    async with leaving_nothing():
        yield


class Rank(NamedTuple):
    """One worker's connection, and what it keeps of each block."""

    engine: Engine
    share: Share

    async def save(self, keys: list[bytes], blocks: list[torch.Tensor]) -> int:
        """Writes its share of whole blocks, unless it only reads; how many became visible by it."""
        places = await self.engine.ask(self.engine.client.reserve, keys, b"")
        wanted = [(key, place) for key, place in zip(keys, places, strict=True) if place is not None]
        for (_, place), block in zip(wanted, blocks, strict=False):
            slot, own = self.engine.client.slot(place.slot), own_part(block, self.share)
            for at, offset, length in pieces(LAYOUT, self.share):
                slot[at : at + length] = own[offset : offset + length]
        return await self.engine.commit(wanted)

    def read(self, slot: int) -> bytes:
        """Its share of the block in a slot, densely."""
        memory = self.engine.client.slot(slot)
        return b"".join(memory[at : at + length] for at, _, length in pieces(LAYOUT, self.share))


def block(number: int) -> torch.Tensor:
    """A block of the whole model: [heads, layers, K and V, tokens, dims]."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, 2, BLOCK_TOKENS, 8, generator=generator).to(torch.bfloat16)


def own_part(whole: torch.Tensor, share: Share) -> bytes:
    """What a rank keeps of it, cut out of the tensor itself."""
    heads = slice(share.first_head, share.first_head + share.heads)
    part = whole[heads, share.first_layer : share.first_layer + share.layers]
    return part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


async def ranks_of(subject: Agent, tp: int, pp: int) -> list[Rank]:
    """A connection for each rank of a grid."""
    return [
        Rank(
            await subject.connect(tp=tp, pp=pp, rank=rank, role="worker", **MODEL),
            share_of(GEOMETRY, tp=tp, pp=pp, rank=rank),
        )
        for rank in range(tp * pp)
    ]


async def test_partial_ranks_are_invisible(tmp_path: Path) -> None:
    """While a rank is missing the block is nowhere: not in the pool, not at a peer, not in what gateways are told."""
    keys, blocks = keys_of(1, 2), [block(1), block(2)]
    async with agent(tmp_path, transports="shm") as source, agent(tmp_path, transports="shm") as reader:
        await reader.connect(**MODEL)
        ranks = await ranks_of(source, 2, 2)
        for count, rank in enumerate(ranks, 1):
            whole = count == len(ranks)
            assert await rank.save(keys, blocks) == (2 if whole else 0)
            assert await rank.engine.ask(rank.engine.client.lookup, "r", keys) == (2 if whole else 0)
            await until(lambda: not len(source.replica.pool_news), "told")
            assert source.replica.catalogue.pooled == (2 if whole else 0)
            assert len(await load(reader, f"r{count}", keys, source)) == (2 if whole else 0)
        # One rank never writes, another dies over it: this block was never there.
        late = keys_of(3)
        for rank in ranks[1:]:
            assert await rank.save(late, [block(3)]) == 0
        await ranks[0].engine.close()
        await ranks[1].engine.close()
        await until(lambda: source.pool.counts.reserved == 0, "given up")
        assert await load(reader, "late", late, source) == []
        assert await ranks[2].engine.ask(ranks[2].engine.client.lookup, "r", late) == 0
        await until(lambda: not len(source.replica.pool_news), "told")
        assert source.replica.catalogue.pooled == 2
        assert [record.outcome for record in reader.records] == [
            *[FetchOutcome.MISSED] * 3,
            FetchOutcome.FETCHED,
            FetchOutcome.MISSED,
        ]
        await source.quiet()
        await reader.quiet()


async def load(reader: Agent, request: str, keys: list[bytes], source: Agent) -> list[int]:
    """Slots of the reader's pool with the blocks in them; released by every rank, and so there until something else is
    written."""
    engine = reader.engines[0]
    await engine.prepare(request, keys, source.hint(len(keys)))
    answer = await engine.settled(request)
    if not isinstance(answer, Ready):
        return []
    for rank in reader.engines:
        await rank.ask(rank.client.release, request, len(answer.slots), 0.001)
    return list(answer.slots)


async def test_mismatched_layout_is_resliced(tmp_path: Path) -> None:
    """Every grid fetches what every other one wrote, and each of its ranks finds exactly its part of the tensor."""
    async with AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(agent(tmp_path, transports="shm")) for _ in GRIDS]
        grids = [await ranks_of(each, *grid) for each, grid in zip(agents, GRIDS, strict=True)]
        for number, ranks in enumerate(grids):
            visible = [await rank.save(keys_of(number), [block(number)]) for rank in ranks]
            assert sum(visible) == 1
        for number, (reader, ranks) in enumerate(zip(agents, grids, strict=True)):
            for other, source in enumerate(agents):
                if other == number:
                    continue
                (slot,) = await load(reader, f"of {other}", keys_of(other), source)
                for rank in ranks:
                    assert rank.read(slot) == own_part(block(other), rank.share), (GRIDS[other], GRIDS[number])
            assert {record.outcome for record in reader.records} == {FetchOutcome.FETCHED}
        for each in agents:
            await each.quiet()


OTHERS: tuple[dict[str, Any], ...] = (
    {"dtype": "float16"},
    {"block_size": 2 * BLOCK_TOKENS},
    {"layers": 5},
    {"kv_heads": 2},
    {"head_dim": 16},
    {"layout": "other-v1"},
    {"hash_algorithm": "xxh3"},
    {"block_bytes": LAYOUT.slot_bytes + 2},
    {"identity": {"model": "m", "weights": "w", "rope": "{}"}},
    {"identity": {"model": "m", "weights": "of another training"}},
)


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
async def test_mismatched_layout_is_refused_with_the_reason(tmp_path: Path, other: dict[str, Any]) -> None:
    """At the lease, before a byte moves; the field is named with both values, and the fetch counts as refused."""
    async with agent(tmp_path, transports="shm") as source, agent(tmp_path, transports="shm") as reader:
        await source.connect(**MODEL)
        await reader.connect(**(MODEL | other))
        ours, theirs = source.kv.keeper.namespace, reader.kv.keeper.namespace
        assert ours is not None and theirs is not None
        refused = await ask(source, theirs)
        assert refused.code == "namespace"
        for field in _differing(ours, theirs):
            assert f"{field}: " in refused.reason, refused.reason
        assert " here, " in refused.reason and " there" in refused.reason
        assert await load(reader, "r", keys_of(1), source) == []
        assert (reader.record.outcome, reader.record.reason) == (FetchOutcome.REFUSED, "namespace")
        await source.quiet()
        await reader.quiet()


def _differing(ours: KvNamespace, theirs: KvNamespace) -> Iterator[str]:
    for name in KvNamespace.__struct_fields__:
        mine, its = getattr(ours, name), getattr(theirs, name)
        if isinstance(mine, dict):
            yield from (key for key in mine | its if mine.get(key) != its.get(key))
        elif mine != its:
            yield name


async def ask(source: Agent, namespace: KvNamespace) -> LeaseRefused:
    """What an owner says to a reader of this namespace."""
    body = LeaseRequest(
        reader="r",
        secret=bytes(16),
        request="r",
        namespace=namespace,
        keys=pack_content_keys([key_of(1)]),
        ttl_s=1.0,
        transports=["shm"],
    )
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{source.url}/v1/leases", data=msgspec.msgpack.encode(body)) as response:
            assert response.status == 409
            return msgspec.msgpack.decode(await response.read(), type=LeaseRefused)


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ({"tp": 3}, "tp: 3 ranks and 4 KV heads: neither divides the other"),
        ({"pp": 7}, "pp: 7 stages cannot share 6 layers"),
        ({"tp": 2, "rank": 4}, "rank: there is no rank 4 in a grid of tp 2 x pp 1"),
    ],
)
async def test_mismatched_layout_that_no_slot_can_hold_is_refused_to_the_engine(
    tmp_path: Path, grid: dict[str, int], reason: str
) -> None:
    async with agent(tmp_path, transports="shm") as subject:
        with pytest.raises(PoolRefused, match=f"^{reason}"):
            await asyncio.wait_for(subject.connect(**MODEL, **grid), 10)
