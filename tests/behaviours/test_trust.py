"""A replica's claims are worth what its engine's answers bear out."""

from __future__ import annotations

from agent_support import removed, stored, tokens_of, until
from claimed_cluster import BLOCK, claimed_cluster, prompt

WHOLE = 20 * BLOCK


async def test_silent_clear_is_noticed() -> None:
    """The engine's cache is gone and nobody says so: the first answer that contradicts them ends their credit."""
    async with claimed_cluster(2) as cluster:
        for document in range(4):
            await cluster.ask(prompt(document), pin=0)
        await cluster.ask(prompt(0), pin=1)
        await cluster.reported(0, 80)
        await cluster.reported(1, 20)
        agreed = await cluster.ask(prompt(1), pin=0)
        assert (agreed["reported_tokens"], agreed["cached_tokens"], agreed["trust"]) == (WHOLE, WHOLE, 1.0)
        assert await cluster.credited(prompt(2)) == [WHOLE, 0]

        cluster.engines[0].held.clear()
        contradicted = await cluster.ask(prompt(3), pin=0)
        assert (contradicted["predicted_cached_tokens"], contradicted["cached_tokens"]) == (WHOLE, 0)
        await cluster.judged(0, 2)

        await cluster.taken_anew(0, 1)
        await cluster.reported(0, 80)
        told = await cluster.explain(prompt(2))
        assert [(each["reported_tokens"], each["trust"], each["cached_tokens"]) for each in told] == [
            (WHOLE, 0.0, 0),
            (0, 1.0, 0),
        ]
        assert await cluster.credited(prompt(0)) == [0, WHOLE], "the other replica's claims are its own"
        state = await cluster.trust(0)
        assert (state["contradicted"], state["quarantines"], state["credit"]) == (1, 1, 0.0)
        assert "320 tokens" in state["why"]
        metrics = await cluster.metrics()
        assert 'prefix_gateway_replica_trust{replica="replica-0"} 0.0' in metrics
        assert 'prefix_gateway_quarantines_total{replica="replica-0"} 1.0' in metrics


async def test_a_quarantine_ends_and_trust_comes_back() -> None:
    """After it half of a claim is believed, and all of it after eight requests that agree."""
    async with claimed_cluster() as cluster:
        await cluster.ask(prompt(1))
        await cluster.reported(0, 20)
        cluster.engines[0].held.clear()
        await cluster.ask(prompt(1))
        await cluster.judged(0, 1)
        await cluster.taken_anew(0, 1)
        assert await cluster.credited(prompt(1)) == [0]
        cluster.passed_s += 5.0
        assert await cluster.credited(prompt(1)) == [WHOLE // 2]
        for judged in range(2, 10):
            assert (await cluster.trust(0))["standing"] == "discounted"
            receipt = await cluster.ask(prompt(1))
            assert receipt["cached_tokens"] == WHOLE > receipt["predicted_cached_tokens"]
            await cluster.judged(0, judged)
        assert await cluster.credited(prompt(1)) == [WHOLE]
        assert (await cluster.trust(0))["standing"] == "trusted"
        cluster.gateway.fleet.trust.check()


async def test_an_eviction_that_is_reported_is_no_lie() -> None:
    """The engine evicts between a request's placement and its turn: nobody is distrusted for that."""
    async with claimed_cluster() as cluster:
        await cluster.ask(prompt(1))
        await cluster.reported(0, 20)
        engine = cluster.engines[0]

        async def evict() -> None:
            engine.evict(prompt(1))
            await cluster.reported(0, 0)

        engine.before_turn = evict
        receipt = await cluster.ask(prompt(1))
        assert (receipt["reported_tokens"], receipt["cached_tokens"]) == (WHOLE, 0)
        trust = cluster.gateway.fleet.trust
        await until(lambda: trust._watched == {}, "the claim was not withdrawn")
        engine.before_turn = None
        await cluster.reported(0, 20)
        await cluster.ask(prompt(1))
        await cluster.judged(0, 1)
        assert trust.state("replica-0").contradicted == 0
        assert await cluster.credited(prompt(1)) == [WHOLE]


async def test_an_eviction_that_is_told_together_with_what_came_after_it_is_no_lie() -> None:
    """In one batch of events the engine says that the prompt's blocks went and that they are computed again."""
    async with claimed_cluster() as cluster:
        await cluster.ask(prompt(1))
        await cluster.reported(0, 20)
        engine = cluster.engines[0]

        async def evict_and_compute() -> None:
            assert engine.publisher is not None
            hashes: list[int | bytes] = list(engine.hashes(prompt(1)))
            engine.held.clear()
            engine.publisher.publish(removed(*reversed(hashes)), stored(hashes, prompt(1)[:WHOLE]))

        engine.before_turn = evict_and_compute
        receipt = await cluster.ask(prompt(1))
        assert (receipt["reported_tokens"], receipt["cached_tokens"]) == (WHOLE, 0)
        engine.before_turn = None
        trust = cluster.gateway.fleet.trust
        await until(lambda: trust._watched == {}, "the claim was not withdrawn")
        await cluster.reported(0, 20)
        await cluster.ask(prompt(1))
        await cluster.judged(0, 1)
        state = trust.state("replica-0")
        assert (state.contradicted, state.quarantines, state.credit) == (0, 0, 1.0)


async def test_duplicate_copies_are_counted_at_the_gateway() -> None:
    """An engine that reports blocks again without having removed them leaves its agent with copies that never end.

    Its first contradiction makes its reports worthless, and the next for twice as long: of 12 requests, a second apart,
    for prompts that it does not hold, at most two are predicted as hits.
    """
    async with claimed_cluster() as cluster:
        engine = cluster.engines[0]
        engine.restores = True
        for document in range(12):
            for _ in range(2):
                await cluster.ask(prompt(document))
        await cluster.reported(0, 240)
        trust = cluster.gateway.fleet.trust
        cluster.passed_s += 1.0
        await until(lambda: not trust._watched, "what agreed is not judged")
        before = trust.state("replica-0").judged
        for document in range(12):
            engine.evict(prompt(document))
        engine.restores = False
        engine.publisher.publish(stored([999], tokens_of(999)))
        await cluster.reported(0, 241)
        wrong = []
        for document in range(12):
            receipt = await cluster.ask(prompt(document))
            assert (receipt["reported_tokens"], receipt["cached_tokens"]) == (WHOLE, 0), "the reports still claim it"
            wrong.append(receipt["predicted_cached_tokens"] > 0)
            await cluster.judged(0, before + document + 1)
            await cluster.taken_anew(0, trust.state("replica-0").quarantines)
            await cluster.reported(0, 241)
        assert wrong[0] and sum(wrong) <= 2, wrong
        trust.check()


async def test_a_client_that_passes_over_the_cache_harms_nobody() -> None:
    """vLLM computes a whole prompt whose own probabilities are asked for, whatever it has cached."""
    async with claimed_cluster() as cluster:
        await cluster.ask(prompt(1))
        await cluster.reported(0, 20)
        cluster.engines[0].held.clear()
        await cluster.ask(prompt(1), prompt_logprobs=1)
        cluster.engines[0].held.clear()
        await cluster.ask(prompt(1), echo=True)
        trust = cluster.gateway.fleet.trust
        assert trust._watched == {}
        assert trust.state("replica-0").judged == 0
        assert await cluster.credited(prompt(1)) == [WHOLE]
