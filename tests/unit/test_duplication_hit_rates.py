"""Three hit rates of the same requests: what was achieved, reachable and ideal."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from path_support import BEAT, HELLO, MODEL, Parts, exchange, identity

from gateway.duplication.hit_rates import MOST_MODELS, HitRates
from gateway.duplication.ledger import Ledger
from gateway.duplication.report import Reporter, render_text
from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.path.usage import PromptTokensDetails, Usage
from gateway.placement.index import PrefixIndex

A, B, C = (identity(range(at * 1_000, at * 1_000 + 321)) for at in range(3))


def test_rates_are_quotients_of_sums() -> None:
    """Room for two of the prompts: A B A C B. The endless cache has A and B again, the bounded one A alone."""
    rates = HitRates(1 << 10)
    for prompt, cached in ((A, 0), (B, 0), (A, 0), (C, 0), (B, 160)):
        fed = rates.placed(MODEL, prompt, 1, 640)
        assert fed is not None
        rates.answered(MODEL, fed, 321, cached)
    (rate,) = rates.rates()
    assert (rate.requests, rate.prompt_tokens, rate.cached_tokens) == (5, 5 * 321, 160)
    assert (rate.reachable_tokens, rate.ideal_tokens, rate.ideal_prompt_tokens) == (640.0, 320.0, 5 * 321)
    assert rate.achieved == 160 / 1605
    assert (rate.reachable, rate.ideal) == (640 / 1605, 320 / 1605)
    rates.check()


def test_whole_blocks_count_and_the_last_token_is_computed() -> None:
    prompt = identity(range(640))
    for units, tokens in ((1, 624), (4, 576), (8, 512)):
        rates = HitRates(1 << 10)
        for _ in range(2):
            fed = rates.placed(MODEL, prompt, units, 0)
            assert fed is not None
            rates.answered(MODEL, fed, 640, 0)
        assert rates.rates()[0].reachable_tokens == tokens
        assert rates.rates()[0].ideal is None


def test_a_request_that_is_not_answered_is_fed_but_not_counted() -> None:
    rates = HitRates(1 << 10)
    assert rates.placed(MODEL, A, 1, 0) is not None
    assert rates.rates() == []
    fed = rates.placed(MODEL, A, 1, 0)
    assert fed is not None
    rates.answered(MODEL, fed, 321, 320)
    assert rates.rates()[0].reachable == rates.rates()[0].achieved


def test_models_that_are_asked_for_no_more_are_forgotten() -> None:
    """Adapters come and go for weeks, each with a cache of its own."""
    rates = HitRates(1 << 10)
    late = rates.placed("adapter-0", A, 1, 0)
    assert late is not None
    for at in range(MOST_MODELS * 3):
        for model in ("base", f"adapter-{at}"):
            fed = rates.placed(model, A, 1, 0)
            assert fed is not None
            rates.answered(model, fed, 321, 0)
        rates.check()
    found = {rate.model: rate.requests for rate in rates.rates()}
    assert len(found) == MOST_MODELS
    assert found["base"] == MOST_MODELS * 3
    assert found[f"adapter-{MOST_MODELS * 3 - 1}"] == 1
    rates.answered("adapter-0", late, 321, 0)
    assert "adapter-0" not in {rate.model for rate in rates.rates()}, "answered too late to be counted"


def test_text_is_counted_in_the_engines_tokens() -> None:
    rates = HitRates(1 << 10)
    prompt = PromptIdentity(mode=IdentityMode.TEXT, keys=array("Q", range(1, 11)), tokens=700, unit_tokens=64)
    for _ in range(2):
        fed = rates.placed(MODEL, prompt, 1, 0)
        assert fed is not None
        rates.answered(MODEL, fed, 350, 0)
    assert rates.rates()[0].reachable_tokens == 320


async def test_the_path_feeds_what_is_placed_and_counts_what_is_answered() -> None:
    parts = Parts(2)
    for replica in parts.fleet.replicas.values():
        replica.hello = msgspec.structs.replace(HELLO, replica_id=replica.id)
        replica.heartbeat = msgspec.structs.replace(BEAT, capacity_blocks=10)
    assert parts.fleet.cache_shape(MODEL) == (1, 320)
    for cached in (0, 288):
        made = exchange(A)
        parts.place.place(made)
        parts.place.unplace(made, answered=False)
        parts.place.place(made)
        made.usage = Usage(prompt_tokens=321, prompt_tokens_details=PromptTokensDetails(cached_tokens=cached))
        made.status, made.outcome = 200, "ok"
        parts.account.close(made)
    (rate,) = parts.hit_rates.rates()
    assert (rate.requests, rate.cached_tokens, rate.reachable_tokens, rate.ideal_tokens) == (2, 288, 320.0, 320.0)
    parts.fleet.replicas["replica-0"].heartbeat = None
    parts.fleet.replicas["replica-0"].hello = None
    assert parts.fleet.cache_shape(MODEL) == (1, 0), "one of them does not say"
    report = Reporter(Ledger(PrefixIndex()), hit_rates=parts.hit_rates).report()
    assert report.hit_rates == [rate]
    assert "hit rate of m: 44.9%, one endless cache 49.8%" in render_text(report)
    parts.hit_rates.check()


@pytest.mark.parametrize("tokens", [0, 15])
def test_a_prompt_without_a_whole_unit_is_not_fed(tokens: int) -> None:
    rates = HitRates(1 << 10)
    assert rates.placed(MODEL, identity(range(tokens)), 1, 0) is None
    assert rates.rates() == []
