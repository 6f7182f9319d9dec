"""What a gateway knows of replicas that differ, in block size or rank, and of what their engines say beside the chain.

Real agents, and a gateway in this process; the engines are stand-ins whose caches can be looked at.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator

import httpx
from agent_support import MODEL, SEED, Publisher, agent_running, removed, serving, settings_for, until
from claimed_cluster import BLOCK, ClaimingEngine, claimed_cluster, prompt
from http_support import Running, eventually, serving_gateway
from loopback_ports import free_port
from path_support import Parts, exchange, identity
from starlette.requests import Request
from starlette.responses import Response

from gateway.path.hint import hint_fields
from gateway.settings import PlacementSection, ReplicaSettings, Settings
from kvstore.identity import Namespace, token_keys
from kvstore.messages import Tier


async def test_block_sizes_differ_safely() -> None:
    """Engines with blocks of 16, 64, 128 and 256 tokens, and prompts that part anywhere.

    What is predicted of each is never more than it has, and less by no more than one of the largest blocks.
    """
    rng = random.Random(1)
    sizes = [16, 64, 128, 256]
    async with claimed_cluster(blocks=sizes) as cluster:
        documents = [prompt(1, 100)]
        for number in range(2, 6):
            base = rng.choice(documents)
            documents.append(base[: rng.randrange(len(base))] + prompt(number, rng.randrange(20, 80)))
        for at, engine in enumerate(cluster.engines):
            for document in rng.sample(documents, 3):
                await cluster.ask(document[: rng.randrange(300, len(document) + 1)], pin=at)
            await cluster.reported(at, len(engine.held))
        errors, hits = [], 0
        for _ in range(60):
            asked = rng.choice(documents)
            asked = asked[: rng.randrange(1, len(asked) + 1)] + [
                rng.randrange(1 << 20) for _ in range(rng.randrange(40))
            ]
            for engine, told in zip(cluster.engines, await cluster.explain(asked), strict=True):
                true = engine.match(asked)
                assert true - max(sizes) < told["cached_tokens"] <= true, (engine.block, true, told)
                errors.append(true - told["cached_tokens"])
                hits += true > 0
        assert hits > 60
        assert sum(errors) == 0, "and where token ids are known nothing is lost"


class RankedEngine(ClaimingEngine):
    """Two data-parallel ranks behind one URL, each with a cache and events of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[tuple[set[int], Publisher]] = []
        self.asked: list[int] = []

    async def _complete(self, request: Request) -> Response:
        rank = int(request.headers["x-data-parallel-rank"])
        self.asked.append(rank)
        self.held, self.publisher = self.ranks[rank]
        return await super()._complete(request)

    async def _metrics(self, request: Request) -> Response:
        page = bytes((await super()._metrics(request)).body)
        return Response(page + page.replace(b'engine="0"', b'engine="1"'), media_type="text/plain")


@contextlib.asynccontextmanager
async def _two_ranks() -> AsyncIterator[tuple[RankedEngine, Running]]:
    engine = RankedEngine()
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(engine.app))
        replicas = []
        for rank in (0, 1):
            events, replay = free_port(), free_port()
            publisher = Publisher(events, replay, rank=rank)
            stack.callback(publisher.close)
            engine.ranks.append((set(), publisher))
            flags = settings_for(url, events, replay, **{"replica-id": f"rank-{rank}", "dp-rank": str(rank)})
            replica, agent = await stack.enter_async_context(agent_running(flags))
            await until(lambda replica=replica: replica.subscriber.connected and not replica.subscriber.syncing)  # type: ignore[misc]
            replicas.append(ReplicaSettings(id=f"rank-{rank}", engine=url, agent=agent, dp_rank=rank))
        placement = PlacementSection(route_seed=SEED, allow_pinning=True)
        running = await stack.enter_async_context(serving_gateway(Settings(replicas=replicas, placement=placement)))
        fleet = running.gateway.fleet.replicas.values()
        await eventually(lambda: all(each.reporting and each.engine_up for each in fleet))
        yield engine, running


async def test_dp_rank_is_identity() -> None:
    """What a rank stores is credited to it alone, and what is placed on it reaches it and no other."""
    async with _two_ranks() as (engine, running), httpx.AsyncClient(trust_env=False) as http:

        async def ask(tokens: list[int], pin: str = "") -> httpx.Response:
            headers = {"x-gateway-pin": pin, "x-data-parallel-rank": "7"} if pin else {}
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
            answer = await http.post(f"{running.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer

        for document in range(8):
            await ask(prompt(document), f"rank-{document % 2}")
        assert engine.asked == [0, 1] * 4, "and not where the client's own header says"
        index = running.gateway.fleet._index
        await until(lambda: [index.held_blocks(f"rank-{rank}") for rank in (0, 1)] == [80, 80])
        for document in range(8):
            answer = await ask(prompt(document))
            assert answer.headers["x-gateway-replica"] == f"rank-{document % 2}"
            assert answer.headers["x-gateway-cached-tokens"] == str(20 * BLOCK)
        held, publisher = engine.ranks[1]
        hashes = engine.hashes(prompt(1))
        publisher.publish(removed(*reversed(hashes)))
        held -= set(hashes)
        await until(lambda: [index.held_blocks(f"rank-{rank}") for rank in (0, 1)] == [80, 60])
        # An event that names the other rank is none of this one's, whichever socket it came from.
        publisher._rank = 0
        publisher.publish(removed(*reversed(engine.hashes(prompt(3)))))
        publisher._rank = 1
        publisher.publish(removed(*reversed(engine.hashes(prompt(5)))))
        await until(lambda: [index.held_blocks(f"rank-{rank}") for rank in (0, 1)] == [80, 40])


async def test_dp_rank_is_identity_of_a_fetch() -> None:
    """Ranks share their engine's URL: what one is to read from another is asked of that one's own agent."""
    parts = Parts(3, engines=["http://127.0.0.1:1"] * 3, allow_pinning=True)
    asked = identity(range(4_001))
    for rank in range(3):
        parts.pool(f"replica-{rank}")
    parts.hold("replica-2", asked.keys, Tier.HBM, Tier.DRAM)
    made = exchange(asked, headers={"x-gateway-pin": "replica-0"})
    parts.place.place(made)
    assert made.placement is not None and made.placement.fetch is not None
    assert made.placement.fetch.source == "replica-2"
    (told,) = hint_fields(made, parts.fleet, "").values()
    assert json.loads(told)["prefix_gateway"]["url"] == str(parts.fleet.replicas["replica-2"].agent)
    await parts.client.aclose()


async def test_orphan_blocks_are_not_credited_at_the_gateway() -> None:
    async with claimed_cluster() as cluster:
        engine = cluster.engines[0]
        engine.publish(prompt(1), first=8)
        engine.publish(prompt(2))
        await cluster.reported(0, 20)
        assert await cluster.credited(prompt(1)) == [0]
        assert await cluster.credited(prompt(2)) == [20 * BLOCK]
        engine.publish(prompt(1)[: 8 * BLOCK])
        await cluster.reported(0, 40)
        assert await cluster.credited(prompt(1)) == [20 * BLOCK]


async def test_gap_resyncs_or_empties_at_the_gateway() -> None:
    """Events are lost that can be replayed: the gateway knows what the engine holds. Lost for good: nothing older."""
    async with claimed_cluster() as cluster:
        engine = cluster.engines[0]
        assert engine.publisher is not None
        await cluster.ask(prompt(1))
        await cluster.reported(0, 20)
        hashes = engine.hashes(prompt(1))
        engine.publisher.publish(removed(*reversed(hashes[10:])), lose=True)
        engine.publish(prompt(2))
        await cluster.reported(0, 30)
        assert (await cluster.credited(prompt(1)), await cluster.credited(prompt(2))) == ([10 * BLOCK], [20 * BLOCK])
        engine.publisher.publish(removed(*reversed(hashes[:10])), lose=True, forget=True)
        engine.publish(prompt(3))
        await cluster.reported(0, 20)
        credited = [(await cluster.credited(prompt(document)))[0] for document in (1, 2, 3)]
        assert credited == [0, 0, 20 * BLOCK]


async def test_hybrid_groups_do_not_poison_at_the_gateway() -> None:
    """A sliding window and a Mamba state of the same tokens are stored and removed: the full-attention chain stands."""
    async with claimed_cluster() as cluster:
        engine = cluster.engines[0]
        assert engine.publisher is not None
        window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
        mamba = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}
        await cluster.ask(prompt(1, 10))
        engine.publish(prompt(1, 30), **window)
        engine.publish(prompt(1, 30), first=10, **mamba)
        engine.publish(prompt(2))
        await cluster.reported(0, 30)
        assert await cluster.credited(prompt(1, 30)) == [10 * BLOCK]
        for group in (window, mamba):
            engine.publisher.publish(removed(*engine.hashes(prompt(1, 30)), group_idx=group["group_idx"]))
        engine.publisher.publish(removed(*engine.hashes(prompt(2))))
        await cluster.reported(0, 10)
        assert await cluster.credited(prompt(1, 30)) == [10 * BLOCK]


async def test_any_interleaving_is_the_fold_at_the_gateway() -> None:
    """Two replicas store and evict in any order, reports are taken anew at any time, and one gateway more comes late.

    In the end every gateway knows exactly what the engines hold.
    """
    rng = random.Random(1)
    async with claimed_cluster(2) as cluster:
        late = None
        async with contextlib.AsyncExitStack() as stack:
            for step in range(200):
                at = rng.randrange(2)
                engine, document = cluster.engines[at], prompt(rng.randrange(12), rng.randrange(4, 24))
                if rng.random() < 0.6:
                    first = engine.match(document) // BLOCK
                    engine.held |= set(engine.hashes(document))
                    engine.publish(document, first)
                else:
                    cut = rng.randrange(len(engine.hashes(document)))
                    gone = [
                        each for each in engine.hashes(prompt(document[0] // 10_000, 24))[cut:] if each in engine.held
                    ]
                    if gone:
                        engine.held -= set(gone)
                        assert engine.publisher is not None
                        engine.publisher.publish(removed(*reversed(gone)))
                if rng.random() < 0.03:
                    cluster.gateway.fleet.resync(f"replica-{at}", "asked for by a test")
                if step == 120:
                    late = await stack.enter_async_context(serving_gateway(cluster.settings))
                if rng.random() < 0.3:
                    await cluster.http.get(f"{cluster.running.admin_url}/health")
            assert late is not None
            for gateway in (cluster.gateway, late.gateway):
                fleet = gateway.fleet
                for at, engine in enumerate(cluster.engines):
                    name, index = f"replica-{at}", fleet._index
                    await until(lambda f=fleet, n=name: f.replicas[n].reporting)  # type: ignore[misc]
                    await until(lambda i=index, n=name, e=engine: i.held_blocks(n) == len(e.held))  # type: ignore[misc]
                    for document in range(12):
                        asked = prompt(document, 24)
                        keys = index.match(token_keys(Namespace(MODEL).root(SEED), asked), {name: 1}).get(name, 0)
                        assert keys * BLOCK == engine.match(asked)
                fleet._index.check()
